"""The command `transcribe`: sound files to text, subtitles or JSON."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.chat import REMOTE
from vllm_mlx.cli.errors import ExitCode
from vllm_mlx.cli.options import (
    Decorator,
    FiniteRange,
    RunSettings,
    given_on_command_line,
    option,
    stacked,
    verbose_option,
)
from vllm_mlx.cli.speech_options import audio_limit_options, audio_limits

if TYPE_CHECKING:
    from vllm_mlx.cli.transcribe_backends import HearingOptions, Transcriber
    from vllm_mlx.cli.transcribe_files import SoundFile
    from vllm_mlx.cli.transcribe_progress import HearingProgress
    from vllm_mlx.engine.audio.limits import AudioLimits
    from vllm_mlx.engine.audio.transcript import Transcript

#: What is loaded when nothing is said: the best that a laptop hears faster than real time.
DEFAULT_MODEL = "mlx-community/whisper-large-v3-turbo-asr-fp16"

FORMATS = ("txt", "srt", "vtt", "json")

#: Parameters that say how this process loads a model and what it takes.
LOADING = {
    "offline": "--offline",
    "max_audio_mb": "--max-audio-mb",
    "max_audio_minutes": "--max-audio-minutes",
}

hearing_options: Decorator[Any] = stacked(
    click.option(
        "--model",
        metavar="MODEL",
        help=f"Whisper model, a folder or a repository (default: {DEFAULT_MODEL}); with --url the "
        "name that the server has for it.",
    ),
    click.option(
        "--language", metavar="NAME", help="What is spoken, as de or german; default: found out."
    ),
    click.option("--translate", is_flag=True, help="Write it down in English."),
    click.option(
        "--word-timestamps",
        is_flag=True,
        help="Find when each word is said: in json, and for closer times of subtitles.",
    ),
    click.option("--prompt", metavar="TEXT", help="What comes before, or names that come up."),
    click.option(
        "--temperature",
        type=FiniteRange(0, 1),
        help="0 takes the likeliest words; default: 0, and more where that comes out badly.",
    ),
)

output_options: Decorator[Any] = stacked(
    click.option(
        "-f",
        "--format",
        "formats",
        type=click.Choice(FORMATS),
        multiple=True,
        default=("txt",),
        show_default=True,
        help="What to write; may be given several times.",
    ),
    click.option(
        "-o",
        "--output-dir",
        type=click.Path(file_okay=False, path_type=Path),
        metavar="DIR",
        help="Where to write; default: beside each sound file.",
    ),
    click.option("--stdout", "to_stdout", is_flag=True, help="Print the text instead."),
    click.option("--force", is_flag=True, help="Do files again that were done before."),
    click.option("-q", "--quiet", is_flag=True, help="Say only what goes wrong."),
)


server_options: Decorator[Any] = stacked(
    option("--url", metavar="URL", help="Have the server there do it instead."),
    option("--api-key", metavar="KEY", help="The server's key."),
    # An answer comes as a whole, after an hour of sound as after a minute.
    click.option(
        "--timeout",
        type=FiniteRange(min=0, min_open=True),
        default=3600.0,
        show_default=True,
        metavar="SECONDS",
        help="Give up on a server that has not answered for so long.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranscribeOptions:
    """Hold the parsed options of `transcribe`, by the names of their flags."""

    files: tuple[str, ...]
    model: str | None
    language: str | None
    translate: bool
    word_timestamps: bool
    prompt: str | None
    temperature: float | None
    formats: tuple[str, ...]
    output_dir: Path | None
    to_stdout: bool
    force: bool
    quiet: bool
    url: str | None
    api_key: str | None
    timeout: float
    offline: bool
    max_audio_mb: int
    max_audio_minutes: float

    @property
    def limits(self) -> AudioLimits:
        """Return what is taken of a sound file."""
        return audio_limits(self.max_audio_mb, self.max_audio_minutes)

    @property
    def hearing(self) -> HearingOptions:
        """Return how files are heard."""
        from vllm_mlx.cli.transcribe_backends import HearingOptions

        return HearingOptions(
            language=self.language,
            translate=self.translate,
            prompt=self.prompt,
            temperature=self.temperature,
            words=self.word_timestamps,
        )


@click.command()
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@hearing_options
@output_options
@server_options
@audio_limit_options
@option("--offline", is_flag=True, help="Never reach for the network.")
@verbose_option
@click.pass_context
def transcribe(ctx: click.Context, /, **values: Any) -> int:
    """Turn sound files into text.

    FILE is a sound file, a folder of them, or - for stdin. What is heard in talk.mp3 is written to
    talk.txt beside it, or as --format says; from stdin it goes to stdout. A file whose text is
    there already, and newer, is skipped, and one that cannot be read does not stop the others: the
    exit code is 1 then. Needs the extra `audio` (pip install 'vllm-mlx[audio]'), but for --url.

    \b
    Examples:
      vllm-mlx transcribe talk.mp3
      vllm-mlx transcribe recordings/ -f srt -f json --language de -o texts/
      vllm-mlx transcribe --stdout --translate interview.m4a > interview.txt
      ffmpeg -i film.mkv -f wav - | vllm-mlx transcribe - -f vtt > film.vtt
      vllm-mlx transcribe talk.mp3 --url http://localhost:8000
    """
    options = TranscribeOptions(**values)
    _check_together(options, given_on_command_line(ctx))

    from vllm_mlx.cli.logs import configure_logging
    from vllm_mlx.cli.transcribe_files import STDIN, plan_files
    from vllm_mlx.cli.transcribe_progress import HearingProgress

    configure_logging("debug" if ctx.ensure_object(RunSettings).verbose else "warning")
    to_stdout = options.to_stdout or options.files == (STDIN,)
    formats = tuple(dict.fromkeys(options.formats))
    planned = plan_files(options.files, formats, options.output_dir, to_stdout=to_stdout)
    progress = HearingProgress(len(planned), is_quiet=options.quiet)
    waiting = []
    for sound in planned:
        if sound.is_done and not options.force:
            progress.skip(sound.name)
        else:
            waiting.append(sound)
    if not waiting:
        return ExitCode.DONE
    with contextlib.closing(_open(options)) as transcriber:
        outcomes = [_hear(transcriber, sound, options, progress) for sound in waiting]
    return ExitCode.DONE if all(outcomes) else ExitCode.GATE_FAILED


def _check_together(options: TranscribeOptions, given_names: frozenset[str]) -> None:
    """Raise `UsageError` for options that contradict each other or would have no effect."""
    ineffective = LOADING if options.url is not None else REMOTE
    flags = [flag for name, flag in ineffective.items() if name in given_names]
    if flags and options.url is not None:
        raise click.UsageError(f"{', '.join(flags)} cannot be used with --url: the server decides")
    if flags:
        raise click.UsageError(f"{', '.join(flags)} needs --url")
    is_printed = options.to_stdout or "-" in options.files
    if options.to_stdout and options.output_dir is not None:
        raise click.UsageError("--stdout and --output-dir say two places; leave one of them out")
    if is_printed and len(set(options.formats)) > 1:
        raise click.UsageError("only one --format can go to stdout")
    if options.translate and options.url is not None and options.language is not None:
        raise click.UsageError("a server finds out the language of what it translates itself")


def _open(options: TranscribeOptions) -> Transcriber:
    """Load the model, or find the server."""
    from vllm_mlx.cli.transcribe_backends import open_local, open_server

    if options.url is not None:
        return open_server(
            options.url, model=options.model, api_key=options.api_key, timeout_s=options.timeout
        )
    from vllm_mlx.cli.loading import LoadingProgress
    from vllm_mlx.engine.audio.extra import require_audio_extra
    from vllm_mlx.engine.audio.kind import TranscriptionConfig

    require_audio_extra()
    config = TranscriptionConfig(
        model=options.model or DEFAULT_MODEL, offline=options.offline, limits=options.limits
    )
    if options.quiet:
        return open_local(config, _unshown)
    with LoadingProgress() as show:
        return open_local(config, show)


def _unshown(stage: str, fraction: float | None) -> None:
    del stage, fraction


def _hear(
    transcriber: Transcriber,
    sound: SoundFile,
    options: TranscribeOptions,
    progress: HearingProgress,
) -> bool:
    """Do one file and say what became of it; return whether it was done.

    Raises what concerns the other files, too: a server that is gone, a key that is wrong.
    """
    from vllm_mlx.engine.errors import InvalidRequestError, RowFailedError

    started = time.monotonic()
    try:
        with _on_disk(sound, options.limits) as path, progress.file(sound.name) as on_heard:
            transcript = transcriber.hear(path, options.hearing, on_heard)
        _write(transcript, sound, options)
    except (InvalidRequestError, RowFailedError) as error:
        if isinstance(error, InvalidRequestError) and error.param not in (None, "file"):
            raise
        progress.failed(sound.name, error.message)
        return False
    except BrokenPipeError:
        raise
    except OSError as error:
        progress.failed(sound.name, error.strerror or str(error))
        return False
    seconds = time.monotonic() - started
    progress.done(sound.name, transcript.duration_s, seconds, sound.outputs)
    return True


@contextlib.contextmanager
def _on_disk(sound: SoundFile, limits: AudioLimits) -> Iterator[Path]:
    """Have the sound in a file, for as long as the block runs."""
    if sound.path is not None:
        yield sound.path
        return
    with tempfile.NamedTemporaryFile(prefix="vllm-mlx-stdin-") as file:
        num_bytes = 0
        while piece := sys.stdin.buffer.read(1024 * 1024):
            num_bytes += len(piece)
            if num_bytes > limits.max_bytes:
                raise limits.too_large()
            file.write(piece)
        file.flush()
        yield Path(file.name)


def _write(transcript: Transcript, sound: SoundFile, options: TranscribeOptions) -> None:
    from vllm_mlx.cli.transcribe_files import write_whole

    renderers = _renderers()
    for path in sound.outputs:
        write_whole(path, renderers[path.suffix[1:]](transcript))
    if sound.outputs:
        return
    text = renderers[options.formats[0]](transcript)
    if options.formats[0] == "json":
        # One line each, so that several files are JSON Lines.
        text = json.dumps({"file": sound.name, **json.loads(text)}, ensure_ascii=False) + "\n"
    click.echo(text, nl=False)


def _renderers() -> dict[str, Callable[[Transcript], str]]:
    from vllm_mlx.engine.audio.result_formats import (
        render_json,
        render_srt,
        render_text,
        render_vtt,
    )

    return {"txt": render_text, "srt": render_srt, "vtt": render_vtt, "json": render_json}
