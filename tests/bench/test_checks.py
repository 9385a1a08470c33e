"""Hold a workload's checks, its file, and the report of quality beside latency."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.scripted_server import Script, ServerScript

from vllm_mlx.bench.answer import Answer, ToolCallText
from vllm_mlx.bench.builtin_workloads import BUILTIN_WORKLOADS
from vllm_mlx.bench.checks import CHECK_TYPES, parse_checks
from vllm_mlx.bench.workload import load_workload, parse_workload
from vllm_mlx.engine.errors import UnreachableError, UsageError

if TYPE_CHECKING:
    from tests.bench.conftest import RunBench

USER = [{"role": "user", "content": "which colour has the sky"}]


def answer(text: str = "", finish: str = "stop", calls: tuple[tuple[str, str], ...] = ()) -> Answer:
    """Return an answer."""
    found = Answer(finish_reason=finish)
    found.add_content(text)
    for index, (name, arguments) in enumerate(calls):
        found.tool_calls[index] = ToolCallText(name, [arguments])
    return found


def issues(checks: dict[str, Any], found: Answer) -> list[str]:
    """Return what checks say of an answer."""
    return parse_checks({}, checks, "test").issues(found)


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

#: Each check with an answer that passes and one that does not.
EXAMPLES: dict[str, tuple[Any, Answer, Answer]] = {
    "finish_reason": (["stop"], answer("a"), answer("a", "tool_calls")),
    "required_regex": ([r"^a+$", "aa"], answer("aaa"), answer("aab")),
    "forbidden_regex": ("b", answer("aaa"), answer("aab")),
    "min_chars": (3, answer("abc"), answer("ab")),
    "max_chars": (3, answer("abc"), answer("abcd")),
    "json": (True, answer("[1]"), answer("[1")),
    "json_schema": (SCHEMA, answer('{"n": 1}'), answer('{"n": "1"}')),
    "tool_call_count": (1, answer(calls=(("f", "{}"),)), answer("text")),
    "tool_call_names": (["f"], answer(calls=(("f", "{}"),)), answer(calls=(("g", "{}"),))),
    "tool_call_args_required_keys": (
        {"f": ["a"]},
        answer(calls=(("f", '{"a": 1}'),)),
        answer(calls=(("f", '{"b": 1}'),)),
    ),
    "no_tool_calls": (True, answer("text"), answer("text", calls=(("f", "{}"),))),
}


@pytest.mark.parametrize("name", CHECK_TYPES)
def test_each_check(name: str) -> None:
    """Each check passes what is right, and names what is wrong."""
    value, good, bad = EXAMPLES[name]
    assert issues({name: value}, good) == []
    assert len(issues({name: value}, bad)) == 1


def test_cut_off_and_empty_answers_fail() -> None:
    """Without any check an answer must be whole and not empty."""
    assert issues({}, answer("text")) == []
    assert issues({}, answer("text", "length")) == ["the answer was cut off by its length"]
    assert issues({"finish_reason": ["length"]}, answer("text", "length")) == []
    assert issues({}, answer(" \n")) == ["the answer is empty"]
    assert issues({}, answer(calls=(("f", ""),), finish="tool_calls")) == []


def test_arguments_that_are_not_json() -> None:
    """Required keys of arguments that cannot be read are missing."""
    checks = {"tool_call_args_required_keys": {"f": ["a"]}}
    assert issues(checks, answer(calls=(("f", "{"),))) == ["the arguments of f are not JSON"]
    assert issues(checks, answer(calls=(("f", "[]"),))) == ["the arguments of f are not an object"]


def test_expressions_add_up_and_other_checks_do_not() -> None:
    """A case's expressions join those of the defaults; any other check replaces the default's."""
    defaults = {"required_regex": ["a"], "min_chars": 9, "max_chars": 20}
    checks = parse_checks(defaults, {"required_regex": ["b"], "min_chars": 1}, "test")
    assert checks.values == {"required_regex": ["a", "b"], "min_chars": 1, "max_chars": 20}


@pytest.mark.parametrize(
    ("checks", "complaint"),
    [
        ({"finish": ["stop"]}, "there is no check 'finish'"),
        ({"min_chars": "3"}, "takes a whole number"),
        ({"min_chars": True}, "takes a whole number"),
        ({"json": 1}, "takes true or false"),
        ({"required_regex": ["("]}, "is no expression"),
        ({"required_regex": 7}, "takes a text or a list"),
        ({"json_schema": {"type": "no such"}}, "is no schema"),
        ({"tool_call_args_required_keys": {"f": "a"}}, "takes a list of keys"),
        ({"no_tool_calls": True, "tool_call_names": ["f"]}, "exclude each other"),
        ([], "checks must be an object"),
    ],
)
def test_wrong_checks_are_refused(checks: Any, complaint: str) -> None:
    """A check that cannot be made is refused before anything is sent."""
    with pytest.raises(UsageError, match=complaint):
        parse_checks({}, checks, "test")


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ([], "is an object with a list of cases"),
        ({"cases": []}, "there is no case"),
        ({"cases": [{"id": "a"}]}, "give either messages or request_path"),
        ({"cases": [{"messages": USER, "request_path": "r.json"}]}, "give either"),
        ({"cases": [{"messages": USER, "check": {}}]}, "unknown check; known are"),
        ({"defaults": {"max_token": 1}, "cases": [{"messages": USER}]}, "unknown max_token"),
        ({"cases": [{"id": "a", "messages": USER}] * 2}, "the id a is used twice"),
        ({"defaults": {"cache_policy": "never"}, "cases": [{"messages": USER}]}, "cache_policy is"),
        ({"cases": [{"messages": USER, "max_tokens": 0}]}, "max_tokens must be"),
        ({"cases": [{"messages": USER, "policy_timeout_ms": 0}]}, "policy_timeout_ms must"),
    ],
)
def test_wrong_workloads_are_refused(found: Any, complaint: str) -> None:
    """A workload that cannot be run is refused with the place that is wrong."""
    with pytest.raises(UsageError, match=complaint):
        parse_workload(found, "w.json", Path())


def test_a_case_from_a_request_file(tmp_path: Path) -> None:
    """A request file gives messages, length and fields; the case's own win over these."""
    request = {
        "model": "other",
        "messages": USER,
        "max_tokens": 5,
        "top_p": 0.5,
        "top_k": 1,
    }
    (tmp_path / "r.json").write_text(json.dumps(request))
    case = {"id": "a", "request_path": "./r.json", "extra_body": {"top_k": 2}}
    defaults = {"max_tokens": 99, "extra_body": {"top_p": 0.1, "min_p": 0.2}}
    (tmp_path / "w.json").write_text(json.dumps({"defaults": defaults, "cases": [case]}))
    (found,) = load_workload(str(tmp_path / "w.json")).cases
    assert (found.prompt.messages, found.prompt.max_tokens) == (tuple(USER), 5)
    assert found.prompt.extra == {"min_p": 0.2, "top_p": 0.5, "top_k": 2}


