"""One question and its answer, for scripts: text or JSON on stdout and nothing else there."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import click

from vllm_mlx.cli.chat_backends import ChatBackend, ChatSampling
from vllm_mlx.cli.chat_session import AnswerRecord, Conversation
from vllm_mlx.engine.errors import UsageError


def read_question(parts: Sequence[str]) -> str:
    """Return the question made of the `-m` parts, stdin in place of `-` or of no part at all.

    Raises `UsageError` when it is empty or stdin is not UTF-8.
    """
    read = [_read_stdin() if part == "-" else part for part in parts or ("-",)]
    question = "\n\n".join(part for part in read if part.strip())
    if not question:
        raise UsageError("the question is empty; give it with -m or pipe it in")
    return question


def _read_stdin() -> str:
    if sys.stdin.isatty():
        click.echo("Type the question; Ctrl-D on a line of its own sends it.", err=True)
    try:
        return sys.stdin.buffer.read().decode("utf-8").strip("\n")
    except UnicodeDecodeError as error:
        raise UsageError(f"stdin is not UTF-8 text: {error}") from error


def answer_once(
    backend: ChatBackend,
    question: str,
    *,
    system: str | None,
    sampling: ChatSampling,
    as_json: bool,
    out: TextIO,
    note: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Ask `question` and write the answer to `out`: as it streams, or as one JSON object.

    Raises the backend's errors; with `as_json` nothing has been written then.
    """
    conversation = Conversation(system)
    conversation.ask(question)
    record = AnswerRecord(started_at=clock())
    with contextlib.closing(backend.answer(conversation.messages, sampling)) as deltas:
        for delta in deltas:
            record.add(delta, clock())
            if not as_json:
                out.write(delta.text)
                out.flush()
    if as_json:
        out.write(json.dumps(as_object(record, backend.model_name), ensure_ascii=False))
    out.write("\n")
    out.flush()
    if record.finish_reason == "length" and not as_json:
        note(f"cut off at {sampling.max_tokens} tokens or the context's end")


def as_object(record: AnswerRecord, model_name: str) -> dict[str, Any]:
    """Return the answer as `--json` prints it."""
    usage = record.usage
    return {
        "model": model_name,
        "answer": record.text,
        "finish_reason": record.finish_reason,
        "usage": None
        if usage is None
        else {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
        "timings": record.timings(),
    }
