"""Compile grammars for one model's tokens; pure but for llguidance, which does the work."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from vllm_mlx.engine.errors import InvalidRequestError

logger = logging.getLogger(__name__)

#: Longest grammar that is looked at, in characters: the largest schemas of public catalogues are
#: smaller, and compiling takes longer than linear time.
MAX_GRAMMAR_LENGTH = 1 << 19

#: Grammars that are kept compiled: clients send the same few again and again.
_MAX_KEPT = 32
#: How often one is handed out before it is compiled anew. Its copies share the states of their
#: lexer, whose number is limited and only grows.
_MAX_USES = 128

#: Tokens that a grammar is followed for when it is checked.
_NUM_TRIED = 4

#: What llguidance puts around a reason: where in the grammar it lies, and the grammar itself.
_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")
_EXCERPT = re.compile(r"\n +\d+ \| ")
_MAX_REASON_LENGTH = 500
#: What a reason offers that requests cannot ask for, and what they can do.
_HINTS = {
    ". Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        " where two of its options may hold at once; use anyOf"
    )
}

#: Messages carry no excerpts of the parser's inner state. A state takes 1 to 2 KB, and what real
#: schemas need is hundreds.
_LIMITS = LLParserLimits(verbose_errors=False, max_lexer_states=50_000)


class GrammarTokens(Protocol):
    """Name what is asked of a tokenizer; `engine.text.tokenizer.Tokenizer` is the real one."""

    @property
    def vocab_size(self) -> int:
        """Count the tokens."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the tokens that end an answer."""
        ...

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Return the tokens that no text stands for."""
        ...

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Return the tokens that stand outside the model of the tokenizer, special or not."""
        ...

    def serialized(self) -> str | None:
        """Return the text of a `tokenizers` file; None for a tokenizer of another library."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`."""
        ...


class GrammarTrials(Protocol):
    """Say of grammars whether they can be followed."""

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return the tokens that no text of a grammar matches, by their spelling."""
        ...

    def knows(self, grammar: str) -> bool:
        """Say whether a grammar was found right already; cheap."""
        ...

    def check(self, grammar: str, *, param: str | None = None) -> None:
        """Raise `InvalidRequestError`, naming `param`, if the grammar cannot be enforced."""
        ...

    def close(self) -> None:
        """Let go of what is held."""
        ...


class GrammarCompiler:
    """Compile grammars, and say of each whether it can be followed; safe on any thread.

    A grammar is llguidance's Lark (`%llguidance {}` and rules), or a JSON list of grammars.
    The tables over the vocabulary are built at the first use, which takes a second for 150,000
    tokens, and compiled grammars are kept. llguidance works without Python's lock.
    """

    def __init__(self, tokens: GrammarTokens, vocab_size: int | None = None) -> None:
        """Take a tokenizer; `vocab_size` is the width of the logits where that is larger."""
        self._tokens = tokens
        self._vocab_size = max(vocab_size or 0, tokens.vocab_size)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._special_tokens: Mapping[str, int] | None = None
        #: Compiled and not advanced, with how often it was handed out, by the hash of the text;
        #: the least recently used first.
        self._compiled: OrderedDict[bytes, tuple[LLMatcher, int]] = OrderedDict()

    @property
    def tokenizer(self) -> LLTokenizer:
        """Return llguidance's view of the vocabulary; builds it the first time."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = _make_tokenizer(self._tokens, self._vocab_size)
            return self._tokenizer

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """Return the tokens that no text of a grammar matches, by their spelling.

        A grammar must write these as `<[id]>`. Besides the special ones of the tokenizer they are
        all added tokens in angle brackets.
        """
        if self._special_tokens is None:
            tokenizer = self.tokenizer
            self._special_tokens = {
                text: token_id
                for text, token_id in self._tokens.added_tokens.items()
                if tokenizer.is_special_token(token_id)
            }
        return self._special_tokens

    def check(self, grammar: str, *, param: str | None = None) -> None:
        """Raise `InvalidRequestError`, naming `param`, if the grammar cannot be enforced.

        Follows it for a few tokens, too: some are too complex only there.
        """
        matcher = self.compile(grammar, param=param)
        for _ in range(_NUM_TRIED):
            token = _first_token(matcher.compute_bitmask())
            if token is None or matcher.is_stopped():
                break
            matcher.consume_token(token)
        if matcher.is_error():
            raise InvalidRequestError(matcher_error(matcher), param=param)

    def knows(self, grammar: str) -> bool:
        """Say whether a grammar was found right already; cheap."""
        with self._lock:
            return _key(grammar) in self._compiled

    def close(self) -> None:
        """Let go of what was compiled."""
        with self._lock:
            self._compiled.clear()

    def compile(self, grammar: str, *, param: str | None = None) -> LLMatcher:
        """Return a matcher at the grammar's beginning, for one row.

        Raises `InvalidRequestError`, naming `param`, with llguidance's reason: a fault of the
        grammar, something it does not support, or nothing that could follow the grammar.
        """
        check_grammar_length(grammar, param=param)
        key = _key(grammar)
        with self._lock:
            known, num_uses = self._compiled.pop(key, (None, 0))
            if known is not None and num_uses < _MAX_USES:
                self._compiled[key] = (known, num_uses + 1)
                return known.deep_copy()
        matcher = self._compile_anew(grammar, param)
        with self._lock:
            self._compiled[key] = (matcher, 1)
            while len(self._compiled) > _MAX_KEPT:
                self._compiled.popitem(last=False)
            return matcher.deep_copy()

    def forget(self, grammar: str) -> None:
        """Compile a grammar anew the next time: a row's matcher of it has failed."""
        with self._lock:
            self._compiled.pop(_key(grammar), None)

    def _compile_anew(self, grammar: str, param: str | None) -> LLMatcher:
        try:
            grammar.encode("utf-8")
        except UnicodeEncodeError:
            raise InvalidRequestError(
                "the grammar is not valid Unicode: it holds a lone surrogate", param=param
            ) from None
        matcher = LLMatcher(self.tokenizer, grammar, log_level=0, limits=_LIMITS)
        if not matcher.is_error():
            # Some faults show only where something is to be generated.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidRequestError(matcher_error(matcher), param=param)
        if matcher.is_stopped() and not matcher.is_accepting():
            raise InvalidRequestError("nothing can follow this grammar", param=param)
        return matcher


