"""The options of `bench-serve`, and the settings that they become."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.options import Decorator, FiniteRange, option, stacked

if TYPE_CHECKING:
    from vllm_mlx.bench.settings import BenchSettings

    ParamType = click.ParamType[Any]
else:
    # Older releases of click do not take the argument.
    ParamType = click.ParamType

# Written out because the modules that know them are not imported for a help page.
ENDPOINTS = ("chat", "completions", "messages", "responses")
CACHE_MODES = ("cold", "warm", "prefix-hit", "preserve")
ARRIVALS = ("poisson", "constant")
FORMATS = ("auto", "table", "csv", "json", "jsonl", "sqlite", "markdown")
DEFAULT_URL = "http://127.0.0.1:8000"


class Listed(ParamType):
    """Accept values divided by commas, each of another type; gives a tuple without doubles."""

    def __init__(self, item: ParamType) -> None:
        self.item = item
        self.name = item.name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Convert each part; raise `BadParameter` for one that is wrong, or for none."""
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        if not parts:
            self.fail("give at least one value.", param, ctx)
        return tuple(dict.fromkeys(self.item.convert(part, param, ctx) for part in parts))


class JsonObject(ParamType):
    """Accept the text of a JSON object."""

    name = "json"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> dict[str, Any]:
        """Parse `value`; raise `BadParameter` when it is not an object."""
        try:
            found = json.loads(value) if isinstance(value, str) else value
        except json.JSONDecodeError as error:
            self.fail(f"not JSON: {error}", param, ctx)
        if not isinstance(found, dict):
            self.fail("not a JSON object.", param, ctx)
        return found


POSITIVE = click.IntRange(min=1)
RATE = FiniteRange(min=0, min_open=True)
NEW_FILE = click.Path(dir_okay=False, path_type=Path)
OLD_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


def _plain(*declarations: str, **attributes: Any) -> Decorator[Any]:
    attributes.setdefault("show_default", True)
    return click.option(*declarations, **attributes)


server_options: Decorator[Any] = stacked(
    option("--url", default=DEFAULT_URL, metavar="URL", help="The server, with or without /v1."),
    _plain("--model", metavar="NAME", help="Model to ask for; default: the one that is served."),
    option("--api-key", metavar="KEY", help="The server's key; it is left out of every report."),
    _plain(
        "--wait",
        "wait_s",
        type=FiniteRange(min=0),
        default=0.0,
        metavar="SECONDS",
        help="Wait so long for a server that is still starting or loading.",
    ),
    _plain("--endpoint", type=click.Choice(ENDPOINTS), default="chat", help="API to measure."),
    _plain("--stream/--no-stream", default=True, help="Ask for streamed answers, or for whole."),
    _plain(
        "--request-timeout",
        "request_timeout_s",
        type=FiniteRange(min=0, min_open=True),
        default=300.0,
        metavar="SECONDS",
        help="A request that takes longer has failed.",
    ),
)

load_options: Decorator[Any] = stacked(
    _plain(
        "--concurrency",
        "concurrencies",
        type=Listed(POSITIVE),
        default="1,4",
        metavar="N,...",
        help="Requests kept running at once; a sweep over several (closed loop).",
    ),
    _plain(
        "--request-rate",
        "request_rates",
        type=Listed(RATE),
        default=(),
        show_default=False,
        metavar="R,...",
        help="Requests sent per second, whatever still runs (open loop); replaces the default "
        "of --concurrency, joins one that is given.",
    ),
    _plain(
        "--arrival",
        type=click.Choice(ARRIVALS),
        default="poisson",
        help="How the requests of an open loop come.",
    ),
    _plain(
        "--burstiness",
        type=RATE,
        default=1.0,
        metavar="X",
        help="Shape of the gaps with poisson: 1 is Poisson, less is burstier, more is evener.",
    ),
    _plain(
        "--num-requests",
        type=POSITIVE,
        metavar="N",
        help="Requests of a repetition; default: every prompt once, at least 4 for each that runs "
        "at once, or 20 seconds' worth of a rate.",
    ),
    _plain("--repetitions", type=POSITIVE, default=3, metavar="N", help="Times to measure each."),
    _plain(
        "--warmup",
        type=click.IntRange(min=0),
        default=1,
        metavar="N",
        help="Rounds of throw-away requests before a configuration's first repetition.",
    ),
    _plain("--seed", type=int, default=0, metavar="N", help="Seed of made prompts and arrivals."),
)

