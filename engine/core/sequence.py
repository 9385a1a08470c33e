"""One token list being computed: its tokens, how far its KV has come, and how it ends."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from vllm_mlx.engine.core.outputs import ErrorInfo, FinishReason, RowTimings, unpack_tokens
from vllm_mlx.engine.core.request import GenerationRequest, SamplingParams
from vllm_mlx.engine.core.stats import CacheHitType


class SequenceStatus(enum.Enum):
    """Say where a sequence stands; it moves down this list, and from the middle back to the top."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Finish:
    """Say why a sequence ended."""

    reason: FinishReason
    #: The stop string or token id; None for end of sequence and every other reason.
    stop_reason: str | int | None = None
    error: ErrorInfo | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """Hold the state of one request inside the engine; owned and mutated by the engine thread.

    Invariant: `num_computed` tokens have their KV stored (or on its way in the forward in
    flight); a running sequence outside a forward has `num_computed == num_tokens - 1`, because
    its last token is the next forward's input.
    """

    request: GenerationRequest
    #: Order of arrival, unique.
    arrival: int
    #: Resolved seed: the request's own or one drawn by the engine.
    seed: int
    #: Longest prompt plus completion for this row.
    max_tokens_total: int
    added_s: float = 0.0
    prompt: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    status: SequenceStatus = SequenceStatus.WAITING
    finish: Finish | None = None
    #: Its place in the taking of turns between clients; set by the scheduler.
    turn: int = 0
    num_computed: int = 0
    num_cached: int = 0
    #: Prompt tokens beyond those whose KV it was the first to put into the prefix store.
    num_stored: int = 0
    cache_hit_type: CacheHitType | None = None
    #: The prompt's first token that differs from the nearest stored prefix, if it was looked for.
    departs_at: int | None = None
    num_preemptions: int = 0
    #: Positions of the prompt whose logits have been looked at, of a request that asks for them.
    num_prompt_scored: int = 0
    #: When a step first computed for it, and when it got its first and its newest token.
    started_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    #: It may be prefilled, but not join the batch: its grammar is being compiled.
    is_held: bool = False
    #: The only token that may be drawn next; None leaves it to the sampling.
    forced_token: int | None = None

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        *,
        arrival: int,
        seed: int,
        max_model_len: int,
        now_s: float,
    ) -> Sequence:
        """Make the sequence of a new request."""
        return cls(
            request=request,
            arrival=arrival,
            seed=seed,
            max_tokens_total=max_model_len,
            added_s=now_s,
            prompt=unpack_tokens(request.prompt),
        )

    @property
    def id(self) -> str:
        """Return the request's id."""
        return self.request.request_id

    @property
    def sampling(self) -> SamplingParams:
        """Return the request's sampling parameters."""
        return self.request.sampling

    @property
    def tokens(self) -> list[int]:
        """Return prompt and generated tokens; not to be mutated."""
        return self.prompt + self.output if self.output else self.prompt

    @property
    def num_tokens(self) -> int:
        """Count prompt and generated tokens."""
        return len(self.prompt) + len(self.output)

    @property
    def prefill_target(self) -> int:
        """Count the tokens that prefill computes: all but the last, which joins a decode step."""
        return self.num_tokens - 1

    @property
    def last_token(self) -> int:
        """Return the token that the next forward reads."""
        return self.output[-1] if self.output else self.prompt[-1]

    @property
    def max_new_tokens(self) -> int:
        """Return how many tokens may be generated, the context length considered."""
        return min(self.sampling.max_tokens, self.max_tokens_total - len(self.prompt))

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Say whether prefill must still compute logits, and so may not skip a stored prefix."""
        return (
            self.sampling.prompt_logprobs is not None
            and self.num_prompt_scored < len(self.prompt) - 1
        )

    @property
    def is_finished(self) -> bool:
        """Say whether the end is decided."""
        return self.finish is not None

    @property
    def must_go_on(self) -> bool:
        """Say whether `min_tokens` still forbids every kind of stop."""
        return len(self.output) < self.sampling.min_tokens

    def timings(self) -> RowTimings:
        """Return how long its parts took so far."""
        started, first, last = self.started_s, self.first_token_s, self.last_token_s
        return RowTimings(
            queue_s=None if started is None else started - self.added_s,
            prefill_s=None if started is None or first is None else first - started,
            decode_s=None if first is None or last is None else last - first,
        )

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Return tokens `start` to `stop` of prompt and output together."""
        num_prompt = len(self.prompt)
        if stop <= num_prompt:
            return self.prompt[start:stop]
        return self.tokens[start:stop]

    def append(self, token: int, eos_token_ids: frozenset[int]) -> None:
        """Take the token that was drawn, and decide whether it ends the sequence."""
        may_stop = len(self.output) >= self.sampling.min_tokens
        self.output.append(token)
        if may_stop and not self.sampling.ignore_eos and token in eos_token_ids:
            self.finish = Finish("stop")
        elif may_stop and token in self.sampling.stop_token_ids:
            self.finish = Finish("stop", token)
        elif len(self.output) >= self.max_new_tokens:
            self.finish = Finish("length")

    def banned_token_ids(self, eos_token_ids: frozenset[int]) -> tuple[int, ...]:
        """Return the ids that would end the row before `min_tokens` and must not be drawn."""
        if not self.must_go_on:
            return ()
        eos = () if self.sampling.ignore_eos else tuple(sorted(eos_token_ids))
        return (*eos, *self.sampling.stop_token_ids)

    def restart(self) -> None:
        """Go back to waiting with nothing computed; generated tokens are prefilled again."""
        self.status = SequenceStatus.WAITING
        self.num_computed = 0
        if self.wants_prompt_logprobs:
            self.num_prompt_scored = 0
        self.num_preemptions += 1
