"""Hold docs/http-api.md to the code, and the words on fields to the field policy."""

from __future__ import annotations

from pathlib import Path

from vllm_mlx.engine.errors import RequestError, error_classes
from vllm_mlx.server.http_api_page import EFFECTS, page
from vllm_mlx.server.openai.fields import FieldUse
from vllm_mlx.server.openapi import POLICIES

ROOT = Path(__file__).resolve().parents[2]


def test_every_enforced_field_has_its_effect_in_words() -> None:
    """And no other field has: what is not enforced has none."""
    enforced = {
        schema: {name for name, policy in policies.items() if policy.use is FieldUse.ENFORCED}
        for schema, policies in POLICIES.items()
    }
    assert {schema: set(effects) for schema, effects in EFFECTS.items()} == enforced


def test_the_page_is_up_to_date_and_leaves_nothing_out() -> None:
    """Every field with its class, and every error of a request with its code, is on it."""
    text = (ROOT / "docs" / "http-api.md").read_text(encoding="utf-8")
    assert text == page(), "run python -m vllm_mlx.server.http_api_page --write"
    fields = {
        f"| `{name}` | {policy.use.value} |"
        for policies in POLICIES.values()
        for name, policy in policies.items()
    }
    assert {field for field in fields if field not in text} == set()
    codes = {code for code, cls in error_classes().items() if issubclass(cls, RequestError)}
    assert {code for code in codes if f"| `{code}` |" not in text} == set()