def check_grammar_length(grammar: str, *, param: str | None) -> None:
    """Raise `InvalidRequestError` for a grammar that is longer than any that is compiled."""
    if len(grammar) > MAX_GRAMMAR_LENGTH:
        raise InvalidRequestError(
            f"the grammar is {len(grammar)} characters long; at most {MAX_GRAMMAR_LENGTH} are "
            "compiled",
            param=param,
        )


def _first_token(mask: bytes) -> int | None:
    """Return the first token that a mask allows."""
    place = next((index for index, byte in enumerate(mask) if byte), None)
    if place is None:
        return None
    byte = mask[place]
    return place * 8 + (byte & -byte).bit_length() - 1


def _key(grammar: str) -> bytes:
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


def _make_tokenizer(tokens: GrammarTokens, vocab_size: int) -> LLTokenizer:
    eos = sorted(token for token in tokens.eos_token_ids if token < vocab_size)
    serialized = tokens.serialized()
    if serialized is not None:
        try:
            return LLTokenizer(serialized, n_vocab=vocab_size, eos_token=eos or None)
        except ValueError as error:
            logger.info("llguidance cannot read the tokenizer, which is spelt out to it: %s", error)
    spelt = TokenizerWrapper(_SpeltTokens(tokens, vocab_size, eos))
    return LLTokenizer(spelt, eos_token=eos or None)


class _SpeltTokens:
    """Give llguidance a vocabulary token by token."""

    def __init__(self, tokens: GrammarTokens, vocab_size: int, eos: list[int]) -> None:
        known = tokens.vocab_size
        self._encode = tokens.encode
        self.tokens = [tokens.token_bytes(t) if t < known else b"" for t in range(vocab_size)]
        self.special_token_ids = sorted(t for t in tokens.special_token_ids if t < vocab_size)
        self.eos_token_id = eos[0] if eos else None
        self.bos_token_id = None

    def __call__(self, text: str | bytes) -> list[int]:
        """Encode what a grammar leaves no choice about."""
        if isinstance(text, bytes):
            text = text.decode("utf-8")
        return self._encode(text, add_special_tokens=False)


def matcher_error(matcher: LLMatcher) -> str:
    """Return in one line why a matcher has failed, without the grammar that llguidance repeats."""
    text = matcher.get_error()
    if text.startswith("NoExtension"):
        return "nothing can follow this grammar"
    text = _EXCERPT.split(text, maxsplit=1)[0].split("\n<state>", 1)[0]
    text = " ".join(_PLACE.sub("", text).split())
    for hint, better in _HINTS.items():
        text = text.replace(hint, better)
    return text if len(text) <= _MAX_REASON_LENGTH else f"{text[:_MAX_REASON_LENGTH]}..."
