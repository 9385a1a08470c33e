"""Spell single tokens, and say where each token of a prompt lies in its text."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_mlx.engine.text.detokenizer import (
    Detokenizer,
    PieceOf,
    byte_level_pieces,
    decoder_spec,
    parse_rules,
    sentencepiece_pieces,
)

#: Returns the bytes that a token stands for, whatever comes before or after it.
Spell = Callable[[int], bytes]


def make_spell(
    decoder_state: bytes | None,
    piece_of: PieceOf,
    special_of: PieceOf,
    decode: Callable[[Sequence[int]], str],
) -> Spell:
    """Return what spells the tokens of a `tokenizers` decoder.

    A token may be part of a character only, so its spelling is bytes. Special tokens
    (`special_of`) are spelt as they are written in templates, ids outside the vocabulary as
    nothing. `decode` is the tokenizer's own decoding, for decoders of any other kind.
    """
    spell = _ordinary_spell(decoder_state, piece_of, decode)

    def spell_any(token_id: int) -> bytes:
        special = special_of(token_id)
        return spell(token_id) if special is None else special.encode("utf-8")

    return spell_any


def token_offsets(
    token_ids: Sequence[int], text: str, detokenizer: Detokenizer, special_of: PieceOf
) -> list[int]:
    """Return the character of `text`, which `token_ids` encode, where each token begins.

    Tokens that only begin a character lie where it does. Special tokens that the text does not
    hold (a beginning of sequence that was added) have no length. Where the tokenizer normalises
    text, offsets are those of the normalised text, and never beyond the end of `text`.
    """
    offsets, position = [], 0
    for token_id in token_ids:
        offsets.append(min(position, len(text)))
        special = special_of(token_id)
        if special is None:
            position += len(detokenizer.add(token_id))
        elif text.startswith(special, position):
            position += len(special)
    return offsets


def _ordinary_spell(
    decoder_state: bytes | None,
    piece_of: PieceOf,
    decode: Callable[[Sequence[int]], str],
) -> Spell:
    spec = decoder_spec(decoder_state)
    if spec.get("type") == "ByteLevel":
        table = byte_level_pieces(piece_of)
        return lambda token_id: bytes(table[token_id])
    rules = parse_rules(spec)
    if rules is None:
        return lambda token_id: decode([token_id]).encode("utf-8")
    pieces = sentencepiece_pieces(piece_of, rules)

    def spell(token_id: int) -> bytes:
        text, byte, _ = pieces[token_id]
        if byte is not None:
            return bytes([byte])
        return b"" if text is None else str(text).encode("utf-8")

    return spell