prompt_options: Decorator[Any] = stacked(
    _plain(
        "--prompts",
        type=Listed(click.STRING),
        default="short",
        metavar="SET,...",
        help="Built-in sets (short, medium, long, thinking), or .txt, .json and .jsonl files.",
    ),
    _plain(
        "--prompt-tokens",
        type=Listed(POSITIVE),
        default=(),
        show_default=False,
        metavar="N,...",
        help="Make prompts of exactly so many tokens instead.",
    ),
    _plain(
        "--output-tokens",
        type=Listed(POSITIVE),
        default=(),
        show_default=False,
        metavar="N,...",
        help="Ask for exactly so many tokens, held where the server can (ignore_eos).",
    ),
    _plain(
        "--shared-prefix-tokens",
        type=POSITIVE,
        metavar="N",
        help="Begin every prompt with the same system message of so many tokens.",
    ),
    _plain("--turns", type=POSITIVE, default=1, metavar="N", help="Turns of each conversation."),
    _plain(
        "--replay",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        metavar="DIR",
        help="Send the requests that a server recorded there.",
    ),
    _plain(
        "--workload",
        metavar="FILE",
        help="Cases with checks of their answers: a JSON file, or the built-in chat, structured.",
    ),
    _plain("--max-tokens", type=POSITIVE, default=128, metavar="N", help="Longest answer."),
    _plain(
        "--temperature",
        type=FiniteRange(0, 2),
        default=0.0,
        help="Temperature to ask for.",
    ),
    _plain(
        "--server-temperature", is_flag=True, help="Leave the temperature to the server instead."
    ),
    _plain(
        "--thinking/--no-thinking",
        "is_thinking",
        default=None,
        help="Turn the reasoning of the model's template on or off.",
    ),
    _plain(
        "--cache-mode",
        "cache_modes",
        type=Listed(click.Choice(CACHE_MODES)),
        default="preserve",
        metavar="MODE,...",
        help="cold: each prompt is new from its first token. warm: each was sent before. "
        "prefix-hit: each begins with what was sent before. preserve: as they are.",
    ),
    _plain(
        "--extra-body",
        type=JsonObject(),
        default="{}",
        metavar="JSON",
        help="Fields added to every request.",
    ),
)

output_options: Decorator[Any] = stacked(
    _plain(
        "--output",
        "-o",
        type=NEW_FILE,
        metavar="FILE",
        help="Write the rows there; a database gets them appended, other files are replaced.",
    ),
    _plain(
        "--format",
        "file_format",
        type=click.Choice(FORMATS),
        default="auto",
        help="Format of the file, or of stdout without one; auto goes by the file's suffix.",
    ),
    _plain("--raw", is_flag=True, help="Write a row for each request, too."),
    _plain(
        "--plot",
        metavar="FILE",
        help="Draw throughput and latencies into a .png or .svg; - draws in the terminal.",
    ),
    _plain("--tag", metavar="TEXT", help="Kept in every row."),
)

