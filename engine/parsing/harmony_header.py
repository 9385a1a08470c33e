"""Read the header of a message in Harmony, the format of gpt-oss."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from vllm_mlx.engine.parsing.reader import MismatchError, Reader, Steps

START = "<|start|>"
CHANNEL = "<|channel|>"
MESSAGE = "<|message|>"
CONSTRAIN = "<|constrain|>"
END = "<|end|>"
RETURN = "<|return|>"
CALL = "<|call|>"
#: Before a recipient. A header begins with it where the prompt ends with the author's name.
RECIPIENT = "to="

_WORD_END = re.compile(r"[\s<]")
_WORD = re.compile(r"[A-Za-z0-9_.:/\-]*+")
_MAX_WORD = 128


@dataclass(slots=True)
class Header:
    """Say where a message goes."""

    channel: str = ""
    recipient: str = ""


def read_header(
    opening: str, reader: Reader, may_be_recipient: Callable[[str], bool]
) -> Steps[Header]:
    """Read a header from behind `opening` up to and with the marker before the message.

    The recipient stands behind the author or behind the channel, and a content type may follow;
    of a channel that is named twice the second counts. Raises `MismatchError` as soon as
    `may_be_recipient` refuses what there is of the recipient.
    """
    header = Header()
    if opening == START:
        yield from _word(reader)
    elif opening == RECIPIENT:
        header.recipient = yield from _word(reader, may_be_recipient)
    elif opening == CHANNEL:
        header.channel = yield from _word(reader)
    while True:
        yield from reader.space()
        found = yield from reader.accept(MESSAGE, CHANNEL, CONSTRAIN, RECIPIENT)
        if found == MESSAGE:
            return header
        if found == CHANNEL:
            header = Header((yield from _word(reader)), header.recipient)
        elif found == RECIPIENT:
            header.recipient = yield from _word(reader, may_be_recipient)
        else:
            yield from _word(reader)


def _word(reader: Reader, allows: Callable[[str], bool] | None = None) -> Steps[str]:
    def may_start(text: str) -> bool:
        is_word = len(text) <= _MAX_WORD and _WORD.fullmatch(text) is not None
        return is_word and (allows is None or allows(text))

    word = yield from reader.word(_WORD_END, may_start)
    if not word:
        raise MismatchError
    return word
