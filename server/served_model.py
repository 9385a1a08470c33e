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

#: The names that agents of Anthropic's API ask for by themselves, whatever they were told.
AGENT_NAMES = "claude-*"


class ModelNames:
    """Know the names of the one served model.

    `default`, the served name, the model as it was given or where it lies on disk, and aliases, in
    which a `*` stands for anything.
    """

    def __init__(self, given: str, served: str | None, aliases: Iterable[str] = ()) -> None:
        self.primary = served if served is not None else given
        self._known = {DEFAULT_NAME, self.primary, given}
        self._aliases = tuple(aliases)

    def also(self, names: Iterable[str]) -> None:
        """Accept further names."""
        self._known.update(names)

    def knows(self, name: str) -> bool:
        """Say whether a request may call the model so."""
        return name in self._known or any(fnmatchcase(name, alias) for alias in self._aliases)

    def is_own(self, name: str) -> bool:
        """Say whether it is a name of this model and of no other, as `default` is not."""
        return name in self._known and name != DEFAULT_NAME

    def check(self, name: str | None, *, is_agents: bool = False) -> str:
        """Return the name that a response echoes; raise `ModelUnknownError` for an unknown one.

        With `is_agents` the names that agents invent are known, too.
        """
        if name is None:
            return self.primary
        aliases = (*self._aliases, AGENT_NAMES) if is_agents else self._aliases
        if name not in self._known and not any(fnmatchcase(name, alias) for alias in aliases):
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
    #: What answers to chats are read with.
    formats: ChatFormats = field(default_factory=ChatFormats)

    @property
    def max_model_len(self) -> int:
        """Return the longest prompt plus completion: of the model, and of what memory holds."""
        return min(self.info.max_model_len, self.info.kv_max_tokens)
