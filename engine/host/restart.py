"""When an engine process that died is started again, and when that is given up."""

from __future__ import annotations

import msgspec

from vllm_mlx.engine.errors import UsageError


class RestartPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """Say how long to wait before each restart and how many useless lives end the trying."""

    #: Wait before the first restart, in seconds; doubled for each further useless life.
    initial_s: float = 0.5
    max_s: float = 30.0
    #: Deaths in a row, each after a useless life, that make the supervisor give up.
    max_deaths: int = 5
    #: A life that was ready this long is useful even if nobody asked it for anything.
    healthy_s: float = 60.0

    def __post_init__(self) -> None:
        if self.initial_s < 0 or self.max_s < self.initial_s:
            raise UsageError(
                f"restart waits must satisfy 0 <= initial_s <= max_s, "
                f"not {self.initial_s:g} and {self.max_s:g}"
            )
        if self.max_deaths < 1:
            raise UsageError(f"max_deaths must be at least 1, not {self.max_deaths}")


class RestartBackoff:
    """Count useless lives in a row and turn them into waits.

    A life is useful when it generated anything or was ready for `healthy_s`: one request that
    kills the engine again and again must not take it from everybody else.
    """

    def __init__(self, policy: RestartPolicy) -> None:
        self._policy = policy
        self._num_useless = 0

    @property
    def num_useless(self) -> int:
        """Count the useless lives since the last useful one."""
        return self._num_useless

    def record_death(self, *, has_produced: bool, ready_s: float) -> float | None:
        """Record the end of one life; return the wait before the next, None to give up."""
        if has_produced or ready_s >= self._policy.healthy_s:
            self._num_useless = 0
            return self._policy.initial_s
        self._num_useless += 1
        if self._num_useless >= self._policy.max_deaths:
            return None
        return min(self._policy.initial_s * 2.0 ** (self._num_useless - 1), self._policy.max_s)
