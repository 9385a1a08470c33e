"""The checks of a workload's case: what an answer must be, said in words when it is not."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_mlx.bench.answer import Answer
from vllm_mlx.engine.errors import UsageError

#: What each check takes; a check that is not here is refused.
CHECK_TYPES: Mapping[str, str] = {
    "finish_reason": "texts",
    "required_regex": "regexes",
    "forbidden_regex": "regexes",
    "min_chars": "count",
    "max_chars": "count",
    "json": "bool",
    "json_schema": "object",
    "tool_call_count": "count",
    "tool_call_names": "texts",
    "tool_call_args_required_keys": "object",
    "no_tool_calls": "bool",
}
#: Checks of which a case has its own and the defaults'; of any other it has its own alone.
_ADDED_UP = ("required_regex", "forbidden_regex")


@dataclasses.dataclass(frozen=True)
class Checks:
    """Hold a case's checks, made by `parse_checks`."""

    values: Mapping[str, Any]

    def issues(self, answer: Answer) -> list[str]:
        """Return what is wrong with an answer, nothing for a good one.

        An answer cut off by its length, or without text and tool calls, is always wrong, unless
        `finish_reason` allows `length`.
        """
        found = [*self._finish_issues(answer), *self._text_issues(answer.content)]
        found += self._json_issues(answer.content)
        found += self._tool_issues(answer)
        return found

    def _finish_issues(self, answer: Answer) -> list[str]:
        found = []
        allowed = self.values.get("finish_reason")
        if allowed is not None and answer.finish_reason not in allowed:
            found.append(f"finish_reason is {answer.finish_reason}, not {' or '.join(allowed)}")
        elif allowed is None and answer.finish_reason == "length":
            found.append("the answer was cut off by its length")
        if not answer.content.strip() and not answer.tool_calls:
            found.append("the answer is empty")
        return found

    def _text_issues(self, text: str) -> list[str]:
        found = [
            f"nothing matches /{pattern}/"
            for pattern in self.values.get("required_regex", ())
            if not re.search(pattern, text)
        ]
        for pattern in self.values.get("forbidden_regex", ()):
            match = re.search(pattern, text)
            if match:
                found.append(f"'{match.group()[:40]}' matches the forbidden /{pattern}/")
        if len(text) < self.values.get("min_chars", 0):
            found.append(f"{len(text)} characters, at least {self.values['min_chars']} wanted")
        if "max_chars" in self.values and len(text) > self.values["max_chars"]:
            found.append(f"{len(text)} characters, at most {self.values['max_chars']} wanted")
        return found

    def _json_issues(self, text: str) -> list[str]:
        schema = self.values.get("json_schema")
        if not self.values.get("json") and schema is None:
            return []
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            return [f"the answer is not JSON: {error}"]
        if schema is None:
            return []
        from jsonschema.validators import validator_for

        errors = validator_for(schema)(schema).iter_errors(found)
        return [f"at {error.json_path}: {error.message[:120]}" for error in errors]

    def _tool_issues(self, answer: Answer) -> list[str]:
        calls = [answer.tool_calls[index] for index in sorted(answer.tool_calls)]
        names = [call.name for call in calls]
        found = []
        if self.values.get("no_tool_calls") and calls:
            found.append(f"{len(calls)} tool calls, none wanted")
        if "tool_call_count" in self.values and len(calls) != self.values["tool_call_count"]:
            found.append(f"{len(calls)} tool calls, {self.values['tool_call_count']} wanted")
        wanted = self.values.get("tool_call_names")
        if wanted is not None and sorted(names) != sorted(wanted):
            called = ", ".join(names) or "nothing"
            found.append(f"called {called}, not {', '.join(wanted)}")
        for name, keys in self.values.get("tool_call_args_required_keys", {}).items():
            for call in calls:
                if call.name == name:
                    found += _missing_keys(name, call.arguments, keys)
        return found


def parse_checks(defaults: Any, own: Any, where: str) -> Checks:
    """Return a case's checks together with the defaults'; raises `UsageError` naming `where`."""
    values: dict[str, Any] = {}
    for source in (defaults, own):
        if not isinstance(source, Mapping):
            raise UsageError(f"{where}: checks must be an object")
        for name, value in source.items():
            checked = _checked(name, value, where)
            values[name] = [*values.get(name, []), *checked] if name in _ADDED_UP else checked
    if values.get("no_tool_calls") and values.get("tool_call_names"):
        raise UsageError(f"{where}: no_tool_calls and tool_call_names exclude each other")
    return Checks(values)


def _checked(name: str, value: Any, where: str) -> Any:
    kind = CHECK_TYPES.get(name)
    if kind is None:
        raise UsageError(f"{where}: there is no check '{name}'; known: {', '.join(CHECK_TYPES)}")
    if kind in ("texts", "regexes"):
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise UsageError(f"{where}: {name} takes a text or a list of texts")
        if kind == "regexes":
            _compile_all(name, texts, where)
        return texts
    if kind == "bool":
        if not isinstance(value, bool):
            raise UsageError(f"{where}: {name} takes true or false")
    elif kind == "count":
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise UsageError(f"{where}: {name} takes a whole number")
    elif not isinstance(value, Mapping):
        raise UsageError(f"{where}: {name} takes an object")
    elif name == "json_schema":
        _check_schema(value, where)
    elif not all(isinstance(keys, list) for keys in value.values()):
        raise UsageError(f"{where}: {name} takes a list of keys for each tool")
    return value


def _compile_all(name: str, patterns: Sequence[str], where: str) -> None:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise UsageError(f"{where}: {name} /{pattern}/ is no expression: {error}") from error


def _check_schema(schema: Mapping[str, Any], where: str) -> None:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import validator_for

    try:
        validator_for(schema).check_schema(dict(schema))
    except SchemaError as error:
        raise UsageError(f"{where}: json_schema is no schema: {error.message}") from error


def _missing_keys(name: str, arguments: str, keys: Sequence[str]) -> list[str]:
    try:
        found = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return [f"the arguments of {name} are not JSON"]
    if not isinstance(found, Mapping):
        return [f"the arguments of {name} are not an object"]
    missing = [key for key in keys if key not in found]
    return [f"{name} was called without {', '.join(missing)}"] if missing else []
