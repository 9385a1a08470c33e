"""The audio routes with the real `openai` client, over a service that says what a test wants."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2
import openai
import pytest

from tests.server.conftest import FakeCondition
from vllm_mlx.engine.audio.kind import (
    TRANSCRIPTION,
    TranscriptionConfig,
    TranscriptionPart,
    TranscriptionRequest,
)
from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.audio.transcript import Segment, Word
from vllm_mlx.engine.core.outputs import ErrorInfo
from vllm_mlx.engine.errors import (
    EngineDiedError,
    EngineUnavailableError,
    FileTooLargeError,
    InvalidRequestError,
    VllmMlxError,
)
from vllm_mlx.engine.host.messages import ServiceInfo
from vllm_mlx.engine.host.service_client import CallStream
from vllm_mlx.server.services.plan import ServicePlan

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

SOUND = b"RIFF" + bytes(range(256)) * 20


def part(*texts: str, first_id: int = 0) -> TranscriptionPart:
    """Return a part with a segment of a second for each text."""
    return TranscriptionPart(
        segments=tuple(
            Segment(
                id=number,
                start_s=float(number),
                end_s=number + 1.0,
                text=text,
                tokens=(1, 2),
                words=(Word(text, float(number), number + 0.5),),
            )
            for number, text in enumerate(texts, first_id)
        ),
        duration_s=2.5,
        language="en",
        language_name="english",
    )


@dataclass
class FakeSpeech:
    """Stand behind the routes in place of a process; takes what it is sent, and answers `parts`."""

    parts: list[TranscriptionPart] = field(
        default_factory=lambda: [part(), part(" Hello"), part(" world. ", first_id=1)]
    )
    refusal: VllmMlxError | None = None
    end: VllmMlxError | None = None
    is_held: bool = False
    state: FakeCondition = field(default_factory=FakeCondition)
    info: ServiceInfo = field(
        default_factory=lambda: ServiceInfo(model="org/w", path="/m/w", model_type="whisper")
    )
    requests: list[TranscriptionRequest] = field(default_factory=list)
    files: list[bytes] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    num_open: int = 0

    async def start(self) -> None:
        """Be as `state` says."""

    async def stop(self, drain_timeout_s: float) -> None:
        """Have nothing to stop."""

    async def wait_ready(self) -> ServiceInfo:
        """Be ready."""
        return self.info

    def call(self, request_id: str, request: TranscriptionRequest) -> Any:
        """Read the file, as the process does, and answer."""
        if self.state.phase != "ready":
            raise EngineUnavailableError("loading")
        self.requests.append(request)
        self.files.append(Path(request.path).read_bytes())
        stream: CallStream[TranscriptionPart] = CallStream(request_id, self.left.append)
        if self.refusal is not None:
            stream.end(ErrorInfo.of(self.refusal))
            return stream
        for each in self.parts:
            stream.put(each)
        if not self.is_held:
            stream.end(None if self.end is None else ErrorInfo.of(self.end))
        return stream


def planned(speech: FakeSpeech, **limits: Any) -> tuple[ServicePlan, FakeSpeech]:
    """Return the plan of a service that `speech` stands for."""
    config = TranscriptionConfig(model="org/w", limits=AudioLimits(**limits))
    return ServicePlan(TRANSCRIPTION, config, "org/w", served_name="whisper-1"), speech


def client_of(served: Served) -> openai.AsyncOpenAI:
    """Return a client that calls the application itself."""
    transport = httpx2.ASGITransport(app=served.client.app, raise_app_exceptions=False)
    return openai.AsyncOpenAI(
        base_url="http://localhost:8000/v1",
        api_key="not-needed",
        max_retries=0,
        http_client=httpx2.AsyncClient(transport=transport),
    )


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have uploads put where no other program's are."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def speech() -> FakeSpeech:
    """Return the service behind the routes."""
    return FakeSpeech()


@pytest.fixture
async def server(make_server: ServerFactory, speech: FakeSpeech) -> Served:
    """Return a server with that service."""
    made: Served = await make_server(services=[planned(speech, max_bytes=10_000)])
    return made


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    """Return the real client of that server."""
    async with client_of(server) as made:
        yield made


def uploads() -> list[Path]:
    """Return the uploaded files that are still there."""
    return list(Path(tempfile.gettempdir()).glob("vllm-mlx-sound-*"))


async def test_every_format_reaches_the_client_in_its_own_type(
    client: openai.AsyncOpenAI, speech: FakeSpeech
) -> None:
    """json, text, srt, vtt and verbose_json are what the client's types expect."""
    create = client.audio.transcriptions.create
    file = ("a.wav", SOUND)
    plain = await create(model="whisper-1", file=file)
    assert plain.text == "Hello world."
    assert plain.usage is not None
    assert await create(model="whisper-1", file=file, response_format="text") == "Hello world.\n"
    srt = await create(model="default", file=file, response_format="srt")
    assert srt.startswith("1\n00:00:00,000 --> 00:00:01,000\nHello\n\n2\n")
    vtt = await create(model="org/w", file=file, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> ")
    verbose = await create(model="/m/w", file=file, response_format="verbose_json")
    assert (verbose.language, verbose.duration, verbose.words) == ("english", 2.5, None)
    assert verbose.segments is not None
    assert [segment.text for segment in verbose.segments] == [" Hello", " world. "]
    assert speech.files == [SOUND] * 5


async def test_every_option_reaches_the_service(
    client: openai.AsyncOpenAI, speech: FakeSpeech
) -> None:
    """Form fields, lists among them, arrive as the client sends them."""
    verbose = await client.audio.transcriptions.create(
        model="whisper-1",
        file=("a.wav", SOUND),
        language="de",
        prompt="Vorher.",
        keywords=["Aachen", "Zürich"],
        temperature=0.4,
        response_format="verbose_json",
        timestamp_granularities=["word"],
        chunking_strategy="auto",
    )
    assert verbose.segments is None
    assert verbose.words is not None
    assert [(word.word, word.end) for word in verbose.words] == [("Hello", 0.5), ("world.", 1.5)]
    request = speech.requests[0]
    assert request == TranscriptionRequest(
        path=request.path,
        language="de",
        prompt="Aachen, Zürich. Vorher.",
        temperature=0.4,
        words=True,
    )


# The client's own word on the models that OpenAI itself still runs.
@pytest.mark.filterwarnings("ignore:deprecated:DeprecationWarning")
async def test_translations_ask_for_english(client: openai.AsyncOpenAI, speech: FakeSpeech) -> None:
    """The other route sends the other task, with its own options."""
    create = client.audio.translations.create
    answer = await create(model="whisper-1", file=("a.mp3", SOUND), prompt="x", temperature=0)
    assert answer.text == "Hello world."
    verbose: Any = await create(
        model="whisper-1", file=("a.mp3", SOUND), response_format="verbose_json"
    )
    assert verbose.task == "translate"
    assert [(r.task, r.prompt, r.temperature) for r in speech.requests] == [
        ("translate", "x", 0.0),
        ("translate", None, None),
    ]


async def test_streamed_deltas_make_the_text(client: openai.AsyncOpenAI) -> None:
    """The client's own stream has a delta for each window, and the whole at the end."""
    stream = await client.audio.transcriptions.create(
        model="whisper-1", file=("a.wav", SOUND), stream=True
    )
    events = [event async for event in stream]
    assert [event.type for event in events] == [
        "transcript.text.delta",
        "transcript.text.delta",
        "transcript.text.done",
    ]
    assert [getattr(event, "delta", None) for event in events] == ["Hello", " world.", None]
    assert events[-1].text == "Hello world."  # type: ignore[union-attr]


async def test_a_stream_is_kept_alive_between_windows(make_server: ServerFactory) -> None:
    """While nothing is new, comments show that somebody is there; the client skips them."""
    speech = FakeSpeech(is_held=True)
    server = await make_server(services=[planned(speech)], keep_alive_s=0.02, timeout_s=1.0)
    transport = httpx2.ASGITransport(app=server.client.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        files, form = {"file": ("a.wav", SOUND)}, {"stream": "true"}
        response = await http.post("/v1/audio/transcriptions", data=form, files=files)
    blocks = response.text.strip().split("\n\n")
    assert blocks[1].endswith('"delta":" world."}')
    assert ": keep-alive" in blocks
    assert "no progress" in blocks[-2]
    assert blocks[-1] == "data: [DONE]"


async def test_an_error_before_the_first_part_is_a_status(
    client: openai.AsyncOpenAI, speech: FakeSpeech
) -> None:
    """What the service refuses is a 4xx that names the field, streamed or not."""
    for error, kind in [
        (InvalidRequestError("no sound", param="file"), openai.BadRequestError),
        (FileTooLargeError("too long", param="file"), openai.APIStatusError),
    ]:
        speech.refusal = error
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await client.audio.transcriptions.create(
                    model="whisper-1",
                    file=("a.wav", SOUND),
                    stream=stream,  # type: ignore[call-overload]
                )
            assert caught.value.param == "file"
            assert caught.value.status_code == (413 if kind is openai.APIStatusError else 400)
    assert uploads() == []


async def test_an_error_in_the_middle_is_raised_by_the_client(
    client: openai.AsyncOpenAI, speech: FakeSpeech
) -> None:
    """A process that dies ends a stream with an error, and a whole answer with 503."""
    speech.end = EngineDiedError("killed")
    create = client.audio.transcriptions.create
    stream = await create(model="whisper-1", file=("a.wav", SOUND), stream=True)
    with pytest.raises(openai.APIError, match="killed"):
        [event async for event in stream]
    with pytest.raises(openai.InternalServerError) as caught:
        await create(model="whisper-1", file=("a.wav", SOUND))
    assert caught.value.status_code == 503


async def test_a_client_that_leaves_ends_the_call(
    client: openai.AsyncOpenAI, speech: FakeSpeech
) -> None:
    """Who does not wait for the answer ends the work, and the file is gone."""
    speech.is_held = True
    asking = asyncio.create_task(
        client.audio.transcriptions.create(model="whisper-1", file=("a.wav", SOUND))
    )
    async with asyncio.timeout(5):
        while not speech.requests:
            await asyncio.sleep(0.01)
        assert len(uploads()) == 1
        asking.cancel()
        await asyncio.wait([asking])
        while not speech.left or uploads():
            await asyncio.sleep(0.01)


#: Forms that are refused: the fields, the file, and the field that the error names.
REFUSED: list[tuple[dict[str, Any], bytes | None, str | None]] = [
    ({}, None, "file"),
    ({}, b"", "file"),
    ({"model": "other"}, SOUND, "model"),
    ({"response_format": "xml"}, SOUND, "response_format"),
    ({"response_format": "diarized_json"}, SOUND, "response_format"),
    ({"temperature": "hot"}, SOUND, "temperature"),
    ({"temperature": "1.5"}, SOUND, "temperature"),
    ({"temperature": "nan"}, SOUND, "temperature"),
    ({"stream": "perhaps"}, SOUND, "stream"),
    ({"stream": "true", "response_format": "srt"}, SOUND, "stream"),
    ({"timestamp_granularities[]": "word"}, SOUND, "timestamp_granularities"),
    (
        {"timestamp_granularities[]": "letter", "response_format": "verbose_json"},
        SOUND,
        "timestamp_granularities[0]",
    ),
    ({"include[]": "logprobs"}, SOUND, "include"),
    ({"languages[]": ["en", "de"]}, SOUND, "languages"),
    ({"known_speaker_names[]": "Ann"}, SOUND, "known_speaker_names"),
    ({"chunking_strategy[type]": "server_vad"}, SOUND, "chunking_strategy"),
    ({"language": ["en", "de"]}, SOUND, "language"),
    ({"file": "/etc/passwd"}, None, "file"),
]


@pytest.mark.parametrize(("fields", "sound", "param"), REFUSED)
async def test_a_wrong_form_is_refused_by_name(
    server: Served,
    speech: FakeSpeech,
    fields: dict[str, Any],
    sound: bytes | None,
    param: str | None,
) -> None:
    """Missing, empty and unknown things are told before anything is computed."""
    transport = httpx2.ASGITransport(app=server.client.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        files = {"other": ("", b"x")} if sound is None else {"file": ("a.wav", sound)}
        response = await http.post("/v1/audio/transcriptions", data=fields, files=files)
    assert response.status_code == (404 if param == "model" else 400)
    assert response.json()["error"]["param"] == param
    assert speech.requests == []
    assert uploads() == []


async def test_unknown_fields_and_empty_ones_are_no_fault(
    server: Served, speech: FakeSpeech
) -> None:
    """Empty boxes of a form say nothing, and unknown fields are named in a header."""
    form = {"model": "", "language": "", "vad_filter": "true", "timestamp_granularities": ""}
    transport = httpx2.ASGITransport(app=server.client.app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://localhost:8000") as http:
        files = {"file": ("a.wav", SOUND)}
        response = await http.post("/v1/audio/transcriptions", data=form, files=files)
    assert response.status_code == 200
    assert response.headers["x-ignored-fields"] == "vad_filter"
    assert speech.requests[0].language is None


BOUNDARY = "x" * 20
PREFIX = (
    f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'.encode()
)


@pytest.mark.parametrize(
    ("content_type", "body", "status"),
    [
        ("application/json", b"{}", 400),
        ("", b"", 400),
        ("multipart/form-data", b"", 400),
        ("multipart/form-data; boundary=\xfc", b"", 400),
        (f"multipart/form-data; boundary={BOUNDARY}", PREFIX + b"cut off", 400),
        (f"multipart/form-data; boundary={BOUNDARY}", b"nothing of the kind", 400),
        (f"multipart/form-data; boundary={BOUNDARY}", PREFIX + bytes(10_001), 413),
        (f"multipart/form-data; boundary={BOUNDARY}", PREFIX + bytes(3_000_000), 413),
    ],
)
async def test_a_body_that_is_no_form_is_refused(
    server: Served, content_type: str, body: bytes, status: int
) -> None:
    """JSON, nothing, half a form and a form of too much are a clear 4xx; no file is left."""
    response = await server.client.post(
        "/v1/audio/transcriptions", headers={"content-type": content_type}, data=body
    )
    assert response.status_code == status, await response.get_data(as_text=True)
    assert uploads() == []


async def test_a_file_just_within_the_limit_is_taken(
    client: openai.AsyncOpenAI, speech: FakeSpeech
) -> None:
    """The limit is on the file, not on the form around it; one byte more is too much."""
    create = client.audio.transcriptions.create
    await create(model="whisper-1", file=("a.wav", bytes(10_000)), prompt="p" * 5000)
    assert speech.files == [bytes(10_000)]
    with pytest.raises(openai.APIStatusError, match="--max-audio-mb") as caught:
        await create(model="whisper-1", file=("a.wav", bytes(10_001)))
    assert caught.value.status_code == 413


async def test_a_sound_may_be_larger_than_any_other_body(make_server: ServerFactory) -> None:
    """`--max-body-mb` bounds the other routes only."""
    speech = FakeSpeech()
    server = await make_server(services=[planned(speech)], max_body_bytes=1000)
    async with client_of(server) as client:
        await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", bytes(50_000)))
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model="default", prompt="x" * 2000)
    assert caught.value.status_code == 413
    assert len(speech.files[0]) == 50_000


async def test_without_a_model_the_flag_is_named(make_server: ServerFactory) -> None:
    """A server that was started without one says what to start it with, before any upload."""
    async with client_of(await make_server()) as client:
        with pytest.raises(openai.NotFoundError, match="--stt-model"):
            await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", SOUND))


async def test_a_model_that_still_loads_is_a_503(
    client: openai.AsyncOpenAI, speech: FakeSpeech
) -> None:
    """Clients are told when to come again."""
    speech.state = FakeCondition(phase="loading", retry_after_s=3.0)
    with pytest.raises(openai.InternalServerError) as caught:
        await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", SOUND))
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "3"
