"""Single tokens are spelt as the bytes that they stand for, and found in the text they encode."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.text.tokenizer import Tokenizer

KINDS = ["byte_level", "llama", "gemma", "metaspace", "metaspace_never"]
TEXTS = [
    "Hello, the quick brown fox.",
    "🙂👩‍👩‍👧 日本 Grüße",
    "line\n\nbreaks <tool_call> x",
    "é 工具",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_join_to_the_text(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """Characters that several tokens make up are whole again when their bytes are joined."""
    tokenizer = tokenizers_by_kind[kind]
    token_ids = tokenizer.encode(text)
    joined = b"".join(map(tokenizer.token_bytes, token_ids)).decode("utf-8", "replace")
    # SentencePiece writes a space before the first word, which whole decoding takes off again.
    assert joined.removeprefix(" ") == tokenizer.decode(token_ids).removeprefix(" ")


def test_special_tokens_are_spelt_as_templates_write_them(chat_tokenizer: Tokenizer) -> None:
    """They have no text in an answer, but a name among the log-probabilities."""
    (token,) = chat_tokenizer.encode("<|end|>", add_special_tokens=False)
    assert chat_tokenizer.token_bytes(token) == b"<|end|>"
    assert chat_tokenizer.token_bytes(chat_tokenizer.vocab_size + 5) == b""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_offsets_are_where_each_token_begins(
    tokenizers_by_kind: dict[str, Tokenizer], kind: str, text: str
) -> None:
    """Decoding the tokens before one gives the text before it, but for an unfinished character."""
    tokenizer = tokenizers_by_kind[kind]
    token_ids = tokenizer.encode(text)
    decoded = tokenizer.decode(token_ids)
    offsets = tokenizer.token_offsets(token_ids, decoded)
    assert offsets[0] == 0
    for index, offset in enumerate(offsets):
        before = tokenizer.decode(token_ids[:index]).rstrip("\N{REPLACEMENT CHARACTER}")
        if len(before) != offset:
            # A run of bytes counts as text only once it has ended.
            assert kind != "byte_level"
            assert before.startswith(decoded[:offset])


def test_special_tokens_count_where_the_text_holds_them(chat_tokenizer: Tokenizer) -> None:
    """One that was added has no length; one that the client wrote has its own."""
    text = "<|start|>ab<|end|>cd"
    token_ids = chat_tokenizer.encode(text)
    offsets = chat_tokenizer.token_offsets(token_ids, text)
    names = [chat_tokenizer.token_bytes(token) for token in token_ids]
    assert (names[0], offsets[0], offsets[1]) == (b"<|bos|>", 0, 0)
    assert offsets[names.index(b"<|end|>")] == text.index("<|end|>")
    assert offsets[names.index(b"<|end|>") + 1] == text.index("cd")


def test_a_tokenizer_written_in_python_spells_too(python_tokenizer: Tokenizer) -> None:
    """Without a Rust backend, each token is decoded by itself."""
    token_ids = python_tokenizer.encode("abc", add_special_tokens=False)
    assert [python_tokenizer.token_bytes(token) for token in token_ids] == [b"a", b"b", b"c"]
    assert python_tokenizer.copy().token_bytes(token_ids[0]) == b"a"
    assert python_tokenizer.token_offsets(token_ids, "abc") == [0, 1, 2]
