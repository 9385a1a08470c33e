"""Speech beside chat in real processes: it delays nobody, and what kills it touches nobody."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from support.server_process import ServerProcess
from support.sound_files import BROKEN, wav_bytes, write
from support.tiny_folder import write_tiny_folder
from support.tiny_whisper import make_whisper

pytest.importorskip("mlx_audio", reason="the extra `audio` is not installed")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: The longest that a probe may take beside a transcription, on a machine that does other things.
_MAX_HEALTH_S = 0.25


@pytest.fixture(scope="module")
def server(
    tmp_path_factory: pytest.TempPathFactory, demo_model_path: Path
) -> Iterator[ServerProcess]:
    """Return a server of a tiny chat model and a tiny speech model."""
    folder = tmp_path_factory.mktemp("server")
    (folder / "chat").mkdir()
    chat = write_tiny_folder(folder / "chat", demo_model_path)
    whisper = make_whisper(folder / "whisper")
    with ServerProcess(
        str(chat), folder, "--stt-model", f"whisper-1={whisper}", "--kv-memory-mb", "64"
    ) as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """Return the real client."""
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="not-needed", max_retries=0, timeout=120
    ) as made:
        yield made


@pytest.fixture(scope="module")
def long_sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return ten minutes of noise."""
    samples = 0.2 * np.random.default_rng(1).standard_normal(16000 * 600)
    folder = tmp_path_factory.mktemp("sounds")
    return write(folder, "long.wav", wav_bytes(np.clip(samples, -1, 1)))


def speech_of(server: ServerProcess) -> dict[str, Any]:
    """Return what the status says of the speech engine."""
    services: list[dict[str, Any]] = server.status()["services"]
    return services[0]


def wait_until(is_so: Any, timeout_s: float = 60.0) -> None:
    """Poll until `is_so()`."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_real_client_is_answered(client: openai.OpenAI, tmp_path: Path) -> None:
    """Every format, streamed and not, of any sound; what is none is a 400."""
    create = client.audio.transcriptions.create
    samples = 0.2 * np.random.default_rng(2).standard_normal(44100 * 2)
    path = write(tmp_path, "x.mp3", wav_bytes(samples, 44100, num_channels=2))
    text = create(model="whisper-1", file=path, language="en").text
    assert text
    assert (
        create(model="whisper-1", file=path, language="en", response_format="text") == f"{text}\n"
    )
    verbose = create(
        model="whisper-1",
        file=path,
        language="en",
        response_format="verbose_json",
        timestamp_granularities=["word", "segment"],
    )
    assert verbose.duration == 2.0
    assert verbose.words
    events = list(create(model="whisper-1", file=path, language="en", stream=True))
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert "".join(deltas) == text
    for kind in ("noise", "wav without samples"):
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError):
                create(
                    model="whisper-1",
                    file=("x.wav", BROKEN[kind]()),
                    stream=stream,  # type: ignore[call-overload]
                )


def test_chat_and_health_go_on_beside_a_long_file(
    server: ServerProcess, client: openai.OpenAI, long_sound: Path
) -> None:
    """While ten minutes are heard, probes answer at once and a chat keeps a fair rate."""
    alone = chat_rate(client)
    probes: list[float] = []
    is_over = threading.Event()

    def listen() -> None:
        with client.audio.transcriptions.create(
            model="whisper-1", file=long_sound, stream=True
        ) as stream:
            for _ in stream:
                if is_over.is_set():
                    return

    listener = threading.Thread(target=listen)
    listener.start()
    try:
        wait_until(lambda: speech_of(server)["num_open"] == 1)
        for _ in range(40):
            started = time.monotonic()
            assert server.get("/health").status_code == 200
            probes.append(time.monotonic() - started)
        beside = chat_rate(client)
        assert speech_of(server)["num_open"] == 1
    finally:
        is_over.set()
        listener.join(120)
    print(  # noqa: T201
        f"chat alone {alone:.0f} tok/s, beside {beside:.0f}; "
        f"health median {statistics.median(probes) * 1000:.1f} ms"
    )
    assert statistics.median(probes) < _MAX_HEALTH_S
    assert beside > 0.3 * alone


def chat_rate(client: openai.OpenAI) -> float:
    """Return the tokens a second of one stream."""
    started = time.monotonic()
    answer = client.completions.create(
        model="default",
        prompt="a b c",
        max_tokens=400,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert answer.usage is not None
    return answer.usage.completion_tokens / (time.monotonic() - started)


def test_a_client_that_leaves_frees_the_engine(server: ServerProcess, long_sound: Path) -> None:
    """A closed connection ends the work within a window, and the upload is gone."""
    with (
        long_sound.open("rb") as file,
        httpx.Client(timeout=60) as http,
        http.stream(
            "POST",
            f"{server.url}/v1/audio/transcriptions",
            data={"stream": "true"},
            files={"file": file},
        ) as response,
    ):
        assert response.status_code == 200
        assert speech_of(server)["num_open"] == 1
    wait_until(lambda: speech_of(server)["num_open"] == 0)


def test_killing_it_leaves_chat_untouched(
    server: ServerProcess, client: openai.OpenAI, long_sound: Path
) -> None:
    """The file that was heard ends with an error, the chat with its answer; it comes back."""
    failures: list[Exception] = []

    def listen() -> None:
        try:
            client.audio.transcriptions.create(model="whisper-1", file=long_sound)
        except openai.OpenAIError as error:
            failures.append(error)

    listener = threading.Thread(target=listen)
    listener.start()
    wait_until(lambda: speech_of(server)["num_open"] == 1)
    chat = client.completions.create(model="default", prompt="a b", max_tokens=200, stream=True)
    next(iter(chat))
    os.kill(speech_of(server)["pid"], signal.SIGKILL)
    rest = list(chat)
    listener.join(30)
    assert rest[-1].choices[0].finish_reason in ("stop", "length")
    assert [type(error) for error in failures] == [openai.InternalServerError]
    wait_until(lambda: speech_of(server)["phase"] == "ready")
    assert server.status()["engine"]["restarts"] == 0
    sound = wav_bytes(np.zeros(16000))
    assert client.audio.transcriptions.create(model="whisper-1", file=("a.wav", sound)) is not None
