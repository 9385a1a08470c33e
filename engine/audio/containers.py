"""Tell what kind of sound file some bytes are, by their beginning and never by a name."""

from __future__ import annotations

import enum
from typing import BinaryIO

#: How far zeros behind a tag are followed.
_MAX_PADDING_BYTES = 65536
_MAX_TAGS = 8
_ID3_HEADER_BYTES = 10


class Container(enum.Enum):
    """Name the kinds of files that can be read.

    The value is the name that people know it by.
    """

    WAV = "wav"
    MP3 = "mp3"
    FLAC = "flac"
    MP4 = "mp4/m4a"
    WEBM = "webm/mkv"
    OGG = "ogg"
    AAC = "aac"
    AIFF = "aiff"
    CAF = "caf"


#: Read without another program.
NATIVE = frozenset({Container.WAV, Container.MP3, Container.FLAC})


def container_of(file: BinaryIO) -> Container | None:
    """Return what kind of file this is, None for none that is known; moves the file's position.

    ID3 tags, which many programs write before any kind of file, are passed over.
    """
    offset = 0
    has_tag = False
    for _ in range(_MAX_TAGS):
        file.seek(offset)
        head = file.read(12)
        if head[:3] != b"ID3" or len(head) < _ID3_HEADER_BYTES:
            break
        has_tag = True
        offset += _tag_bytes(head)
    if has_tag and head[:1] == b"\0":
        file.seek(offset)
        padding = file.read(_MAX_PADDING_BYTES)
        head = padding.lstrip(b"\0")[:12]
    return _by_magic(head)


def _tag_bytes(header: bytes) -> int:
    """Return the length of an ID3v2 tag; its size has seven bits a byte."""
    size = 0
    for byte in header[6:10]:
        size = size << 7 | byte & 0x7F
    has_footer = bool(header[5] & 0x10)
    return _ID3_HEADER_BYTES + size + (_ID3_HEADER_BYTES if has_footer else 0)


def _by_magic(head: bytes) -> Container | None:
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return Container.WAV
    if head[:4] == b"FORM" and head[8:12] in (b"AIFF", b"AIFC"):
        return Container.AIFF
    if head[4:8] == b"ftyp":
        return Container.MP4
    magics = {
        b"fLaC": Container.FLAC,
        b"OggS": Container.OGG,
        b"\x1a\x45\xdf\xa3": Container.WEBM,
        b"caff": Container.CAF,
    }
    if head[:4] in magics:
        return magics[head[:4]]
    return _mpeg_frame(head)


def _mpeg_frame(head: bytes) -> Container | None:
    """Tell a frame of MPEG audio, or of AAC, whose marks begin alike, from other bytes."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    layer = head[1] >> 1 & 3
    if layer == 0:
        return Container.AAC if head[1] & 0xF0 == 0xF0 else None
    is_reserved = head[1] >> 3 & 3 == 1 or head[2] >> 4 == 0xF or head[2] >> 2 & 3 == 3
    return None if is_reserved else Container.MP3
