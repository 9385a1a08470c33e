"""Make the folder of a model with random weights: its configuration and a synthetic tokenizer.

The tokenizer has a token for every byte, two special ones, and made-up words in place of the rest
of the vocabulary, so that whatever a model draws is text, and that text is the same tokens again.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from vllm_mlx.engine.models.byte_level import byte_level_tokenizer
from vllm_mlx.engine.models.cached_folder import ensure_folder, user_cache_dir
from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES, DummyShape
from vllm_mlx.engine.models.progress import ProgressCallback

#: Raise it whenever the same shape must give other files.
_FORMAT_VERSION = 1

_SPECIAL = ("<|im_start|>", "<|im_end|>")
_START_ID, _END_ID = range(len(_SPECIAL))
_CONSONANTS = "bcdfghjklmnpqrstvwxz"
_VOWELS = "aeiou"
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def ensure_dummy_folder(name: str, on_progress: ProgressCallback) -> Path:
    """Return the folder of the shape `name` in the user's cache, made at first use; no weights.

    Safe with several processes at once. Raises ModelLoadError if the cache cannot be written.
    """
    shape = DUMMY_SHAPES[name]
    return ensure_folder(
        user_cache_dir() / "dummy" / name,
        format_version=_FORMAT_VERSION,
        source=json.dumps(shape.document(), sort_keys=True),
        build=partial(write_dummy_folder, shape=shape),
        on_wait=partial(on_progress, "waiting for another process to write", None),
    )


def write_dummy_folder(folder: Path, *, shape: DummyShape) -> None:
    """Write config.json and the tokenizer of a shape into a folder that exists."""
    special_ids = {"bos_token_id": _START_ID, "eos_token_id": _END_ID}
    files: dict[str, dict[str, Any]] = {
        "config.json": {**shape.document(), **special_ids},
        "tokenizer.json": _tokenizer(shape.vocab_size),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": _SPECIAL[_START_ID],
            "eos_token": _SPECIAL[_END_ID],
            "clean_up_tokenization_spaces": False,
            "model_max_length": shape.config["max_position_embeddings"],
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")


def _tokenizer(vocab_size: int) -> dict[str, Any]:
    return byte_level_tokenizer(
        _vocabulary(vocab_size), dict(enumerate(_SPECIAL)), ignores_merges=True
    )


def _vocabulary(size: int) -> list[str]:
    known = [*_SPECIAL, *_byte_letters()]
    return known + [f"Ġ{_word(number)}" for number in range(size - len(known))]


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level vocabularies, GPT-2's way."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [shifted.get(byte, chr(byte)) for byte in range(256)]


def _word(number: int) -> str:
    """Spell a number in syllables; no two are alike."""
    count = len(_CONSONANTS) * len(_VOWELS)
    syllables = []
    while True:
        number, digit = divmod(number, count)
        syllables.append(_CONSONANTS[digit // len(_VOWELS)] + _VOWELS[digit % len(_VOWELS)])
        if number == 0:
            return "".join(reversed(syllables))
