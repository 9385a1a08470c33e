"""Prompts to be warmed: JSON, JSON Lines, folders of them, and recorded requests; no engine.

A prompt is a list of messages; or the body of a request, of which only what decides the prompt is
looked at (`messages` and `tools`, or `prompt`, and the template's options); or a recorded request,
which keeps its body under `body`. A body with `system`, or tools with an `input_schema`, is one of
the Messages API, as is what was recorded there; one with `input` or `instructions` is one of the
Responses API.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import msgspec

from vllm_mlx.engine.errors import InvalidRequestError, UsageError
from vllm_mlx.server.anthropic import fields as anthropic_fields
from vllm_mlx.server.anthropic.schemas import PrefixBody
from vllm_mlx.server.openai.schemas import ChatCompletionBody, CompletionBody
from vllm_mlx.server.openai.validation import validate
from vllm_mlx.server.responses_api import fields as responses_fields
from vllm_mlx.server.responses_api.schemas import ResponsesBody

SUFFIXES = (".json", ".jsonl")

#: Fields of a body that decide the prompt; others have no effect on what is stored.
_PROMPT_FIELDS = frozenset(
    {
        *("messages", "tools", "functions", "prompt", "add_special_tokens", "chat_template_kwargs"),
        *("enable_thinking", "reasoning_effort", "add_generation_prompt"),
        "continue_final_message",
    }
)
_SYSTEM_ROLES = frozenset({"system", "developer"})

#: The same of the Responses API.
_RESPONSES_FIELDS = frozenset(
    {
        *("input", "instructions", "previous_response_id", "tools", "tool_choice", "reasoning"),
        *("chat_template_kwargs", "enable_thinking"),
    }
)

_MESSAGES_PATH = "/v1/messages"
_RESPONSES_PATH = "/v1/responses"

#: Routes whose recorded requests can be read.
RECORDED_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", _MESSAGES_PATH, _RESPONSES_PATH}
)


@dataclass(frozen=True)
class WarmPrompt:
    """Hold one prompt and say where it stands."""

    where: str
    #: As a request would have it, and the same checked.
    fields: Mapping[str, Any]
    body: ChatCompletionBody | CompletionBody | PrefixBody | ResponsesBody


@dataclass
class WarmPrompts:
    """Hold the prompts that could be read, and say of each other one why not."""

    prompts: list[WarmPrompt] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    def add(self, entry: Any, where: str, *, system_only: bool) -> None:
        """Check one prompt and add it; with `system_only` what comes before the first question."""
        try:
            prompt = warm_prompt(entry, where, system_only=system_only)
        except InvalidRequestError as error:
            self.faults.append(f"{where}: {error.message}")
        else:
            if prompt is not None:
                self.prompts.append(prompt)


def read_prompts(path: Path, *, system_only: bool = False) -> WarmPrompts:
    """Read a file, or all `.json` and `.jsonl` files of a folder in the order of their names.

    Raises `UsageError` for what cannot be read or holds nothing; single prompts become faults.
    """
    found = WarmPrompts()
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix.lower() in SUFFIXES)
    for file in files:
        for entry, where in _entries(file, found.faults):
            found.add(entry, where, system_only=system_only)
    if not found.prompts and not found.faults and not system_only:
        raise UsageError(f"{path} holds no prompt")
    return found


def warm_prompt(entry: Any, where: str, *, system_only: bool = False) -> WarmPrompt | None:
    """Return the prompt that an entry means; None if `system_only` leaves nothing of it.

    Raises `InvalidRequestError` for what no request could hold.
    """
    if _is_anthropic(entry):
        return _messages_prompt(entry, where, system_only=system_only)
    if _is_of_responses(entry):
        return _responses_prompt(entry, where, system_only=system_only)
    fields = _body_of(entry)
    if system_only:
        if not isinstance(fields.get("messages"), list):
            return None
        system = takewhile(_is_system, fields["messages"])
        fields = {**fields, "messages": list(system)}
        if not fields["messages"]:
            return None
    if "messages" in fields:
        body: ChatCompletionBody | CompletionBody = validate(ChatCompletionBody, fields)
    elif "prompt" in fields:
        body = validate(CompletionBody, fields)
    else:
        raise InvalidRequestError("a prompt is a list of messages, or has messages or a prompt")
    return WarmPrompt(where, fields, body)


def _messages_prompt(
    entry: Mapping[str, Any], where: str, *, system_only: bool
) -> WarmPrompt | None:
    """Return the prompt of a body of the Messages API."""
    given = _given(entry)
    fields = {name: given[name] for name in PrefixBody.model_fields.keys() & given.keys()}
    if system_only:
        messages = fields.get("messages")
        system = takewhile(_is_system, messages) if isinstance(messages, list) else ()
        fields["messages"] = list(system)
        if not (fields["messages"] or fields.get("system") or fields.get("tools")):
            return None
    body = validate(PrefixBody, fields, anthropic_fields.POLICIES)
    return WarmPrompt(where, {"path": _MESSAGES_PATH, "body": fields}, body)


def _responses_prompt(
    entry: Mapping[str, Any], where: str, *, system_only: bool
) -> WarmPrompt | None:
    """Return the prompt of a body of the Responses API, which must be all of it."""
    given = _given(entry)
    fields = {name: given[name] for name in _RESPONSES_FIELDS & given.keys()}
    if fields.get("previous_response_id") is not None:
        raise InvalidRequestError(
            "previous_response_id goes on with what only the server has that answered it",
            param="previous_response_id",
        )
    if system_only:
        items = fields.get("input")
        fields["input"] = list(takewhile(_is_system, items)) if isinstance(items, list) else []
        if not (fields["input"] or fields.get("instructions")):
            return None
    body = validate(ResponsesBody, fields, responses_fields.POLICIES)
    return WarmPrompt(where, {"path": _RESPONSES_PATH, "body": fields}, body)


def _given(entry: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body of an entry, which is one or keeps it under `body`."""
    given = entry.get("body", entry)
    if not isinstance(given, Mapping):
        raise InvalidRequestError("the body of a request is an object")
    return given


