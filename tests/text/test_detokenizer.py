"""Streamed text equals the text of all tokens decoded at once, for every kind of vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_mlx.engine.text import detokenizer as detokenizer_module
from vllm_mlx.engine.text.detokenizer import (
    ByteLevelDetokenizer,
    SentencePieceDetokenizer,
    WindowDetokenizer,
)
from vllm_mlx.engine.text.tokenizer import Tokenizer

KINDS = ["byte_level", "llama", "gemma", "metaspace", "metaspace_never", "word_piece"]
TEXTS = [
    "Hello, the quick brown fox.",
    "  two leading spaces and  two inside ",
    "🙂👩‍👩‍👧🏳️‍🌈",
    "数学は楽しい。한국어 Добрый",
    "don't , do . not ! clean ?",
    "line\n\nbreaks\ttabs\r\n",
    "\N{REPLACEMENT CHARACTER} said on purpose",
    "",
]


def stream(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[str]:
    """Return the text after each token, and at the end."""
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_streamed_text_equals_decode(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """Encoded text comes back in pieces as it comes back whole."""
    tokenizer = tokenizers_by_kind[kind]
    token_ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_tokens_stream_as_they_decode(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Invalid bytes, special tokens, added tokens and unknown ids change nothing in that."""
    tokenizer = tokenizers_by_kind[kind]
    ids = st.integers(0, tokenizer.vocab_size + 2)
    token_ids = data.draw(st.lists(ids, max_size=30))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_bytes_stream_as_they_decode(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, data: st.DataObject
) -> None:
    """Runs of single bytes, valid UTF-8 or not, stream as they decode."""
    tokenizer = tokenizers_by_kind[kind]
    text = data.draw(st.text(max_size=6)).encode("utf-8", "surrogatepass")
    noise = data.draw(st.binary(max_size=4))
    at = data.draw(st.integers(0, len(text)))
    names = _byte_tokens(tokenizer, kind, text[:at] + noise + text[at:])
    space = tokenizer.encode(" a")
    token_ids = [*names[: at + 2], *space, *names[at + 2 :]]
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


def _byte_tokens(tokenizer: Tokenizer, kind: str, data: bytes) -> list[int]:
    """Return the tokens that stand for single bytes."""
    if kind == "byte_level":
        alphabet = {byte: char for char, byte in detokenizer_module._byte_level_alphabet().items()}
        names = [alphabet[byte] for byte in data]
    else:
        names = [f"<0x{byte:02X}>" for byte in data]
    return [tokenizer._backend.token_to_id(name) for name in names]


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_a_split_character_is_held_until_it_is_whole(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    """No half of an emoji is ever shown, and the whole of it is not lost."""
    tokenizer = tokenizers_by_kind[kind]
    token_ids = [*_byte_tokens(tokenizer, kind, "🙂".encode()), *tokenizer.encode("fox")]
    pieces = stream(tokenizer, token_ids)
    assert pieces[:3] == ["", "", ""]
    assert "🙂" in "".join(pieces)
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "gemma"])
def test_flush_shows_an_incomplete_character(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    """A row that ends inside a character ends with U+FFFD, as decode says it."""
    tokenizer = tokenizers_by_kind[kind]
    token_ids = _byte_tokens(tokenizer, kind, "🙂".encode()[:3])
    pieces = stream(tokenizer, token_ids)
    assert pieces[:-1] == ["", "", ""]
    assert pieces[-1] == tokenizer.decode(token_ids)
    assert "\N{REPLACEMENT CHARACTER}" in pieces[-1]


@pytest.mark.parametrize("kind", ["byte_level", "llama"])
def test_special_tokens_never_reach_text_but_markers_do(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str
) -> None:
    """Special tokens vanish in mid-text; an added token that is not special is text."""
    tokenizer = tokenizers_by_kind[kind]
    special = "<|end|>" if kind == "byte_level" else "</s>"
    token_ids = tokenizer.encode(f"one{special} two<tool_call>")
    assert tokenizer._backend.token_to_id(special) in token_ids
    text = "".join(stream(tokenizer, token_ids))
    assert special not in text
    assert "<tool_call>" in text


def test_each_kind_gets_its_detokenizer(tokenizers_by_kind: dict[str, Tokenizer]) -> None:
    """The exact detokenizers serve the common kinds; only the others need the window."""
    expected = {
        "byte_level": ByteLevelDetokenizer,
        "llama": SentencePieceDetokenizer,
        "gemma": SentencePieceDetokenizer,
        "metaspace": SentencePieceDetokenizer,
        "metaspace_never": SentencePieceDetokenizer,
        "word_piece": WindowDetokenizer,
    }
    assert {k: type(t.detokenizer()) for k, t in tokenizers_by_kind.items()} == expected


@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_tokens_take_linear_work(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token is decoded a bounded number of times, whatever came before it."""
    tokenizer = tokenizers_by_kind[kind].copy()
    tokenizer._new_detokenizer = None
    decoded = 0
    whole = tokenizer.decode

    def counting_decode(token_ids: Sequence[int], **options: bool) -> str:
        nonlocal decoded
        decoded += len(token_ids)
        return whole(token_ids, **options)

    monkeypatch.setattr(tokenizer, "decode", counting_decode)
    token_ids = (tokenizer.encode("hello world the 🙂 fox. ") * 10_000)[:10_000]
    assert "".join(stream(tokenizer, token_ids)) == whole(token_ids)
    assert decoded <= 2 * (1 + detokenizer_module._MAX_PENDING) * 10_000


@pytest.mark.parametrize("kind", ["byte_level", "gemma", "word_piece"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_window_streams_valid_text_of_any_kind(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """Decoding by windows holds split characters back, for decoders it does not know."""
    tokenizer = tokenizers_by_kind[kind]
    token_ids = tokenizer.encode(text)
    detokenizer = WindowDetokenizer(tokenizer.decode, lambda token_id: True)
    pieces = [*map(detokenizer.add, token_ids), detokenizer.flush()]
    assert "".join(pieces) == tokenizer.decode(token_ids)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=12), noise=st.lists(st.integers(0, 400), max_size=6))
def test_a_tokenizer_written_in_python_streams_too(
    python_tokenizer: Tokenizer, text: str, noise: list[int]
) -> None:
    """Text, special tokens and ids beyond the vocabulary stream as they decode."""
    token_ids = [*python_tokenizer.encode(text), *noise]
    assert "".join(stream(python_tokenizer, token_ids)) == python_tokenizer.decode(token_ids)


def test_the_window_gives_up_on_a_character_that_never_ends() -> None:
    """A tokenizer that decodes to U+FFFD without end is neither held for ever nor re-decoded."""
    lengths: list[int] = []

    def decode(token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return "\N{REPLACEMENT CHARACTER}" * len(token_ids)

    detokenizer = WindowDetokenizer(decode, lambda token_id: True)
    text = "".join([*(detokenizer.add(1) for _ in range(1000)), detokenizer.flush()])
    assert text == "\N{REPLACEMENT CHARACTER}" * 1000
    assert max(lengths) <= 2 * detokenizer_module._MAX_PENDING