gate_options: Decorator[Any] = stacked(
    _plain(
        "--assert",
        "assertions",
        multiple=True,
        metavar="GATE",
        help="Exit 1 unless it holds, as 'ttft_p95<800ms' or 'failures==0'; may be repeated.",
    ),
    _plain(
        "--baseline",
        type=OLD_FILE,
        metavar="FILE",
        help="Results of an earlier run; exit 1 if this one is worse than --max-regression.",
    ),
    _plain(
        "--max-regression",
        metavar="GATE,...",
        help="How much worse than the baseline is allowed, as ttft_p50=10%,output_tps=5%.",
    ),
    _plain(
        "--force-baseline", is_flag=True, help="Take a baseline of another machine or model, too."
    ),
    _plain(
        "--confidence",
        type=FiniteRange(0, 1, max_open=True),
        default=0.95,
        metavar="X",
        help="How sure a gate must be to fail on noisy repetitions; 0 compares the means alone.",
    ),
    _plain(
        "--slo",
        metavar="LIMITS",
        help="What a good request is, in ms, as ttft=500,itl=60; goodput counts these.",
    ),
    _plain(
        "--min-success",
        type=FiniteRange(0, 1),
        default=0.5,
        metavar="SHARE",
        help="Exit 5 when fewer of the requests are answered.",
    ),
    _plain("--junit", type=NEW_FILE, metavar="FILE", help="Write the gates as JUnit XML."),
    _plain(
        "--summary",
        type=NEW_FILE,
        metavar="FILE",
        help="Append a summary in Markdown, as to $GITHUB_STEP_SUMMARY.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """Hold where a run's results go."""

    output: Path | None
    file_format: str
    raw: bool
    plot: str | None
    junit: Path | None
    summary: Path | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GateOptions:
    """Hold what a run must fulfil, still as it was written."""

    assertions: tuple[str, ...]
    baseline: Path | None
    max_regression: str | None
    force_baseline: bool
    confidence: float


def split_options(
    values: Mapping[str, Any], given: frozenset[str], command: str
) -> tuple[BenchSettings, GateOptions, OutputOptions]:
    """Return the three groups that the parsed options become; raises `UsageError`."""
    from vllm_mlx.bench.settings import BenchSettings

    rest = dict(values)
    outputs = OutputOptions(**_taken(rest, OutputOptions))
    gates = GateOptions(**_taken(rest, GateOptions))
    if (gates.baseline is None) != (gates.max_regression is None):
        raise click.UsageError("--baseline and --max-regression need each other")
    if gates.force_baseline and gates.baseline is None:
        raise click.UsageError("--force-baseline needs --baseline")
    _check_prompt_sources(given)
    if "request_rates" in given and "concurrencies" not in given:
        rest["concurrencies"] = ()
    for name in ("arrival", "burstiness"):
        if name in given and not rest["request_rates"]:
            raise click.UsageError(f"--{name} needs --request-rate")
    if "burstiness" in given and rest["arrival"] != "poisson":
        raise click.UsageError("--burstiness is for --arrival poisson")
    if rest.pop("server_temperature"):
        if "temperature" in given:
            raise click.UsageError("--temperature and --server-temperature exclude each other")
        rest["temperature"] = None
    is_thinking = rest.pop("is_thinking")
    if is_thinking is not None:
        thinking = {"chat_template_kwargs": {"enable_thinking": is_thinking}}
        rest["extra_body"] = {**thinking, **rest["extra_body"]}
    rest.pop("slo")
    # The variable is that of `serve`, too, which takes several.
    rest["api_key"] = next(iter((rest["api_key"] or "").split()), None)
    return BenchSettings(**rest, command=command), gates, outputs


def _taken(values: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    return {field.name: values.pop(field.name) for field in dataclasses.fields(kind)}


def _check_prompt_sources(given: frozenset[str]) -> None:
    sources = {
        "prompts": "--prompts",
        "prompt_tokens": "--prompt-tokens",
        "replay": "--replay",
        "workload": "--workload",
    }
    named = [flag for name, flag in sources.items() if name in given]
    if len(named) > 1:
        raise click.UsageError(f"{' and '.join(named)} exclude each other")
    if {"max_tokens", "output_tokens"} <= given:
        raise click.UsageError("--max-tokens and --output-tokens exclude each other")