def test_thinking_is_asked_for_as_servers_spell_it() -> None:
    """enable_thinking becomes the template's option; a case's own wins."""
    workload = parse_workload(
        {
            "defaults": {"enable_thinking": False},
            "cases": [{"messages": USER}, {"messages": USER, "enable_thinking": True}],
        },
        "w",
        Path(),
    )
    asked = [case.prompt.extra["chat_template_kwargs"] for case in workload.cases]
    assert asked == [{"enable_thinking": False}, {"enable_thinking": True}]


@pytest.mark.parametrize("name", BUILTIN_WORKLOADS)
def test_builtin_workloads_are_sound(name: str) -> None:
    """Each built-in workload has cases of its own."""
    assert len(load_workload(name).cases) >= 3


def workload_file(tmp_path: Path, **defaults: Any) -> str:
    """Write a workload of two cases, of which one wants what the script never says."""
    cases = [
        {"id": "good", "messages": USER, "tags": ["x"], "checks": {"required_regex": ["blue"]}},
        {"id": "bad", "messages": USER, "checks": {"required_regex": ["red"], "max_chars": 4}},
    ]
    path = tmp_path / "colours.json"
    path.write_text(json.dumps({"name": "colours", "defaults": defaults, "cases": cases}))
    return str(path)


def test_quality_and_latency_stand_together(run_bench: RunBench, tmp_path: Path) -> None:
    """A workload's run has a row for each case, and its failures in the row of the measures."""
    script = Script(answer="the sky is blue", ttft_s=0.25, gap_s=0.125)
    results = run_bench(
        script,
        workload=workload_file(tmp_path, policy_timeout_ms=600, max_tokens=7),
        concurrencies=(1,),
        repetitions=2,
    )
    assert [(c["case_id"], c["repetition"], c["quality_ok"]) for c in results.cases] == [
        ("good", 1, True), ("bad", 1, False), ("good", 2, True), ("bad", 2, False)
    ]  # fmt: skip
    bad = results.cases[1]
    assert bad["quality_issues"] == ["nothing matches /red/", "16 characters, at most 4 wanted"]
    # 0.25 + 3 x 0.125 s is later than the policy allows.
    assert {case["within_policy_timeout"] for case in results.cases} == {False}
    assert (bad["ttft"], bad["e2el"], bad["max_tokens"]) == (250, 625, 7)
    row = results.rows[0]
    assert (row["quality_failures"], row["policy_timeouts"]) == (1, 2)
    assert (row["prompt_set"], row["ttft_p50"]) == ("colours", 250)


def test_the_cache_is_emptied_before_each_case(run_bench: RunBench, tmp_path: Path) -> None:
    """The policy `before-case` empties the server's cache before every case, outside its time."""
    script = Script(answer="the sky is blue")
    fields: dict[str, Any] = {"concurrencies": (1,), "repetitions": 2}
    kept = run_bench(script, workload=workload_file(tmp_path), **fields)
    assert kept.rows[0]["cached_tokens"] > 0
    emptied = run_bench(
        script, workload=workload_file(tmp_path, cache_policy="before_case"), **fields
    )
    assert {row["cached_tokens"] for row in emptied.rows} == {0}
    with pytest.raises(UsageError, match="--concurrency 1"):
        run_bench(
            script,
            workload=workload_file(tmp_path, cache_policy="before-case"),
            concurrencies=(2,),
        )


def test_a_cache_that_cannot_be_emptied_is_told(run_bench: RunBench, tmp_path: Path) -> None:
    """A server without that route cannot be measured as the workload wants."""

    class NoDelete(ServerScript):
        def respond(self, method: str, *rest: Any) -> Any:
            found = super().respond(method, *rest)
            if method == "DELETE":
                found.status = 404
            return found

    with pytest.raises(UnreachableError, match="DELETE /v1/cache answers 404"):
        run_bench(
            NoDelete(Script()),
            workload=workload_file(tmp_path, cache_policy="before-run"),
            concurrencies=(1,),
        )
