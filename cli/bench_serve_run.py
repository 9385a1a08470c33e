"""Run a measurement from the command line: signals, outputs, gates and the exit code."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from vllm_mlx.bench.configuration import key_of
from vllm_mlx.bench.environment import differences, environment_columns
from vllm_mlx.bench.gates import (
    Assertion,
    GateResult,
    Regression,
    judge_assertions,
    judge_regressions,
    parse_regressions,
)
from vllm_mlx.bench.measuring_loop import MeasuringLoop
from vllm_mlx.bench.metrics import Slo
from vllm_mlx.bench.output.files import read_rows
from vllm_mlx.bench.plan import Plan, make_plan
from vllm_mlx.bench.results import Results
from vllm_mlx.bench.session import Session
from vllm_mlx.bench.settings import BenchSettings
from vllm_mlx.cli.bench_serve_options import GateOptions, OutputOptions
from vllm_mlx.cli.bench_serve_output import ResultWriter
from vllm_mlx.cli.bench_serve_progress import MeasuringProgress
from vllm_mlx.cli.errors import ExitCode, error_line
from vllm_mlx.engine.errors import UsageError


class Gates:
    """Hold the gates of a run: parsed before it, judged after it."""

    def __init__(
        self,
        assertions: Sequence[Assertion],
        regressions: Sequence[Regression],
        baseline: Sequence[Mapping[str, Any]],
        options: GateOptions,
    ) -> None:
        self._assertions = assertions
        self._regressions = regressions
        self._baseline = baseline
        self._options = options

    @classmethod
    def parse(cls, options: GateOptions) -> Gates:
        """Read the gates and the baseline; raises `UsageError`."""
        regressions: Sequence[Regression] = ()
        baseline: Sequence[Mapping[str, Any]] = ()
        if options.baseline is not None and options.max_regression is not None:
            regressions = parse_regressions(options.max_regression)
            baseline = read_rows(options.baseline)
        assertions = [Assertion.parse(text) for text in options.assertions]
        return cls(assertions, regressions, baseline, options)

    def check_plan(self, plan: Plan) -> None:
        """Raise `UsageError` for a gate that nothing of the plan would be held to."""
        columns = [planned.configuration.columns() for planned in plan.planned]
        for assertion in self._assertions:
            if not any(assertion.applies_to(row) for row in columns):
                raise UsageError(f"'{assertion.text}' applies to no configuration of this run")
        if not self._regressions:
            return
        known = {key_of(row) for row in self._baseline}
        unknown = [p.configuration.label for p in plan.planned if p.configuration.key not in known]
        if unknown:
            raise UsageError(
                f"{self._options.baseline} has no row of the configuration '{unknown[0]}' "
                "(same prompts, lengths, cache mode, load, endpoint, temperature and extra body)"
            )

    def check_baseline(self, current: Mapping[str, Any]) -> None:
        """Raise `UsageError` for a baseline of unlike hardware or another model."""
        if not self._baseline or self._options.force_baseline:
            return
        unlike = differences(self._baseline[0], current)
        if unlike:
            raise UsageError(
                f"{self._options.baseline} is not like this run: {'; '.join(unlike)}. "
                "--force-baseline compares all the same"
            )

    def judge(self, rows: Sequence[Mapping[str, Any]]) -> list[GateResult]:
        """Judge what was measured."""
        confidence = self._options.confidence
        return [
            *judge_assertions(self._assertions, rows, confidence),
            *judge_regressions(self._regressions, self._baseline, rows, confidence),
        ]


def measure(
    settings: BenchSettings, slo: Slo | None, gate_options: GateOptions, outputs: OutputOptions
) -> int:
    """Measure, write the results, judge the gates, and return the exit code.

    Everything that can be wrong with the command line is found before the first request.
    """
    plan = make_plan(settings)
    gates = Gates.parse(gate_options)
    gates.check_plan(plan)
    writer = ResultWriter(outputs, gate_options.confidence)
    writer.check()
    progress = MeasuringProgress()
    session = Session(
        settings,
        plan,
        slo=slo,
        environment=environment_columns(Path()),
        progress=progress,
        accept=gates.check_baseline,
    )
    with asyncio.Runner(loop_factory=MeasuringLoop) as runner:
        results, is_terminated = runner.run(_run(session))
    progress.clear()
    return _conclude(results, gates, writer, is_terminated=is_terminated)


async def _run(session: Session) -> tuple[Results, bool]:
    """Run a session; SIGTERM stops it as Ctrl-C does, and is told apart."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    received: list[int] = []

    def terminate() -> None:
        received.append(signal.SIGTERM)
        task.cancel()

    previous = signal.getsignal(signal.SIGTERM)
    loop.add_signal_handler(signal.SIGTERM, terminate)
    try:
        return await session.run(), bool(received)
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, previous)


def _conclude(results: Results, gates: Gates, writer: ResultWriter, *, is_terminated: bool) -> int:
    """Write what there is and return the exit code that says how the run went."""
    is_whole = not results.is_interrupted and results.failure is None
    judged = gates.judge(results.rows) if is_whole else []
    if results.rows:
        writer.write(results, judged)
    if results.is_interrupted:
        kept = f"{len(results.rows)} rows were kept" if results.rows else "nothing was measured yet"
        click.echo(f"Interrupted: {kept}, no gate was judged.", err=True)
        return ExitCode.TERMINATED if is_terminated else ExitCode.INTERRUPTED
    if results.failure is not None:
        click.echo(error_line(results.failure), err=True)
        click.echo(f"{len(results.rows)} rows were kept, no gate was judged.", err=True)
        return ExitCode.UNREACHABLE
    failed = [result for result in judged if result.verdict == "fail"]
    if failed:
        click.echo(f"{len(failed)} of {len(judged)} gates failed.", err=True)
        return ExitCode.GATE_FAILED
    return ExitCode.DONE
