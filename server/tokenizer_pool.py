"""A few threads that render templates and tokenize, each with a tokenizer of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

from vllm_mlx.engine.core.grammar import GrammarTrials
from vllm_mlx.engine.text.chat_formats import ChatFormats

Result = TypeVar("Result")


class TextCodec(Protocol):
    """Name what the server uses of `vllm_mlx.engine.text.tokenizer.Tokenizer`."""

    vocab_size: int

    @property
    def has_chat_template(self) -> bool:
        """Say whether chats can be rendered."""
        ...

    @property
    def formats(self) -> ChatFormats:
        """Return what answers to chats are read with."""
        ...

    @property
    def grammars(self) -> GrammarTrials:
        """Return what tries grammars over these tokens."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`."""
        ...

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any) -> str:
        """Render a chat."""
        ...

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> list[int]:
        """Render a chat and return its token ids."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        ...

    def token_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the character of `text`, which `token_ids` encode, where each token begins."""
        ...

    def copy(self) -> TextCodec:
        """Return a tokenizer for one more thread."""
        ...


class TokenizerPool:
    """Run tokenizer work off the event loop; owns its threads and their tokenizers."""

    def __init__(self, tokenizer: TextCodec, num_threads: int) -> None:
        self._idle: SimpleQueue[TextCodec] = SimpleQueue()
        for number in range(num_threads):
            self._idle.put(tokenizer if number == 0 else tokenizer.copy())
        self._executor = ThreadPoolExecutor(num_threads, thread_name_prefix="tokenizer")
        # Of its own: one grammar may take seconds, which no prompt waits for.
        self._grammar_executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._grammars = tokenizer.grammars
        self.vocab_size = tokenizer.vocab_size
        #: Spells one token as bytes: a look-up, cheap enough for the event loop.
        self.token_bytes = tokenizer.token_bytes

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`; raise `InvalidRequestError`."""
        return await self.run(
            lambda tokenizer: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], **template_kwargs: Any
    ) -> list[int]:
        """Render a chat and return its token ids; raise `InvalidRequestError`."""
        return await self.run(lambda tokenizer: tokenizer.encode_chat(messages, **template_kwargs))

    async def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`; raise `InvalidRequestError`."""
        return await self.run(
            lambda tokenizer: tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        )

    async def token_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the character of `text`, which `token_ids` encode, where each token begins."""
        return await self.run(lambda tokenizer: tokenizer.token_offsets(token_ids, text))

    async def check_grammar(self, grammar: str, *, param: str | None) -> None:
        """Raise `InvalidRequestError`, naming `param`, if a grammar cannot be enforced."""
        if self._grammars.knows(grammar):
            return
        await asyncio.get_running_loop().run_in_executor(
            self._grammar_executor, lambda: self._grammars.check(grammar, param=param)
        )

    def close(self) -> None:
        """Drop the work that has not begun; do not wait for what has."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._grammar_executor.shutdown(wait=False, cancel_futures=True)
        self._grammars.close()

    async def run(self, work: Callable[[TextCodec], Result]) -> Result:
        """Do `work` with one of the tokenizers, on a thread, and return what it returns."""

        def with_tokenizer() -> Result:
            # There are as many tokenizers as threads, so one is always idle.
            tokenizer = self._idle.get_nowait()
            try:
                return work(tokenizer)
            finally:
                self._idle.put(tokenizer)

        return await asyncio.get_running_loop().run_in_executor(self._executor, with_tokenizer)