def _is_of_responses(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    if "path" in entry:
        return bool(entry["path"] == _RESPONSES_PATH)
    body = entry.get("body", entry)
    return isinstance(body, Mapping) and ("input" in body or "instructions" in body)


def _is_anthropic(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    if "path" in entry:
        return bool(entry["path"] == _MESSAGES_PATH)
    body = entry.get("body", entry)
    if not isinstance(body, Mapping):
        return False
    tools = body.get("tools")
    if not isinstance(tools, list):
        tools = []
    return "system" in body or any(isinstance(t, Mapping) and "input_schema" in t for t in tools)


def _entries(file: Path, faults: list[str]) -> Iterator[tuple[Any, str]]:
    """Yield the prompts of a file and where they stand."""
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror or error}") from error
    if file.suffix.lower() == ".jsonl":
        for number, line in enumerate(data.split(b"\n"), start=1):
            if line.strip():
                where = f"{file}, line {number}"
                try:
                    yield _decoded(line), where
                except ValueError as error:
                    faults.append(f"{where}: not JSON: {error}")
        return
    try:
        document = _decoded(data)
    except ValueError as error:
        raise UsageError(f"{file} is not JSON: {error}") from error
    is_one = isinstance(document, dict) or _is_conversation(document)
    entries = [document] if is_one else document
    if not isinstance(entries, list):
        raise UsageError(f"{file} holds no list of prompts")
    for number, entry in enumerate(entries, start=1):
        yield entry, f"{file}, prompt {number}"


def _decoded(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _body_of(entry: Any) -> dict[str, Any]:
    """Return the fields of a request that decide its prompt."""
    if isinstance(entry, list):
        return {"messages": entry}
    if isinstance(entry, dict):
        if entry.get("path", "/v1/completions") not in RECORDED_PATHS:
            raise InvalidRequestError(f"requests to {entry['path']} cannot be warmed")
        body = entry.get("body", entry)
        if isinstance(body, dict):
            return {name: value for name, value in body.items() if name in _PROMPT_FIELDS}
    raise InvalidRequestError("a prompt is a list of messages, or an object with messages")


def _is_system(message: Any) -> bool:
    return isinstance(message, dict) and message.get("role") in _SYSTEM_ROLES


def _is_conversation(document: Any) -> bool:
    return (
        bool(document)
        and isinstance(document, list)
        and isinstance(document[0], dict)
        and ("role" in document[0])
    )
