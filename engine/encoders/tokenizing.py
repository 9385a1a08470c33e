"""Turn texts and pairs of texts into an encoder's tokens, cut to a length where that is asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from vllm_mlx.engine.errors import ModelLoadError


@dataclass(frozen=True)
class EncodedText:
    """Hold the tokens of one text or pair."""

    token_ids: list[int]
    #: 1 for the second text of a pair, in models that tell them apart.
    type_ids: list[int]
    #: Tokens before cutting.
    full_length: int

    @property
    def is_cut(self) -> bool:
        """Say whether it was longer."""
        return self.full_length > len(self.token_ids)


class EncoderTokenizer:
    """Own one tokenizer; for one thread, as its cutting is a setting of the library's object."""

    def __init__(self, tokenizer: Tokenizer, *, lowercases: bool = False) -> None:
        # Files carry the settings of whoever wrote them, such as padding to 128.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._lowercases = lowercases

    @property
    def vocab_size(self) -> int:
        """Return the number of ids."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, texts: Sequence[str], max_length: int | None) -> list[EncodedText]:
        """Encode texts with their special tokens, each cut to `max_length` tokens if given."""
        return self._encode([self._prepared(text) for text in texts], max_length)

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], max_length: int | None
    ) -> list[EncodedText]:
        """Encode pairs; of one that is too long the longer text is cut first."""
        prepared = [(self._prepared(first), self._prepared(second)) for first, second in pairs]
        return self._encode(prepared, max_length)

    def shorten(self, text: str, num_tokens: int) -> str:
        """Return the beginning of a text that its first `num_tokens` tokens stand for."""
        encoding = self._tokenizer.encode(self._prepared(text), add_special_tokens=False)
        if len(encoding) <= num_tokens:
            return text
        return text[: encoding.offsets[num_tokens - 1][1]]

    def num_prompt_tokens(self, prompt: str) -> int:
        """Count the tokens that a prompt puts before a text, the first special ones included."""
        encoding = self._tokenizer.encode(self._prepared(prompt))
        mask = encoding.special_tokens_mask
        num_trailing = next((n for n, special in enumerate(reversed(mask)) if not special), 0)
        return len(encoding) - num_trailing

    def _prepared(self, text: str) -> str:
        return text.lower() if self._lowercases else text

    def _encode(
        self, inputs: Sequence[str] | Sequence[tuple[str, str]], max_length: int | None
    ) -> list[EncodedText]:
        whole = self._tokenizer.encode_batch(list(inputs))
        lengths = [len(encoding) for encoding in whole]
        if max_length is not None and max(lengths, default=0) > max_length:
            self._tokenizer.enable_truncation(max_length, strategy="longest_first")
            try:
                whole = self._tokenizer.encode_batch(list(inputs))
            finally:
                self._tokenizer.no_truncation()
        return [
            EncodedText(encoding.ids, encoding.type_ids, length)
            for encoding, length in zip(whole, lengths, strict=True)
        ]


def load_encoder_tokenizer(folder: Path, *, lowercases: bool = False) -> EncoderTokenizer:
    """Load a folder's tokenizer; raise `ModelLoadError`."""
    file = folder / "tokenizer.json"
    try:
        if file.is_file():
            return EncoderTokenizer(Tokenizer.from_file(str(file)), lowercases=lowercases)
        from transformers import AutoTokenizer

        fast = AutoTokenizer.from_pretrained(folder, use_fast=True)
        return EncoderTokenizer(fast.backend_tokenizer, lowercases=lowercases)
    except Exception as error:  # the library raises plain exceptions
        raise ModelLoadError(f"{folder} has no tokenizer that can be read: {error}") from error
