"""Turn stored tokens back into words, with a model's tokenizer where it is on this machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_mlx.engine.core.outputs import unpack_tokens
from vllm_mlx.engine.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: More than any beginning that is shown has.
_MAX_TOKENS = 64
_MAX_CHARACTERS = 72

#: Returns the folder of a model by the name that it was served under; None if it is not here.
FindFolder = Callable[[str], Path | None]


class FirstWords:
    """Decode the first words of token lists; loads each model's tokenizer once, when needed.

    `tokenizer`, a `tokenizer.json` or a folder that has one, is used for every model; without it
    `find_folder` says where a model is. Used by one thread.
    """

    def __init__(self, tokenizer: Path | None, find_folder: FindFolder) -> None:
        self._given = tokenizer
        self._find_folder = find_folder
        self._loaded: dict[str, Tokenizer | None] = {}

    @property
    def models_without(self) -> list[str]:
        """Return the models whose tokens could not be decoded."""
        return [model for model, loaded in self._loaded.items() if loaded is None]

    def __call__(self, model: str, tokens: bytes) -> str | None:
        """Return the first words that packed tokens stand for; None without a tokenizer.

        Raises UsageError if the given tokenizer cannot be read.
        """
        if model not in self._loaded:
            self._loaded[model] = self._load(model)
        tokenizer = self._loaded[model]
        if tokenizer is None:
            return None
        ids = unpack_tokens(tokens)[:_MAX_TOKENS]
        text = " ".join(tokenizer.decode(ids, skip_special_tokens=False).split())
        return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 1] + "…"

    def _load(self, model: str) -> Tokenizer | None:
        from tokenizers import Tokenizer

        path = self._given if self._given is not None else self._find_folder(model)
        if path is not None and path.is_dir():
            path = path / "tokenizer.json"
        if path is None or (self._given is None and not path.is_file()):
            return None
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:
            # The library raises no narrower class.
            if self._given is None:
                return None
            raise UsageError(f"{path} cannot be read as a tokenizer: {error}") from error
