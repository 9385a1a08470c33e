"""Workloads: named cases with checks and a policy on time, from a file or built in."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_mlx.bench.checks import Checks, parse_checks
from vllm_mlx.bench.prompt import Prompt
from vllm_mlx.bench.prompt_files import checked_messages, prompt_of_body, read_json
from vllm_mlx.engine.errors import UsageError

CACHE_POLICIES = ("preserve", "before-run", "before-case")

_DEFAULT_FIELDS = frozenset(
    {
        "max_tokens", "enable_thinking", "policy_timeout_ms", "extra_body", "cache_policy",
        "checks", "tools",
    }
)  # fmt: skip
_CASE_FIELDS = (_DEFAULT_FIELDS - {"cache_policy"}) | {"id", "messages", "tags", "request_path"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Hold one case: what is asked, what the answer must be, and by when."""

    prompt: Prompt
    checks: Checks
    tags: tuple[str, ...] = ()
    policy_timeout_ms: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Hold a workload's cases, in the order of its file."""

    name: str
    cases: tuple[Case, ...]
    #: When the server's prefix cache is emptied.
    cache_policy: str = "preserve"


def load_workload(name_or_path: str) -> Workload:
    """Read a workload's file, or return a built-in one; raises `UsageError`."""
    from vllm_mlx.bench.builtin_workloads import BUILTIN_WORKLOADS

    if name_or_path in BUILTIN_WORKLOADS and not Path(name_or_path).is_file():
        return parse_workload(BUILTIN_WORKLOADS[name_or_path], name_or_path, Path())
    path = Path(name_or_path)
    if not path.is_file():
        known = ", ".join(BUILTIN_WORKLOADS)
        raise UsageError(f"there is no workload '{name_or_path}': give a file, or one of {known}")
    return parse_workload(read_json(path), str(path), path.parent)


def parse_workload(found: Any, where: str, folder: Path) -> Workload:
    """Return the workload that JSON describes; paths in it start from `folder`."""
    if not isinstance(found, Mapping) or not isinstance(found.get("cases"), list):
        raise UsageError(f"{where}: a workload is an object with a list of cases")
    defaults = found.get("defaults", {})
    _check_fields(defaults, _DEFAULT_FIELDS, f"{where}, defaults")
    cases = tuple(
        _case(entry, defaults, f"{where}, case {number}", folder, number)
        for number, entry in enumerate(found["cases"], start=1)
    )
    ids = [case.prompt.id for case in cases]
    repeated = sorted({case_id for case_id in ids if ids.count(case_id) > 1})
    if not cases or repeated:
        problem = f"the id {repeated[0]} is used twice" if repeated else "there is no case"
        raise UsageError(f"{where}: {problem}")
    policy = str(defaults.get("cache_policy", "preserve")).replace("_", "-")
    if policy not in CACHE_POLICIES:
        raise UsageError(f"{where}: cache_policy is one of {', '.join(CACHE_POLICIES)}")
    return Workload(
        name=str(found.get("name") or Path(where).stem), cases=cases, cache_policy=policy
    )


def _case(entry: Any, defaults: Mapping[str, Any], where: str, folder: Path, number: int) -> Case:
    _check_fields(entry, _CASE_FIELDS, where)
    if ("messages" in entry) == ("request_path" in entry):
        raise UsageError(f"{where}: give either messages or request_path")
    case_id = str(entry.get("id", f"case-{number}"))
    if "request_path" in entry:
        file = folder / str(entry["request_path"])
        base = prompt_of_body(case_id, _object(read_json(file), str(file)), str(file))
    else:
        base = Prompt(id=case_id, messages=checked_messages(entry["messages"], where))
    policy = _first("policy_timeout_ms", entry, defaults)
    if policy is not None and not (isinstance(policy, (int, float)) and policy > 0):
        raise UsageError(f"{where}: policy_timeout_ms must be positive")
    tags = entry.get("tags", [])
    if not isinstance(tags, list):
        raise UsageError(f"{where}: tags must be a list")
    return Case(
        prompt=_with_fields(base, entry, defaults, where),
        checks=parse_checks(defaults.get("checks", {}), entry.get("checks", {}), where),
        tags=tuple(str(tag) for tag in tags),
        policy_timeout_ms=policy,
    )


def _with_fields(
    base: Prompt, entry: Mapping[str, Any], defaults: Mapping[str, Any], where: str
) -> Prompt:
    """Return the prompt with the case's fields.

    They win over those of the request's file, and these over the defaults.
    """
    max_tokens = entry.get("max_tokens", base.max_tokens or defaults.get("max_tokens"))
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise UsageError(f"{where}: max_tokens must be a positive number")
    extra: dict[str, Any] = {}
    for source, fields in ((defaults, base.extra), (entry, {})):
        if "enable_thinking" in source:
            extra |= thinking_fields(bool(source["enable_thinking"]))
        extra |= _object(source.get("extra_body", {}), f"{where}: extra_body")
        extra |= fields
    tools = _first("tools", entry, {}) or base.tools or defaults.get("tools") or ()
    return dataclasses.replace(base, max_tokens=max_tokens, extra=extra, tools=tuple(tools))


def thinking_fields(is_enabled: bool) -> dict[str, Any]:
    """Return the request fields that turn reasoning on or off, as most servers spell them."""
    return {"chat_template_kwargs": {"enable_thinking": is_enabled}}


def _check_fields(found: Any, known: frozenset[str], where: str) -> None:
    unknown = sorted(set(_object(found, where)) - known)
    if unknown:
        raise UsageError(f"{where}: unknown {unknown[0]}; known are {', '.join(sorted(known))}")


def _first(name: str, *sources: Mapping[str, Any]) -> Any:
    return next((source[name] for source in sources if source.get(name) is not None), None)


def _object(found: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise UsageError(f"{where} must be an object")
    return found
