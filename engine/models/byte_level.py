"""Describe a byte-level BPE tokenizer as the `tokenizers` library stores it; pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_FLAGS = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}


def byte_level_tokenizer(
    vocabulary: Sequence[str],
    special: Mapping[int, str],
    *,
    merges: Sequence[str] = (),
    splits_digits: bool = False,
    ignores_merges: bool = False,
) -> dict[str, Any]:
    """Return the content of a tokenizer.json.

    `special` are tokens of the vocabulary that stand for themselves, by id. With `ignores_merges`
    a word of the vocabulary is one token, though nothing is merged into it.
    """
    pre_tokenizer: dict[str, Any] = _BYTE_LEVEL
    if splits_digits:
        digits = {"type": "Digits", "individual_digits": True}
        pre_tokenizer = {"type": "Sequence", "pretokenizers": [digits, _BYTE_LEVEL]}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **_FLAGS, "special": True}
            for index, token in special.items()
        ],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignores_merges,
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "merges": list(merges),
        },
    }
