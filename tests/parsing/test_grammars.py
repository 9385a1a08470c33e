"""Hold every format's grammar to llguidance: it compiles, takes rendered calls, and only calls."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from parsing.formats import ANSWERS, Answers
from parsing.harness import TOOLS, parse

from vllm_mlx.engine.parsing import TOOL_PARSERS
from vllm_mlx.engine.parsing.tool_format import ToolFormat

#: Arguments of which none is open-ended, so that a random walk through a grammar ends.
SETTINGS: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "set",
        "parameters": {
            "type": "object",
            "properties": {
                "unit": {"enum": ["metric", "imperial"]},
                "level": {"type": "integer", "minimum": 1, "maximum": 50},
                "is_loud": {"type": "boolean"},
                "places": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
            },
            "required": ["unit"],
            "additionalProperties": False,
        },
    },
}


class ByteTokens:
    """Tokenize by bytes, except for special tokens, which follow the bytes and the end marker."""

    def __init__(self, special: Sequence[str] = ()) -> None:
        self.special = {text: 257 + index for index, text in enumerate(special)}
        self.tokens = [bytes([byte]) for byte in range(256)] + [b"<eos>"]
        self.tokens += [text.encode() for text in special]
        self.eos_token_id, self.bos_token_id = 256, None
        self.special_token_ids = [256, *self.special.values()]

    def __call__(self, text: bytes | str) -> list[int]:
        """Return the bytes of `text`."""
        return list(text if isinstance(text, bytes) else text.encode())

    def encode(self, text: str) -> list[int]:
        """Encode with special tokens where their text stands."""
        found: list[int] = []
        for part in re.split(f"({'|'.join(map(re.escape, self.special)) or '(?!)'})", text):
            found += [self.special[part]] if part in self.special else self(part)
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode, special tokens as their text."""
        return b"".join(self.tokens[token] for token in tokens).decode()

    def matcher(self, grammar: str) -> llguidance.LLMatcher:
        """Compile a grammar over these tokens."""
        wrapped = llguidance.TokenizerWrapper(self)
        matcher = llguidance.LLMatcher(llguidance.LLTokenizer(wrapped), grammar)
        assert matcher.get_error() == ""
        return matcher


BYTES = ByteTokens()


def special_tokens(kind: type[ToolFormat]) -> list[str]:
    """Return the markers of a format that look like special tokens."""
    leaf = kind.members[0] if kind.members else kind
    rendered = leaf.render_call("get", {})
    found = re.findall(r"<[|｜][^<>]*[|｜]?>|\[[A-Z_]+\]", rendered)
    return list(dict.fromkeys(found))


@pytest.fixture(params=ANSWERS, ids=lambda answers: answers.tools)
def answers(request: pytest.FixtureRequest) -> Answers:
    """Give the way to write answers in each format in turn."""
    return request.param  # type: ignore[no-any-return]


CALLS: list[tuple[str, Mapping[str, Any]]] = [
    ("get", {}),
    ("write-file", {"path": "a b", "text": 'two\nlines, "quoted" <b> & {x}'}),
    ("get_weather", {"city": "Zürich", "days": 3, "limit": 1.5, "is_metric": True}),
    ("get_weather", {"city": "x", "tags": ["a", "b"]}),
]


@pytest.mark.parametrize("is_special", [False, True], ids=["text", "special"])
def test_a_grammar_takes_its_own_calls(answers: Answers, is_special: bool) -> None:
    """A rendered call is accepted whole, its markers being text or special tokens."""
    kind = TOOL_PARSERS[answers.tools]
    tokens = ByteTokens(special_tokens(kind)) if is_special else BYTES
    for call in CALLS:
        matcher = tokens.matcher(kind.grammar(TOOLS, special_tokens=tokens.special))
        encoded = tokens.encode(kind.render_calls([call]))
        assert matcher.try_consume_tokens(encoded) == len(encoded), call
        assert matcher.is_accepting()


def test_a_grammar_takes_several_calls_only_if_told(answers: Answers) -> None:
    """With `parallel` two calls are accepted; without, the second is refused."""
    kind = TOOL_PARSERS[answers.tools]
    encoded = BYTES.encode(kind.render_calls(CALLS[:2]))
    several = BYTES.matcher(kind.grammar(TOOLS, parallel=True))
    assert several.try_consume_tokens(encoded) == len(encoded)
    assert several.is_accepting()
    single = BYTES.matcher(kind.grammar(TOOLS))
    assert single.try_consume_tokens(encoded) < len(encoded)


def test_a_grammar_of_one_tool_refuses_the_others(answers: Answers) -> None:
    """A call to a tool that is not asked for is refused within its name, and plain text at once."""
    kind = TOOL_PARSERS[answers.tools]
    text = kind.render_calls([CALLS[1]])
    matcher = BYTES.matcher(kind.grammar([TOOLS[0]]))
    assert matcher.try_consume_tokens(BYTES.encode(text)) <= len(
        text[: text.index("write")].encode()
    )
    assert BYTES.matcher(kind.grammar(TOOLS)).try_consume_tokens(BYTES.encode("Well")) == 0


@pytest.mark.parametrize("seed", range(2))
def test_what_a_grammar_allows_is_a_call(answers: Answers, seed: int) -> None:
    """Random text that follows the grammar is parsed to one call that follows the schema."""
    kind = TOOL_PARSERS[answers.tools]
    text = _random_text(BYTES, kind.grammar([SETTINGS]), random.Random(seed))
    parsed = parse([text], tools=answers.tools, tool_schemas=[SETTINGS])
    assert [name for name, _ in parsed.values()] == ["set"], text
    assert parsed.content == ""
    jsonschema.validate(parsed.values()[0][1], SETTINGS["function"]["parameters"])


def _random_text(tokens: ByteTokens, grammar: str, rng: random.Random) -> str:
    """Walk through a grammar by chance, with little white space, to its end."""
    matcher = tokens.matcher(grammar)
    bitmask = allocate_token_bitmask(1, len(tokens.tokens))
    found: list[int] = []
    while not (matcher.is_accepting() and (matcher.is_stopped() or rng.random() < 0.3)):
        fill_next_token_bitmask(matcher, bitmask)
        bits = np.unpackbits(bitmask.view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits) if token != tokens.eos_token_id]
        if not allowed:
            break
        visible = [token for token in allowed if tokens.tokens[token] not in (b" ", b"\n", b"\t")]
        token = rng.choice(visible if visible and rng.random() < 0.9 else allowed)
        found.append(token)
        assert matcher.consume_token(token)
        assert len(found) < 5000, tokens.decode(found[:300])
    return tokens.decode(found)
