"""Let a mixture of experts ask fewer of them for each token, by way of its configuration; pure."""

from __future__ import annotations

from typing import Any

from vllm_mlx.engine.errors import UnsupportedModelError

#: What the models of mlx-lm 0.32.2 call the experts asked for a token, and those there are.
_ASKED = (
    *("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k"),
    "top_k_experts",
)
_ALL = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
#: Where checkpoints of several parts keep what concerns the language model.
_NESTED = ("text_config", "llm_config", "language_config")


def with_fewer_experts(document: dict[str, Any], num_experts: int) -> dict[str, Any]:
    """Return the fields of a config.json that change where a token asks `num_experts` only.

    Raises UnsupportedModelError for a model without experts, and for more than it asks by itself.
    """
    nested = {name: document[name] for name in _NESTED if isinstance(document.get(name), dict)}
    parts = [document, *nested.values()]
    asked = max(_most(part.get(name)) for part in parts for name in _ASKED)
    if asked == 0 or max(_most(part.get(name)) for part in parts for name in _ALL) < 2:
        raise UnsupportedModelError(
            f"model type {document.get('model_type')!r} is no mixture of experts: it has no number "
            "of experts to change (--moe-top-k)"
        )
    if not 1 <= num_experts <= asked:
        raise UnsupportedModelError(
            f"this model asks {asked} experts for each token: --moe-top-k can be 1 to {asked}, "
            f"not {num_experts}"
        )
    changed = _cut(document, num_experts)
    for name, part in nested.items():
        if fewer := _cut(part, num_experts):
            changed[name] = {**part, **fewer}
    return changed


def _most(value: object) -> int:
    """Return a number, or the largest of one for each layer; 0 for anything else."""
    if isinstance(value, list):
        return max((_most(item) for item in value), default=0)
    return value if isinstance(value, int) and not isinstance(value, bool) else 0


def _cut(part: dict[str, Any], most: int) -> dict[str, Any]:
    """Return the fields that ask for experts, none of them for more than `most`."""
    return {
        name: [min(item, most) for item in value] if isinstance(value, list) else min(value, most)
        for name, value in part.items()
        if name in _ASKED and _most(value) > 0
    }
