"""What turns one sound file into a transcript for `transcribe`: a model here, or a server."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from vllm_mlx.engine.audio.transcript import Segment, Task, Transcript, Word
from vllm_mlx.engine.errors import RowFailedError, UnreachableError, VllmMlxError

if TYPE_CHECKING:
    import httpx

    from vllm_mlx.engine.audio.kind import TranscriptionConfig
    from vllm_mlx.engine.audio.transcription import TranscriptionService

#: Told how many seconds of sound are done, and of how many; None where nobody knows.
OnHeard = Callable[[float, float | None], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HearingOptions:
    """Say how files are heard."""

    language: str | None = None
    translate: bool = False
    prompt: str | None = None
    temperature: float | None = None
    words: bool = False


class Transcriber(Protocol):
    """Hear files, one at a time. Raises errors of the project's tree only."""

    def hear(self, path: Path, options: HearingOptions, on_heard: OnHeard) -> Transcript:
        """Return what is said in a file; a `RequestError` is the file's fault alone."""
        ...

    def close(self) -> None:
        """Free what is held."""
        ...


class LocalTranscriber:
    """Hear files with a model in this process. MLX's thread only."""

    def __init__(self, service: TranscriptionService) -> None:
        self._service = service

    def hear(self, path: Path, options: HearingOptions, on_heard: OnHeard) -> Transcript:
        """Return what is said in a file, telling of each window."""
        from vllm_mlx.engine.audio.kind import TranscriptionRequest, transcript_of

        task: Task = "translate" if options.translate else "transcribe"
        request = TranscriptionRequest(
            path=str(path),
            task=task,
            language=options.language,
            prompt=options.prompt,
            temperature=options.temperature,
            words=options.words,
        )
        parts = []
        try:
            for part in self._service.handle(request):
                parts.append(part)
                on_heard(part.done_s, part.duration_s)
        except (VllmMlxError, OSError):
            raise
        except Exception as error:  # whatever a library raises, it is about this file
            raise RowFailedError(f"{type(error).__name__}: {error}") from error
        return transcript_of(parts, task)

    def close(self) -> None:
        """Close the model."""
        self._service.close()


def open_local(
    config: TranscriptionConfig, on_progress: Callable[[str, float | None], None]
) -> LocalTranscriber:
    """Load the model; raise `ModelLoadError`."""
    from vllm_mlx.engine.audio.loading import load_transcription
    from vllm_mlx.engine.platform import require_backend

    require_backend()
    return LocalTranscriber(load_transcription(config, on_progress))


class ServerTranscriber:
    """Have a running server hear files; owns the connection to it."""

    def __init__(self, client: httpx.Client, url: str, model: str | None) -> None:
        self._client = client
        self._url = url
        self._model = model

    def hear(self, path: Path, options: HearingOptions, on_heard: OnHeard) -> Transcript:
        """Send a file and return what the server has heard."""
        from vllm_mlx.cli.chat_http import connection_errors, error_of

        del on_heard
        route = "translations" if options.translate else "transcriptions"
        fields: dict[str, Any] = {
            "model": self._model,
            "prompt": options.prompt,
            "temperature": options.temperature,
            "language": options.language if not options.translate else None,
            "response_format": "verbose_json",
            "timestamp_granularities[]": ["segment", "word"] if options.words else ["segment"],
        }
        form = {name: value for name, value in fields.items() if value is not None}
        with path.open("rb") as file, connection_errors(self._url):
            response = self._client.post(
                f"{self._url}/audio/{route}", data=form, files={"file": (path.name, file)}
            )
        if response.status_code != 200:
            raise error_of(response, self._url)
        return _transcript(response, self._url)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def open_server(
    url: str, *, model: str | None, api_key: str | None, timeout_s: float
) -> ServerTranscriber:
    """Return what asks the server at `url`; raise `UsageError` for what is no address."""
    import httpx

    from vllm_mlx.cli.chat_http import CONNECT_TIMEOUT_S, base_url

    root = base_url(url)
    # A proxy from the environment cannot reach this very machine.
    is_local = urlsplit(root).hostname in ("localhost", "127.0.0.1", "::1")
    client = httpx.Client(
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
        trust_env=not is_local,
    )
    return ServerTranscriber(client, root, model)


def _transcript(response: httpx.Response, url: str) -> Transcript:
    """Read a `verbose_json` answer, of any server that has that."""
    try:
        answer = response.json()
        words = [
            Word(" " + str(word["word"]).strip(), float(word["start"]), float(word["end"]))
            for word in answer.get("words") or ()
        ]
        segments = [
            Segment(
                id=number,
                start_s=float(segment["start"]),
                end_s=float(segment["end"]),
                text=str(segment["text"]),
                tokens=tuple(segment.get("tokens") or ()),
                seek=int(segment.get("seek") or 0),
                temperature=float(segment.get("temperature") or 0.0),
                avg_logprob=float(segment.get("avg_logprob") or 0.0),
                compression_ratio=float(segment.get("compression_ratio") or 0.0),
                no_speech_prob=float(segment.get("no_speech_prob") or 0.0),
                # Those of all segments, which is how they are written again.
                words=tuple(words) if words and number == 0 else None,
            )
            for number, segment in enumerate(answer.get("segments") or ())
        ]
        name = str(answer.get("language") or "")
        return Transcript(
            task="translate" if answer.get("task") == "translate" else "transcribe",
            language=name,
            language_name=name,
            duration_s=float(answer["duration"]),
            segments=tuple(segments),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise UnreachableError(f"{url}/audio does not answer as it should") from error
