"""Text to token ids and back, and chats to prompts, with a model folder's own tokenizer."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_mlx.engine.config import ChatConfig
from vllm_mlx.engine.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from vllm_mlx.engine.host.grammar_checker import GrammarChecker
from vllm_mlx.engine.text.chat_formats import ChatFormats
from vllm_mlx.engine.text.chat_renderer import ChatRenderer
from vllm_mlx.engine.text.chat_template_file import read_chat_template
from vllm_mlx.engine.text.detokenizer import Detokenizer, make_detokenizer_factory
from vllm_mlx.engine.text.spelling import Spell, make_spell, token_offsets


class Tokenizer:
    """Encode, decode and render chats for one model.

    Owns a transformers tokenizer and never changes it once built, so that concurrent `encode`
    and `decode` calls find the library's lock free; `copy` makes one more for a further thread.
    Long encodings release the GIL.
    """

    def __init__(
        self,
        tokenizer: Any,
        eos_token_ids: frozenset[int] = frozenset(),
        chat: ChatConfig | None = None,
    ) -> None:
        """Take a transformers tokenizer; `chat` says how chats are rendered and answers read."""
        self._tokenizer = tokenizer
        self._chat = chat or ChatConfig()
        self._renderer: ChatRenderer | None = None
        self._backend = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        own_eos = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self.eos_token_ids: frozenset[int] = eos_token_ids.union(own_eos)
        self.vocab_size: int = len(tokenizer)
        # What the library's own decoding skips. Markers that were added but are not special
        # (of tool calls, of reasoning) are text.
        self._special_ids = frozenset(
            token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special
        )
        self._new_detokenizer: Callable[[], Detokenizer] | None = None
        self._spell: Spell | None = None
        #: Tries grammars over these tokens; shared with the copies.
        self.grammars = GrammarChecker(self)

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Return the ids of the special tokens, which are no text."""
        return self._special_ids

    @property
    def added_tokens(self) -> dict[str, int]:
        """Return the added tokens, special or not, by their text."""
        return {
            str(token.content): token_id
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
        }

    def serialized(self) -> str | None:
        """Return the text of a tokenizer.json; None for a tokenizer written in Python."""
        return None if self._backend is None else str(self._backend.to_str())

    @property
    def has_chat_template(self) -> bool:
        """Say whether chats can be rendered."""
        return bool(self._tokenizer.chat_template)

    @property
    def formats(self) -> ChatFormats:
        """Return what answers to chats are read with; tries the template out the first time."""
        return self._chats.formats

    @property
    def _chats(self) -> ChatRenderer:
        if self._renderer is None:
            self._renderer = ChatRenderer(self._tokenizer, self._chat)
        return self._renderer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode `text`, never with a second beginning-of-sequence token before a spelt-out one.

        Raises `InvalidRequestError` for text that is not valid Unicode (lone surrogates).
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"the text is not valid Unicode: a lone surrogate at character {error.start}"
            ) from None
        if self._backend is None:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        else:
            # The batch call releases the GIL and skips offsets; the single call does neither.
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[
                0
            ].ids
        bos_id, bos = self._tokenizer.bos_token_id, self._tokenizer.bos_token
        if bos and len(ids) > 1 and ids[0] == ids[1] == bos_id and not text.startswith(bos * 2):
            del ids[0]
        return list(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode all of `token_ids` at once; ids outside the vocabulary give no text.

        Spaces are left as the tokens say them: no clean-up that streamed text could not follow.
        Raises `InvalidRequestError` for ids that are negative or over 32 bits.
        """
        if any(not 0 <= token_id < 2**32 for token_id in token_ids):
            raise InvalidRequestError("token ids must be integers from 0 to 2**32 - 1")
        if self._backend is None:
            # A tokenizer written in Python may raise on ids that a padded model head can draw.
            text = self._tokenizer.decode(
                [token_id for token_id in token_ids if token_id < self.vocab_size],
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        else:
            text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return str(text)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> str:
        """Render a chat with the model's own template, in a sandbox.

        What the template cannot say itself is put into the messages: see `ChatRenderer`.
        `template_kwargs` become variables of the template (`enable_thinking`, ...).
        Raises `InvalidRequestError` where there is no template, where the template refuses the
        messages, and for keyword arguments that would steer the library instead of the template.
        """
        if not self.has_chat_template:
            raise InvalidRequestError(
                "this model has no chat template; use /v1/completions with a plain prompt, "
                "or serve an instruct model",
                param="messages",
            )
        options = {"add_generation_prompt": add_generation_prompt, **template_kwargs}
        return self._chats.render(messages, tools or (), options)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Render a chat and encode it; the template writes every special token itself."""
        text = self.render_chat(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        return self.encode(text, add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental detokenizer for one row."""
        if self._new_detokenizer is None:
            self._new_detokenizer = make_detokenizer_factory(
                self._decoder_state(), self._piece_of, self.decode
            )
        return self._new_detokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for: part of a character, maybe.

        Special tokens are spelt as templates write them. Cheap: a look-up.
        """
        if self._spell is None:
            self._spell = make_spell(
                self._decoder_state(), self._piece_of, self._special_of, self.decode
            )
        return self._spell(token_id)

    def token_offsets(self, token_ids: Sequence[int], text: str) -> list[int]:
        """Return the character of `text`, which `token_ids` encode, where each token begins."""
        return token_offsets(token_ids, text, self.detokenizer(), self._special_of)

    def copy(self) -> Tokenizer:
        """Return a tokenizer for one more thread.

        The Rust tokenizer is shared, since nothing here writes to it; a tokenizer written in
        Python is copied.
        """
        shared = copy.copy(self)
        if self._backend is None:
            shared._tokenizer = copy.deepcopy(self._tokenizer)
            shared._new_detokenizer = None
            shared._spell = None
        return shared

    def _decoder_state(self) -> bytes | None:
        decoder = None if self._backend is None else self._backend.decoder
        return None if decoder is None else bytes(decoder.__getstate__())

    def _special_of(self, token_id: int) -> str | None:
        """Return a special token as templates write it; None for every other id."""
        return self._raw_piece_of(token_id) if token_id in self._special_ids else None

    def _piece_of(self, token_id: int) -> str | None:
        """Return a token's string in the vocabulary; None for special and unknown ids."""
        return None if token_id in self._special_ids else self._raw_piece_of(token_id)

    def _raw_piece_of(self, token_id: int) -> str | None:
        if self._backend is None:
            if token_id >= self.vocab_size:
                return None
            piece = self._tokenizer.convert_ids_to_tokens(token_id)
        else:
            piece = self._backend.id_to_token(token_id)
        return None if piece is None else str(piece)


def load_tokenizer(
    path: Path, *, trust_remote_code: bool = False, chat: ChatConfig | None = None
) -> Tokenizer:
    """Load the tokenizer of the model folder `path`, without reaching for the network.

    Ends of sequence are those of the tokenizer, generation_config.json and config.json together:
    chat models often name the end of a turn in one of them only. Runs no code from the folder
    unless `trust_remote_code`. Raises `ModelNotFoundError` or `ModelLoadError`.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"no model folder at {path}")
    # The library advises at import to install PyTorch, which a tokenizer does not need.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path), trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        # The libraries raise whatever the broken file made them stumble over, Rust's included.
        raise ModelLoadError(f"cannot load the tokenizer in {path}: {error}") from error
    if tokenizer.is_fast:
        # tokenizer.json may carry the limits of its training.
        tokenizer.backend_tokenizer.no_truncation()
        tokenizer.backend_tokenizer.no_padding()
    if chat is not None and chat.chat_template is not None:
        tokenizer.chat_template = read_chat_template(Path(chat.chat_template))
    return Tokenizer(tokenizer, read_eos_token_ids(path), chat)


def read_eos_token_ids(path: Path) -> frozenset[int]:
    """Return the end-of-sequence ids of a model folder's generation_config.json and config.json."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        try:
            config = json.loads((path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError) as error:
            raise ModelLoadError(f"cannot read {path / name}: {error}") from error
        for part in (config, config.get("text_config") or {}):
            ids = part.get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [] if ids is None else [ids])
    return frozenset(found)
