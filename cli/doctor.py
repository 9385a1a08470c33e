"""The command `doctor`: describe this machine for a report, and say what is wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.errors import ExitCode
from vllm_mlx.cli.pending import env_name

if TYPE_CHECKING:
    from vllm_mlx.cli.doctor_report import Report

PORT = 8000

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


@click.command()
@click.option("--json", "is_json", is_flag=True, help="Print everything as JSON.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=PORT,
    show_default=True,
    help="Port that is to be free.",
)
@click.option(
    "--ssd-cache-dir",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    envvar=env_name("--ssd-cache-dir"),
    help="Folder of stored prefixes to look at, too.",
)
def doctor(*, is_json: bool, port: int, ssd_cache_dir: Path | None) -> int:
    """Describe this machine for a bug report; exit with 1 if no model could be served here.

    Tells the platform, versions, MLX's backend and BLAS, memory and its limits, what is on disk,
    the models found, and whether the port is free. MLX is tried out in a process of its own:
    missing or broken, it is reported. Nothing is changed, and nothing leaves this machine.

    \b
    Examples:
      vllm-mlx doctor
      vllm-mlx doctor --json > report.json
      vllm-mlx doctor --port 8080 --ssd-cache-dir ~/prefixes
    """
    from vllm_mlx.cli.doctor_report import gather

    folder = ssd_cache_dir.expanduser() if ssd_cache_dir is not None else None
    report = gather(port=port, ssd_cache_dir=folder)
    text = json.dumps(_fields(report), indent=2) if is_json else "\n".join(_lines(report))
    click.echo(_without_home(text))
    return ExitCode.GATE_FAILED if report.has_failed else ExitCode.DONE


def _fields(report: Report) -> Any:
    import msgspec

    verdict = "failed" if report.has_failed else "ok"
    return {"verdict": verdict, **msgspec.to_builtins(report)}


def _lines(report: Report) -> Iterator[str]:
    from vllm_mlx.engine.memory import format_bytes

    yield from _section("machine", report.machine)
    yield from _section("versions", {k: v or "missing" for k, v in report.versions.items()})
    yield from _section("backend", dict(_backend(report)))
    yield "on disk"
    for folder in report.folders:
        size = f"{format_bytes(folder.num_bytes)} in {folder.num_files} files"
        yield f"  {folder.path}: {folder.name}, {size if folder.exists else 'not there'}"
    yield ""
    yield f"models found: {len(report.models)}"
    for model in report.models:
        bits = f", {model.bits} bits" if model.bits is not None else ""
        kind = f"{model.model_type or 'unknown'}{bits}"
        yield f"  {model.name} ({model.source}): {kind}, {format_bytes(model.num_bytes)}"
    yield ""
    for finding in report.findings:
        yield f"{_MARKS[finding.verdict]} {finding.name}: {finding.message}"


def _backend(report: Report) -> Iterator[tuple[str, str]]:
    from vllm_mlx.engine.memory import format_bytes

    yield "installed", report.installed_backend or "none"
    found = report.backend.found
    yield "memory", f"{format_bytes(report.memory.available_bytes)} available"
    if found is None:
        return
    yield "device", found.device
    for name, value in found.device_info.items():
        yield name, str(value)
    blas = found.blas
    yield "BLAS", f"{blas.library or 'of MLX itself'}{f' ({blas.path})' if blas.path else ''}"
    yield "device memory", f"{format_bytes(found.limits.total_bytes)} in all"
    yield "device memory available", format_bytes(found.limits.available_bytes)
    yield "buffers kept at most", format_bytes(found.cache_limit_bytes)
    if found.wired_limit_bytes is not None:
        yield "wired at most", format_bytes(found.wired_limit_bytes)


def _section(title: str, fields: dict[str, Any]) -> Iterator[str]:
    yield title
    width = max(map(len, fields))
    for name, value in fields.items():
        yield f"  {name:{width}}  {'-' if value is None else value}"
    yield ""


def _without_home(text: str) -> str:
    """Return a report to be pasted without the user's name in its paths."""
    home = str(Path.home())
    return text.replace(home, "~") if len(home) > 1 else text
