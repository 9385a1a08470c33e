"""Read a multipart form whose file goes to disk as it arrives, and check its fields."""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from quart import request
from werkzeug.exceptions import RequestTimeout
from werkzeug.http import parse_options_header
from werkzeug.sansio.multipart import (
    Data,
    Epilogue,
    Field,
    File,
    MultipartDecoder,
    NeedData,
)

from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.audio.fields import POLICIES
from vllm_mlx.server.audio.schemas import LIST_FIELDS, AudioForm
from vllm_mlx.server.openai.fields import unknown_fields
from vllm_mlx.server.openai.validation import validate
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime

FormT = TypeVar("FormT", bound=AudioForm)

#: What a form may have beside its file: a prompt is a page, not a book.
FORM_BYTES = 1024 * 1024
_MAX_PARTS = 100

_FILE = "file"


@dataclass
class Upload:
    """Hold a form that has arrived: its fields as strings, and where its file is."""

    path: Path
    fields: dict[str, list[str]] = field(default_factory=dict)
    file_name: str | None = None
    num_bytes: int = 0


async def read_form(
    runtime: ServerRuntime, schema: type[FormT], limits: AudioLimits
) -> tuple[FormT, Path]:
    """Read and check the form of the request at hand; return it and the path of its file.

    The file is removed when the request is over. Raises `InvalidRequestError`, and
    `FileTooLargeError` as soon as there is too much of it.
    """
    upload = await _receive(limits)
    form = validate(schema, _values(upload), POLICIES)
    if upload.num_bytes == 0:
        raise InvalidRequestError("file: the file is empty", param=_FILE)
    if names := unknown_fields(form):
        current_context().ignored_fields = runtime.unknown_fields.record(names)
    return form, upload.path


async def _receive(limits: AudioLimits) -> Upload:
    content_type, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get("boundary", "")
    if content_type != "multipart/form-data" or not boundary.isascii() or not boundary:
        raise InvalidRequestError(
            "the body must be a form of the type multipart/form-data, with the sound as its part "
            f"'file'; this one is {content_type or 'of no type'}"
        )
    if (request.content_length or 0) > limits.max_bytes + FORM_BYTES:
        raise limits.too_large()
    handle, name = tempfile.mkstemp(prefix="vllm-mlx-sound-")
    os.close(handle)
    upload = Upload(Path(name))
    current_context().closing.callback(upload.path.unlink, missing_ok=True)
    decoder = MultipartDecoder(boundary.encode("ascii"), max_parts=_MAX_PARTS)
    try:
        async with asyncio.timeout(request.body_timeout):
            with upload.path.open("wb") as target:
                await _decode(decoder, _Parts(upload, target, limits))
    except TimeoutError:
        raise RequestTimeout from None
    return upload


async def _decode(decoder: MultipartDecoder, parts: _Parts) -> None:
    is_complete = False
    async for data in request.body:
        # A body that says nothing of its length is measured here only.
        parts.count(len(data))
        decoder.receive_data(data)
        with _form_faults():
            is_complete = parts.take(decoder) or is_complete
        # Other requests come in between, however fast this one arrives.
        await asyncio.sleep(0)
    with _form_faults():
        decoder.receive_data(None)
        is_complete = parts.take(decoder) or is_complete
    if not is_complete:
        raise InvalidRequestError("the form ends in the middle")


@contextlib.contextmanager
def _form_faults() -> Iterator[None]:
    """Turn what the decoder says of a form into a fault of the request."""
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(f"the form cannot be read: {error}") from None


class _Parts:
    """Put the parts of a form where they belong."""

    def __init__(self, upload: Upload, target: BinaryIO, limits: AudioLimits) -> None:
        self._upload = upload
        self._target = target
        self._limits = limits
        self._num_bytes = 0
        self._name: str | None = None
        self._value = b""

    def count(self, num_bytes: int) -> None:
        """Take note of bytes that came; raise `FileTooLargeError`."""
        self._num_bytes += num_bytes
        if self._num_bytes > self._limits.max_bytes + FORM_BYTES:
            raise self._limits.too_large()

    def take(self, decoder: MultipartDecoder) -> bool:
        """Take what the decoder has; return whether the form is complete."""
        while not isinstance(event := decoder.next_event(), NeedData | Epilogue):
            if isinstance(event, File) and event.name == _FILE:
                if self._upload.file_name is not None:
                    raise InvalidRequestError("file: only one file is taken", param=_FILE)
                self._upload.file_name = event.filename or ""
                self._name = None
            elif isinstance(event, Field | File):
                self._name, self._value = event.name, b""
            elif isinstance(event, Data):
                self._add(event)
        return isinstance(event, Epilogue)

    def _add(self, event: Data) -> None:
        if self._name is None:
            self._target.write(event.data)
            self._upload.num_bytes += len(event.data)
            if self._upload.num_bytes > self._limits.max_bytes:
                raise self._limits.too_large()
            return
        self._value += event.data
        if len(self._value) > FORM_BYTES:
            raise InvalidRequestError(f"{self._name}: the field is too long", param=self._name)
        if not event.more_data:
            try:
                value = self._value.decode()
            except UnicodeDecodeError:
                raise InvalidRequestError(
                    f"{self._name}: the field is not valid UTF-8", param=self._name
                ) from None
            self._upload.fields.setdefault(self._name, []).append(value)


def _values(upload: Upload) -> dict[str, Any]:
    """Return the fields by their names: one value each, or a list where that is meant.

    An empty value is none: forms send every box that they have.
    """
    values: dict[str, Any] = {}
    for key, given in upload.fields.items():
        # Clients write lists as `name[]`, and objects as `name[key]`.
        name = key.partition("[")[0]
        texts = [text for text in given if text]
        if not texts:
            continue
        if name in LIST_FIELDS:
            values.setdefault(name, []).extend(texts)
        elif len(texts) > 1:
            raise InvalidRequestError(f"{name}: the field is given more than once", param=name)
        else:
            values[name] = texts[0] if key == name else {key: texts[0]}
    values.pop(_FILE, None)
    if upload.file_name is not None:
        values[_FILE] = upload.file_name
    elif _FILE in upload.fields:
        raise InvalidRequestError(
            "file: this is a text, not a file; with curl it is written -F file=@PATH", param=_FILE
        )
    return values
