"""`POST /v1/audio/transcriptions` and `POST /v1/audio/translations`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from quart import Response

from vllm_mlx.engine.audio.kind import (
    TRANSCRIPTION,
    TranscriptionPart,
    TranscriptionRequest,
    transcript_of,
)
from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.audio.result_formats import (
    TEXT_RENDERERS,
    Granularity,
    ResultFormat,
    plain_fields,
    verbose_fields,
)
from vllm_mlx.engine.audio.transcript import Segment, Task, text_of
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server import sse
from vllm_mlx.server.audio.schemas import (
    STREAMED_FORMATS,
    TranscriptionForm,
    TranslationForm,
)
from vllm_mlx.server.audio.upload import read_form
from vllm_mlx.server.openai.streams import error_event
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.services.hosted import HostedService
from vllm_mlx.server.stream_end import ended_properly


class AudioRoutes:
    """Turn speech into text."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def transcribe(self) -> Response:
        """Write down what is said in a file, streamed or whole."""
        return await self._answer(TranscriptionForm, "transcribe")

    async def translate(self) -> Response:
        """Write down in English what is said in a file, streamed or whole."""
        return await self._answer(TranslationForm, "translate")

    async def _answer(
        self, schema: type[TranscriptionForm] | type[TranslationForm], task: Task
    ) -> Response:
        services = self._runtime.services
        # Without a model nobody has to send anything.
        limits: AudioLimits = services.find(TRANSCRIPTION.name, None).plan.config.limits
        form, path = await read_form(self._runtime, schema, limits)
        service = services.find(TRANSCRIPTION.name, form.model)
        result_format = _checked_format(form)
        context = current_context()
        call = await service.start_call(context, _request(form, path, task))
        parts = call.parts()
        # The file has been decoded and the request can be done: only now is it answered with 200.
        first = await anext(parts)
        if form.stream:
            events = ended_properly(
                _events(service, first, parts), context, error_event, last=sse.DONE
            )
            # A window of a large model can take longer than proxies wait.
            return sse.event_stream(sse.kept_alive(events, self._runtime.config.keep_alive_s))
        whole = [first, *[part async for part in parts]]
        _count(service, whole)
        granularities = form.timestamp_granularities or ["segment"]
        return _response(whole, task, result_format, granularities)


def _checked_format(form: TranscriptionForm | TranslationForm) -> ResultFormat:
    """Return the form of the answer; raise `InvalidRequestError` for fields that do not agree."""
    result_format = form.response_format or "json"
    if form.timestamp_granularities is not None and result_format != "verbose_json":
        raise InvalidRequestError(
            "timestamp_granularities: times come with the response_format verbose_json, not "
            f"{result_format}",
            param="timestamp_granularities",
        )
    if form.stream and result_format not in STREAMED_FORMATS:
        raise InvalidRequestError(
            f"stream: {result_format} is sent as a whole; json and text can be streamed",
            param="stream",
        )
    return result_format


def _request(
    form: TranscriptionForm | TranslationForm, path: Path, task: Task
) -> TranscriptionRequest:
    language, prompt = None, form.prompt
    if isinstance(form, TranscriptionForm):
        language = form.language
        if form.keywords:
            prompt = " ".join([", ".join(form.keywords) + ".", prompt or ""]).strip()
    return TranscriptionRequest(
        path=str(path),
        task=task,
        language=language,
        prompt=prompt,
        temperature=form.temperature,
        words="word" in (form.timestamp_granularities or ()),
    )


def _response(
    parts: list[TranscriptionPart],
    task: Task,
    result_format: ResultFormat,
    granularities: Sequence[Granularity],
) -> Response:
    transcript = transcript_of(parts, task)
    if result_format in TEXT_RENDERERS:
        text = TEXT_RENDERERS[result_format](transcript)
        return Response(text, content_type="text/plain; charset=utf-8")
    if result_format == "verbose_json":
        return json_response(verbose_fields(transcript, granularities))
    return json_response(plain_fields(transcript))


async def _events(
    service: HostedService, first: TranscriptionPart, rest: Any
) -> AsyncGenerator[bytes]:
    """Yield what is new of the text with each part, then the whole."""
    parts = [first]
    segments: list[Segment] = []
    sent = ""
    async for part in rest:
        parts.append(part)
        segments += part.segments
        text = text_of(segments)
        if delta := text[len(sent) :]:
            yield sse.event({"type": "transcript.text.delta", "delta": delta})
        sent = text
    _count(service, parts)
    yield sse.event({"type": "transcript.text.done", "text": sent})


def _count(service: HostedService, parts: Sequence[TranscriptionPart]) -> None:
    segments = [segment for part in parts for segment in part.segments]
    service.count_tokens(sum(len(segment.tokens) for segment in segments))
