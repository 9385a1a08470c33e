"""llguidance and the project's own spelling agree on every token, in vocabularies of each kind."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vllm_mlx.engine.core.grammar import GrammarCompiler
from vllm_mlx.engine.text.tokenizer import Tokenizer

GRAMMAR = "%llguidance {}\nstart: %json " + json.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
)
ANSWER = '{"a": "Zoë 日本 <tool> \\"q\\"", "b": -17}'
KINDS = ["byte_level", "llama", "gemma", "metaspace", "metaspace_never"]
#: Those whose tokens can spell any text.
WHOLE = KINDS[:3]


@pytest.mark.parametrize("kind", KINDS)
def test_both_spell_every_token_alike(kind: str, tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """What a grammar takes a token for is what the answer's text will have of it."""
    tokenizer = tokenizers_by_kind[kind]
    compiler = GrammarCompiler(tokenizer)
    different: list[Any] = []
    for token in range(tokenizer.vocab_size):
        theirs, ours = compiler.tokenizer.decode_bytes([token]), tokenizer.token_bytes(token)
        if theirs != ours and not compiler.tokenizer.is_special_token(token):
            different.append((token, theirs, ours))
    assert different == []
    assert set(compiler.special_tokens.values()) >= tokenizer.special_token_ids


@pytest.mark.parametrize("kind", WHOLE)
def test_a_grammar_holds_over_each_kind(
    kind: str, tokenizers_by_kind: dict[str, Tokenizer]
) -> None:
    """The tokens of an answer are allowed one after the other, and only an end may follow."""
    _follow(tokenizers_by_kind[kind])


def test_a_grammar_holds_over_a_tokenizer_written_in_python(python_tokenizer: Tokenizer) -> None:
    """One that llguidance cannot read is spelt out to it, as far as its tokens are text."""
    _follow(python_tokenizer, ANSWER.encode("ascii", "ignore").decode())


def _follow(tokenizer: Tokenizer, answer: str = ANSWER) -> None:
    matcher = GrammarCompiler(tokenizer).compile(GRAMMAR)
    tokens = tokenizer.encode(answer, add_special_tokens=False)
    text = b"".join(map(tokenizer.token_bytes, tokens))
    if text.startswith(b" "):
        # Of a prompt's first token only: such tokenizers begin every text with a space.
        tokens = tokenizer.encode(answer[1:], add_special_tokens=False)
        first = next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == b"{")
        tokens = [first, *_without_space(tokenizer, tokens)]
    for token in tokens:
        mask = matcher.compute_bitmask()
        assert mask[token // 8] >> token % 8 & 1, (token, tokenizer.token_bytes(token))
        assert matcher.consume_token(token)
    assert matcher.is_stopped()
    assert matcher.is_accepting()


def _without_space(tokenizer: Tokenizer, tokens: list[int]) -> list[int]:
    bare = tokenizer.token_bytes(tokens[0])[1:]
    if not bare:
        return tokens[1:]
    first = next(t for t in range(tokenizer.vocab_size) if tokenizer.token_bytes(t) == bare)
    return [first, *tokens[1:]]
