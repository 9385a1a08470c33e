"""Hold what `transcribe` writes, skips, survives and refuses, over a model that says the name."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.cli import transcribe_backends
from vllm_mlx.cli.main import main
from vllm_mlx.cli.transcribe_backends import HearingOptions, OnHeard
from vllm_mlx.engine.audio.kind import TranscriptionConfig
from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.engine.audio.transcript import Segment, Transcript, Word
from vllm_mlx.engine.errors import InvalidRequestError


class FakeTranscriber:
    """Hear in each file what is written in it; refuse those that say so."""

    def __init__(self) -> None:
        self.config: TranscriptionConfig | None = None
        self.heard: list[tuple[str, HearingOptions]] = []
        self.is_closed = False

    def hear(self, path: Path, options: HearingOptions, on_heard: OnHeard) -> Transcript:
        """Return the file's text as one segment of two seconds."""
        text = path.read_text()
        self.heard.append((text, options))
        on_heard(1.0, 2.0)
        if text == "bad":
            raise InvalidRequestError("no sound", param="file")
        if text == "wrong":
            raise InvalidRequestError("no such language", param="language")
        if text == "stop":
            raise KeyboardInterrupt
        words = (Word(f" {text}", 0.25, 1.5),) if options.words else None
        segment = Segment(id=0, start_s=0.0, end_s=2.0, text=f" {text}", words=words)
        return Transcript(
            language="en", language_name="english", duration_s=2.0, segments=(segment,)
        )

    def close(self) -> None:
        """Take note."""
        self.is_closed = True


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeTranscriber:
    """Stand in for the model in this process."""
    fake = FakeTranscriber()

    def open_local(config: TranscriptionConfig, on_progress: Any) -> FakeTranscriber:
        fake.config = config
        return fake

    monkeypatch.setattr(transcribe_backends, "open_local", open_local)
    monkeypatch.setattr("vllm_mlx.engine.audio.extra.require_audio_extra", lambda: None)
    monkeypatch.setattr("vllm_mlx.cli.logs.configure_logging", lambda level: None)
    return fake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the current folder, with sound in it and in a folder of it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for name, text in [("a.mp3", "one"), ("in/b.WAV", "two"), ("in/notes.md", "no")]:
        (tmp_path / name).write_text(text)
    return tmp_path


