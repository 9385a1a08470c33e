"""Prompts of the user's own: text, JSON and JSON Lines, and what a server recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_mlx.bench.endpoints import message_text
from vllm_mlx.bench.prompt import Prompt, user_prompt
from vllm_mlx.engine.errors import UsageError

#: Fields of a request body that a run decides, whatever a file says.
_RUN_FIELDS = frozenset({"model", "stream", "stream_options", "store"})
#: Fields that become the prompt, whichever API's they are.
_PROMPT_FIELDS = frozenset({"messages", "system", "prompt", "input", "instructions", "tools"})
_LENGTH_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def load_prompts(path: Path) -> list[Prompt]:
    """Read a `.txt` (a prompt a line), `.json` or `.jsonl` file; raises `UsageError`.

    JSON holds one conversation (a list of messages), a list of them, or a list of texts or of
    objects; each line of JSON Lines holds one of these. An object is a request body: `messages`
    or `prompt`, and what else it says, such as `tools`, is sent with it.
    """
    readers = {".txt": _read_text, ".json": _read_json, ".jsonl": _read_json_lines}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise UsageError(f"{path}: prompts are read from .txt, .json and .jsonl files")
    try:
        prompts = list(reader(path, path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}") from error
    if not prompts:
        raise UsageError(f"{path} holds no prompt")
    return prompts


def load_recording(folder: Path) -> list[Prompt]:
    """Read every `.json` and `.jsonl` file of a folder, in the order of their names."""
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder of recorded requests")
    files = sorted(p for p in folder.iterdir() if p.suffix.lower() in (".json", ".jsonl"))
    if not files:
        raise UsageError(f"{folder} holds no .json or .jsonl file")
    return [prompt for file in files for prompt in load_prompts(file)]


def prompt_of_body(prompt_id: str, body: Mapping[str, Any], where: str) -> Prompt:
    """Return the prompt of a request body; raises `UsageError` naming `where` it stands."""
    messages = list(_messages_of(body, where))
    lengths = [body[name] for name in _LENGTH_FIELDS if body.get(name) is not None]
    if lengths and (not isinstance(lengths[0], int) or lengths[0] < 1):
        raise UsageError(f"{where}: max_tokens must be a positive number")
    tools = [] if body.get("tools") is None else body["tools"]
    if not isinstance(tools, list) or not all(isinstance(t, Mapping) for t in tools):
        raise UsageError(f"{where}: tools must be a list of objects")
    extra = {
        name: value
        for name, value in body.items()
        if name not in {*_RUN_FIELDS, *_PROMPT_FIELDS, *_LENGTH_FIELDS}
    }
    return Prompt(
        id=prompt_id,
        messages=tuple(messages),
        tools=tuple(tools),
        max_tokens=lengths[0] if lengths else None,
        extra=extra,
    )


def _messages_of(body: Mapping[str, Any], where: str) -> Iterator[Mapping[str, Any]]:
    """Yield the messages of a request body of any API, its system text first."""
    system = body.get("system") or body.get("instructions")
    if system:
        yield {"role": "system", "content": message_text({"content": system})}
    found = next((body[n] for n in ("messages", "input", "prompt") if body.get(n)), None)
    if isinstance(found, list) and len(found) == 1 and isinstance(found[0], str):
        # Plain completions take a list of prompts.
        found = found[0]
    if isinstance(found, str):
        yield {"role": "user", "content": found}
    else:
        yield from checked_messages(found, where)


def checked_messages(messages: Any, where: str) -> tuple[Mapping[str, Any], ...]:
    """Return a conversation's messages; raises `UsageError` for what is not one."""
    is_conversation = (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, Mapping) and isinstance(m.get("role"), str) for m in messages)
    )
    if not is_conversation:
        raise UsageError(f"{where}: not a list of messages, each with a role")
    return tuple(messages)


def read_json(path: Path) -> Any:
    """Return the JSON of a file; raises `UsageError`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {_reason(error)}") from error
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error


def _read_text(path: Path, text: str) -> Iterator[Prompt]:
    lines = (line.strip() for line in text.split("\n"))
    for number, line in enumerate(filter(None, lines), start=1):
        yield user_prompt(f"{path.stem}-{number}", line)


def _read_json(path: Path, text: str) -> Iterator[Prompt]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{path} is not JSON: {error}") from error
    is_one = isinstance(found, Mapping) or (
        isinstance(found, list) and bool(found) and _is_message(found[0])
    )
    entries: Sequence[Any] = [found] if is_one else found
    if not isinstance(entries, list):
        raise UsageError(f"{path}: not a list of prompts")
    for number, entry in enumerate(entries, start=1):
        yield _entry(entry, f"{path.stem}-{number}", f"{path}, prompt {number}")


def _read_json_lines(path: Path, text: str) -> Iterator[Prompt]:
    number = 0
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        number += 1
        where = f"{path}, line {line_number}"
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise UsageError(f"{where} is not JSON: {error}") from error
        yield _entry(entry, f"{path.stem}-{number}", where)


def _entry(entry: Any, prompt_id: str, where: str) -> Prompt:
    if isinstance(entry, str):
        return user_prompt(prompt_id, entry)
    if isinstance(entry, Mapping):
        # A recording keeps the request below a name of its own, beside what it knows of it.
        body = entry.get("body") if isinstance(entry.get("body"), Mapping) else entry
        return prompt_of_body(str(entry.get("id", prompt_id)), body or {}, where)
    return Prompt(id=prompt_id, messages=checked_messages(entry, where))


def _is_message(entry: Any) -> bool:
    return isinstance(entry, Mapping) and isinstance(entry.get("role"), str)


def _reason(error: OSError | UnicodeDecodeError) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else "it is not UTF-8 text"
