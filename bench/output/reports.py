"""What CI shows of a run: a JUnit file of its gates, and a summary in Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from vllm_mlx.bench.gates import GateResult
from vllm_mlx.bench.output.shown import (
    cases_overview,
    gates_overview,
    markdown,
    number,
    overview,
    with_margin,
)

SUITE = "vllm-mlx bench-serve"


def junit_text(gates: Sequence[GateResult], cases: Sequence[Mapping[str, Any]]) -> str:
    """Return a JUnit file: a test case for each gate, and for each case of a workload."""
    suite = ElementTree.Element("testsuite", name=SUITE)
    num_failures = 0
    for gate in gates:
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"{SUITE}.{gate.configuration}", name=gate.gate, time="0"
        )
        message = f"measured {with_margin(gate.value, gate.margin)}, limit {number(gate.limit)}"
        if gate.detail:
            message += f": {gate.detail}"
        if gate.verdict == "fail":
            num_failures += 1
            ElementTree.SubElement(case, "failure", message=message)
        else:
            ElementTree.SubElement(case, "system-out").text = message
    for row in cases:
        num_failures += _add_case(suite, row)
    suite.set("tests", str(len(gates) + len(cases)))
    suite.set("failures", str(num_failures))
    ElementTree.indent(suite)
    text = ElementTree.tostring(suite, encoding="unicode")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'


def summary_text(
    rows: Sequence[Mapping[str, Any]],
    cases: Sequence[Mapping[str, Any]],
    gates: Sequence[GateResult],
    notes: Sequence[str],
    confidence: float,
) -> str:
    """Return the Markdown summary of a run."""
    parts = []
    if rows:
        row = rows[0]
        server = " ".join(filter(None, (row.get("server"), row.get("server_version"))))
        parts.append(f"## bench-serve: {row['model']}")
        parts.append(
            f"{server or 'server'} at {row['url']}; measured on {row['chip']}, {row['cpu_cores']} "
            f"cores, {row['memory_gb']} GB, {row['os']}; revision {row['git_revision']}; run "
            f"{row['run_id']}, schema version {row['schema_version']}."
        )
        parts.append(markdown(overview(rows, confidence)))
        parts.append(f"Latencies in ms; ± is half the {confidence:.0%} interval of repetitions.")
    if cases:
        parts += ["### Workload", markdown(cases_overview(cases))]
    if gates:
        failed = sum(gate.verdict == "fail" for gate in gates)
        parts += [f"### Gates: {failed} of {len(gates)} failed", markdown(gates_overview(gates))]
    if notes:
        parts += ["### Notes", "\n".join(f"- {note}" for note in notes)]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def append_text(path: Path, text: str) -> None:
    """Append to a file, which CI may have begun."""
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def _add_case(suite: ElementTree.Element, row: Mapping[str, Any]) -> int:
    e2el = row["e2el"] or 0.0
    case = ElementTree.SubElement(
        suite,
        "testcase",
        classname=f"{SUITE}.{row['prompt_set']}",
        name=f"{row['case_id']} (repetition {row['repetition']})",
        time=f"{e2el / 1e3:.3f}",
    )
    if row["quality_ok"] and row["within_policy_timeout"]:
        return 0
    issues = [*(row["quality_issues"] or ())]
    if not row["within_policy_timeout"]:
        issues.append(f"later than {row['policy_timeout_ms']} ms")
    ElementTree.SubElement(case, "failure", message="; ".join(issues))
    return 1