def listed(folder: Path) -> list[str]:
    """Return the files below a folder."""
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def test_text_stands_beside_each_file(
    model: FakeTranscriber, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Files and folders are read, what is no sound in a folder is not, and stdout stays empty."""
    assert main(["transcribe", "a.mp3", "in", "a.mp3"]) == 0
    assert (folder / "a.txt").read_text() == "one\n"
    assert listed(folder) == ["a.mp3", "a.txt", "in/b.WAV", "in/b.txt", "in/notes.md"]
    said = capsys.readouterr()
    assert said.out == ""
    lines = said.err.splitlines()
    assert len(lines) == 2
    said_of_it = r"a\.mp3: 0:02 of sound in [\d.]+ s \([\d.]+x real time\), written to a\.txt"
    assert re.fullmatch(said_of_it, lines[0])
    assert model.is_closed


def test_every_format_and_another_folder(model: FakeTranscriber, folder: Path) -> None:
    """Each format is a file of its own, in a folder that is made for them."""
    words = ["-f", "srt", "-f", "vtt", "-f", "json", "-f", "txt", "-o", "out/texts"]
    assert main(["transcribe", "a.mp3", *words, "--word-timestamps", "-q"]) == 0
    texts = {p.suffix: p.read_text() for p in (folder / "out/texts").iterdir()}
    assert texts[".srt"] == "1\n00:00:00,000 --> 00:00:02,000\none\n\n"
    assert texts[".vtt"].startswith("WEBVTT\n\n00:00:00.000")
    assert json.loads(texts[".json"])["words"] == [{"word": "one", "start": 0.25, "end": 1.5}]
    assert texts[".txt"] == "one\n"


def test_options_arrive(model: FakeTranscriber, folder: Path) -> None:
    """Model, limits and how to hear reach what hears."""
    words = ["--model", "org/w", "--offline", "--max-audio-mb", "3", "--max-audio-minutes", "2"]
    words += ["--language", "de", "--translate", "--prompt", "P", "--temperature", "0.5"]
    assert main(["transcribe", "a.mp3", *words]) == 0
    limits = AudioLimits(max_bytes=3 * 2**20, max_seconds=120.0)
    assert model.config == TranscriptionConfig(model="org/w", offline=True, limits=limits)
    options = HearingOptions(language="de", translate=True, prompt="P", temperature=0.5)
    assert model.heard == [("one", options)]


def test_what_is_done_is_skipped(
    model: FakeTranscriber, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file is done when all its outputs are newer; then not even a model is loaded."""
    assert main(["transcribe", "a.mp3"]) == 0
    model.config = None
    assert main(["transcribe", "a.mp3"]) == 0
    assert model.config is None
    assert "done before; --force" in capsys.readouterr().err
    assert main(["transcribe", "a.mp3", "-f", "txt", "-f", "srt"]) == 0
    os.utime(folder / "a.mp3", (2**31, 2**31))
    assert main(["transcribe", "a.mp3"]) == 0
    os.utime(folder / "a.mp3", (0, 0))
    assert main(["transcribe", "a.mp3", "--force"]) == 0
    assert len(model.heard) == 4


def test_a_bad_file_does_not_stop_the_others(
    model: FakeTranscriber, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What cannot be read, or is not there, is named, and the exit code is 1 at the end."""
    (folder / "bad.wav").write_text("bad")
    assert main(["transcribe", "bad.wav", "missing.wav", "a.mp3", "-q"]) == 1
    assert (folder / "a.txt").is_file()
    assert not (folder / "bad.txt").exists()
    assert capsys.readouterr().err.splitlines() == [
        "Error: bad.wav: no sound",
        "Error: missing.wav: No such file or directory",
    ]


def test_what_concerns_every_file_ends_the_command(
    model: FakeTranscriber, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A language that does not exist is said once."""
    (folder / "wrong.wav").write_text("wrong")
    assert main(["transcribe", "wrong.wav", "a.mp3"]) == 2
    assert "no such language" in capsys.readouterr().err
    assert len(model.heard) == 1


def test_ctrl_c_loses_nothing_that_was_done(model: FakeTranscriber, folder: Path) -> None:
    """The files before are there, the one under way is not, nor a part of it."""
    (folder / "z.wav").write_text("stop")
    assert main(["transcribe", "a.mp3", "z.wav"]) == 130
    assert listed(folder) == ["a.mp3", "a.txt", "in/b.WAV", "in/notes.md", "z.wav"]
    assert model.is_closed


def test_files_of_one_name_do_not_share_a_text(model: FakeTranscriber, folder: Path) -> None:
    """Two sounds of one stem, or two folders' into one, keep their suffix or are told apart."""
    (folder / "a.wav").write_text("three")
    assert main(["transcribe", "a.mp3", "a.wav"]) == 0
    assert (folder / "a.mp3.txt").read_text() == "one\n"
    assert (folder / "a.wav.txt").read_text() == "three\n"


def test_stdout_and_stdin(
    model: FakeTranscriber,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Stdin goes to stdout, and files do with --stdout; several of JSON are a line each."""
    with (folder / "a.mp3").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["transcribe", "-"]) == 0
    assert capsys.readouterr().out == "one\n"
    assert main(["transcribe", "a.mp3", "in", "--stdout", "-f", "json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["file"], line["text"]) for line in lines] == [
        ("a.mp3", "one"),
        ("in/b.WAV", "two"),
    ]
    assert listed(folder) == ["a.mp3", "in/b.WAV", "in/notes.md"]


def test_stdin_has_the_limit_of_a_file(
    model: FakeTranscriber, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless stdin ends at the limit."""
    with Path("/dev/zero").open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert main(["transcribe", "-", "--max-audio-mb", "2"]) == 1
    assert model.heard == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Missing argument"),
        (["a.mp3", "--stdout", "-o", "out"], "leave one of them out"),
        (["a.mp3", "--stdout", "-f", "srt", "-f", "txt"], "only one --format"),
        (["a.mp3", "--api-key", "k"], "--api-key needs --url"),
        (["a.mp3", "--url", "x", "--offline"], "the server decides"),
        (["a.mp3", "--url", "x", "--translate", "--language", "de"], "finds out the language"),
        (["in/empty"], "no sound files"),
        (["a.mp3", "--temperature", "2"], "--temperature"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error(
    model: FakeTranscriber,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    """Contradictions, and options without effect, end with 2 before anything is loaded."""
    (folder / "in/empty").mkdir()
    assert main(["transcribe", *words]) == 2
    assert said in capsys.readouterr().err
    assert model.config is None


class SpeechServer(BaseHTTPRequestHandler):
    """Answer as an OpenAI server does, with what the test put into the class."""

    status = 200
    answer: dict[str, Any]
    received: list[tuple[str, str | None, bytes]]

    def do_POST(self) -> None:
        """Keep the request and send the answer."""
        body = self.rfile.read(int(self.headers["content-length"]))
        self.received.append((self.path, self.headers["authorization"], body))
        raw = json.dumps(self.answer).encode()
        self.send_response(self.status)
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[tuple[str, type[SpeechServer]]]:
    """Return the address of a server, and what it answers with."""
    handler = type("Handler", (SpeechServer,), {"received": [], "answer": {}})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{http.server_address[1]}", handler
        http.shutdown()
        thread.join()


def test_a_server_hears_instead(
    folder: Path, server: tuple[str, type[SpeechServer]], model: FakeTranscriber
) -> None:
    """With --url the file is sent with every option, and the answer written in any format."""
    url, handler = server
    segment = {"id": 0, "start": 0.5, "end": 1.0, "text": " Hi."}
    words = [{"word": "Hi.", "start": 0.5, "end": 0.75}]
    handler.answer = {"text": "Hi.", "duration": 2.0, "language": "english"}
    handler.answer |= {"segments": [segment], "words": words}
    asked = ["--url", url, "--model", "whisper-1", "--api-key", "secret", "--language", "de"]
    assert main(["transcribe", "a.mp3", *asked, "--word-timestamps", "-f", "json"]) == 0
    path, key, body = handler.received[0]
    assert (path, key) == ("/v1/audio/transcriptions", "Bearer secret")
    for piece in (b"whisper-1", b"verbose_json", b"word", b"de", b'filename="a.mp3"', b"one"):
        assert piece in body
    written = json.loads((folder / "a.json").read_text())
    assert (written["text"], written["words"]) == ("Hi.", words)
    assert model.config is None


def test_a_server_that_refuses_a_file_or_is_gone(
    folder: Path, server: tuple[str, type[SpeechServer]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that it cannot read is the file's fault; a missing model, or no server, is not."""
    url, handler = server
    error = {"message": "no sound", "param": "file", "code": "invalid_value"}
    handler.status, handler.answer = 400, {"error": error}
    assert main(["transcribe", "a.mp3", "in", "--url", url]) == 1
    assert len(handler.received) == 2
    handler.status = 404
    handler.answer = {"error": {"message": "use --stt-model", "code": "model_not_found"}}
    assert main(["transcribe", "a.mp3", "in", "--url", url]) == 2
    assert len(handler.received) == 3
    handler.status, handler.answer = 200, {"text": "no more than that"}
    assert main(["transcribe", "a.mp3", "--url", url]) == 5
    assert main(["transcribe", "a.mp3", "--url", "http://127.0.0.1:9"]) == 5
    assert "does not answer as it should" in capsys.readouterr().err
