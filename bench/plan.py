"""Expand a run's settings into configurations with their prompts, before any server is asked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from vllm_mlx.bench.configuration import Configuration, loads
from vllm_mlx.bench.prompt import Prompt, first_turn
from vllm_mlx.bench.prompt_files import load_prompts, load_recording
from vllm_mlx.bench.prompt_sets import BUILTIN_SETS, builtin_set
from vllm_mlx.bench.settings import BenchSettings
from vllm_mlx.bench.workload import Case, Workload, load_workload
from vllm_mlx.engine.errors import UsageError

#: Name of the prompt set whose prompts are made to a length.
TOKENS_SET = "tokens"

_REQUESTS_PER_STREAM = 4
_OPEN_LOOP_S = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """Hold one configuration, the prompts it cycles through, and how many it sends."""

    configuration: Configuration
    #: Empty when prompts are made to a length.
    prompts: Sequence[Prompt]
    #: The workload's cases, by the prompt's id.
    cases: dict[str, Case] = dataclasses.field(default_factory=dict)
    num_conversations: int

    @property
    def num_at_once(self) -> int:
        """Return how many requests warm-up sends at once."""
        return self.configuration.concurrency or 1


@dataclasses.dataclass(frozen=True)
class Plan:
    """Hold the whole sweep."""

    planned: tuple[Planned, ...]
    workload: Workload | None


def make_plan(settings: BenchSettings) -> Plan:
    """Return the configurations of a run; raises `UsageError` for prompts that cannot be used."""
    settings.check()
    workload = load_workload(settings.workload) if settings.workload is not None else None
    if workload is not None and workload.cache_policy == "before-case":
        _check_one_at_a_time(settings)
    planned = tuple(_expanded(settings, workload))
    if settings.endpoint == "completions":
        for one in planned:
            _check_plain(one)
    return Plan(planned, workload)


def _expanded(settings: BenchSettings, workload: Workload | None) -> Iterator[Planned]:
    for name, prompt_tokens, prompts in _sets(settings, workload):
        for output_tokens in settings.output_tokens or (None,):
            for cache_mode in settings.cache_modes:
                for load in loads(
                    settings.concurrencies,
                    settings.request_rates,
                    settings.arrival,
                    settings.burstiness,
                ):
                    configuration = Configuration(
                        endpoint=settings.endpoint,
                        stream=settings.stream,
                        prompt_set=name,
                        prompt_tokens_target=prompt_tokens,
                        output_tokens_target=output_tokens,
                        shared_prefix_tokens=settings.shared_prefix_tokens,
                        turns=settings.turns,
                        cache_mode=cache_mode,
                        max_tokens=output_tokens or settings.max_tokens,
                        temperature=settings.temperature,
                        extra_body=settings.extra_body,
                        **load,
                    )
                    yield _planned(configuration, prompts, settings, workload)


def _planned(
    configuration: Configuration,
    prompts: Sequence[Prompt],
    settings: BenchSettings,
    workload: Workload | None,
) -> Planned:
    if workload is not None:
        num_conversations = len(prompts)
    elif settings.num_requests is not None:
        num_conversations = math.ceil(settings.num_requests / settings.turns)
    elif settings.replay is not None:
        num_conversations = len(prompts)
    elif configuration.concurrency is not None:
        num_conversations = max(len(prompts), _REQUESTS_PER_STREAM * configuration.concurrency)
    else:
        rate = configuration.request_rate_target or 0.0
        num_conversations = max(len(prompts), math.ceil(rate * _OPEN_LOOP_S))
    cases = {case.prompt.id: case for case in workload.cases} if workload is not None else {}
    return Planned(
        configuration=configuration,
        prompts=prompts,
        cases=cases,
        num_conversations=num_conversations,
    )


def _sets(
    settings: BenchSettings, workload: Workload | None
) -> Iterator[tuple[str, int | None, Sequence[Prompt]]]:
    """Yield each prompt set: its name, its length in tokens if it is made to one, its prompts."""
    if workload is not None:
        yield workload.name, None, [case.prompt for case in workload.cases]
    elif settings.replay is not None:
        yield settings.replay.name, None, _turned(load_recording(settings.replay), settings)
    elif settings.prompt_tokens:
        for num_tokens in settings.prompt_tokens:
            yield TOKENS_SET, num_tokens, ()
    else:
        for name in settings.prompts:
            yield _set_name(name), None, _turned(_prompts(name), settings)


def _prompts(name: str) -> Sequence[Prompt]:
    if name in BUILTIN_SETS and not Path(name).is_file():
        return builtin_set(name)
    if not Path(name).is_file():
        known = ", ".join(BUILTIN_SETS)
        raise UsageError(f"there are no prompts '{name}': give a file, or some of {known}")
    return load_prompts(Path(name))


def _turned(prompts: Sequence[Prompt], settings: BenchSettings) -> Sequence[Prompt]:
    return [first_turn(prompt) for prompt in prompts] if settings.turns > 1 else prompts


def _set_name(name: str) -> str:
    return name if name in BUILTIN_SETS else Path(name).name


def _check_one_at_a_time(settings: BenchSettings) -> None:
    if settings.request_rates or settings.concurrencies != (1,):
        raise UsageError(
            "the workload wants the cache emptied before each case: give --concurrency 1"
        )


def _check_plain(planned: Planned) -> None:
    """Refuse what plain completions cannot carry."""
    for prompt in planned.prompts:
        if prompt.tools:
            raise UsageError(f"prompt {prompt.id} has tools: --endpoint completions takes none")


def body_fields(prompt: Prompt, configuration: Configuration) -> dict[str, Any]:
    """Return the fields added to a prompt's request; those of the command line win."""
    return {**prompt.extra, **configuration.extra_body}
