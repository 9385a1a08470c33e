"""Everything that one run is told, checked once and passed down."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_mlx.engine.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Hold the parsed command line of a run; `check` says what does not go together."""

    url: str
    model: str | None = None
    api_key: str | None = None
    wait_s: float = 0.0
    endpoint: str = "chat"
    stream: bool = True
    concurrencies: tuple[int, ...] = (1, 4)
    request_rates: tuple[float, ...] = ()
    arrival: str = "poisson"
    burstiness: float = 1.0
    #: Conversations of a repetition times their turns; None follows prompts and load.
    num_requests: int | None = None
    prompts: tuple[str, ...] = ("short",)
    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    shared_prefix_tokens: int | None = None
    turns: int = 1
    replay: Path | None = None
    workload: str | None = None
    max_tokens: int = 128
    temperature: float | None = 0.0
    repetitions: int = 3
    warmup: int = 1
    seed: int = 0
    cache_modes: tuple[str, ...] = ("preserve",)
    extra_body: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    request_timeout_s: float = 300.0
    #: Share of requests that must be answered for a repetition to count as measured.
    min_success: float = 0.5
    tag: str | None = None
    #: The command line without keys, for the report.
    command: str | None = None

    def check(self) -> None:
        """Raise `UsageError` for options that exclude or need one another."""
        if self.workload is not None:
            self._check_workload()
        if self.replay is not None and self.prompt_tokens:
            raise UsageError("--replay sends what was recorded; leave out --prompt-tokens")
        is_cut = "prefix-hit" in self.cache_modes and bool(self.prompt_tokens)
        if is_cut and self.shared_prefix_tokens is None:
            raise UsageError(
                "--cache-mode prefix-hit with --prompt-tokens needs --shared-prefix-tokens: "
                "how much of the prompt is shared"
            )
        shortest = min(self.prompt_tokens, default=None)
        if shortest is not None and (self.shared_prefix_tokens or 0) >= shortest:
            raise UsageError(
                f"--shared-prefix-tokens {self.shared_prefix_tokens} leaves nothing of a prompt "
                f"of {shortest} tokens"
            )
        if self.turns > 1 and self.endpoint == "completions":
            raise UsageError("a conversation needs an endpoint that takes messages")

    def _check_workload(self) -> None:
        clashes = {
            "--replay": self.replay is not None,
            "--prompt-tokens": bool(self.prompt_tokens),
            "--output-tokens": bool(self.output_tokens),
            "--num-requests": self.num_requests is not None,
            "--shared-prefix-tokens": self.shared_prefix_tokens is not None,
            "--turns": self.turns > 1,
        }
        for flag, is_given in clashes.items():
            if is_given:
                raise UsageError(f"--workload has cases of its own; leave out {flag}")
