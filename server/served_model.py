"""The loaded model as clients see it: its names, its limits and its tokenizers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from vllm_mlx.engine.config import ModelInfo
from vllm_mlx.engine.errors import ModelUnknownError
from vllm_mlx.engine.text.chat_formats import ChatFormats
from vllm_mlx.server.tokenizer_pool import TokenizerPool

#: Names whatever model is loaded.
DEFAULT_NAME = "default"


class ModelNames:
    """Know the names of the one served model.

    `default`, the served name, and the model as it was given or where it lies on disk.
    """

    def __init__(self, given: str, served: str | None) -> None:
        self.primary = served if served is not None else given
        self._known = {DEFAULT_NAME, self.primary, given}

    def also(self, names: Iterable[str]) -> None:
        """Accept further names."""
        self._known.update(names)

    def check(self, name: str | None) -> str:
        """Return the name that a response echoes; raise `ModelUnknownError` for an unknown one."""
        if name is None:
            return self.primary
        if name not in self._known:
            raise ModelUnknownError(
                f"the model {name!r} does not exist here; this server serves {self.primary!r} "
                f"(also as {DEFAULT_NAME!r})",
                param="model",
            )
        return name


@dataclass(frozen=True)
class ServedModel:
    """Hold what requests need of the model once it answers."""

    info: ModelInfo
    tokenizers: TokenizerPool
    #: Unix time at which it became ready.
    created: int

    @property
    def max_model_len(self) -> int:
        """Return the longest prompt plus completion: of the model, and of what memory holds."""
        return min(self.info.max_model_len, self.info.kv_max_tokens)
    #: What answers to chats are read with.
    formats: ChatFormats = field(default_factory=ChatFormats)
