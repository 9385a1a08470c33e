"""What a client asked for, as frozen messages that cross the process boundary unchanged."""

from __future__ import annotations

import msgspec


class Thinking(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Say how a row's reasoning is told from its answer, and how long it may be."""

    #: The format of the reasoning, by its name in `engine.parsing`, and its own two markers if it
    #: is the one that takes them.
    reasoning: str
    delimiters: tuple[str, str] | None = None
    #: The format of the calls, which may end reasoning; None where none are read.
    tools: str | None = None
    #: The prompt ends within reasoning.
    starts_inside: bool = False
    #: Most tokens of reasoning, after which it is closed; None does not limit.
    max_tokens: int | None = None
    #: The tokens that close it.
    closing: tuple[int, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Say how one request's tokens are drawn and when they end.

    All values are resolved: defaults of the request, the flags and the model have been applied.
    """

    #: 0 is greedy (argmax).
    temperature: float = 1.0
    top_p: float = 1.0
    #: 0 keeps every token.
    top_k: int = 0
    min_p: float = 0.0
    #: None lets the engine draw one; the noise of a row depends on seed and position only.
    seed: int | None = None
    #: Most tokens to generate.
    max_tokens: int = 16
    #: No end-of-sequence token, stop id or stop string ends the row before this many tokens.
    min_tokens: int = 0
    #: Stop strings; the match and what follows are not part of the text.
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: Generate on through the model's end-of-sequence tokens.
    ignore_eos: bool = False
    #: Divides the positive logits of tokens in prompt or output and multiplies the negative ones.
    repetition_penalty: float = 1.0
    #: Taken off the logits of tokens in the output.
    presence_penalty: float = 0.0
    #: Taken off the logits of tokens in the output, once for each time that they are there.
    frequency_penalty: float = 0.0
    #: Added to the logits of these tokens, before the penalties.
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: Report each generated token's log-probability and this many of the likeliest tokens'.
    logprobs: int | None = None
    #: The same for the prompt's tokens but its first; `max_tokens` may then be 0.
    prompt_logprobs: int | None = None
    #: What the row's text must follow, reasoning and all, for llguidance; None leaves it free.
    grammar: str | None = None
    #: Special tokens, with their text, that are part of the row's text: parsers look for them.
    shown_tokens: tuple[tuple[int, str], ...] = ()
    #: None where the model's reasoning is not told apart.
    thinking: Thinking | None = None

    @property
    def adjusts_logits(self) -> bool:
        """Say whether tokens are drawn from other logits than the model's own."""
        return self.has_penalties or bool(self.logit_bias)

    @property
    def has_penalties(self) -> bool:
        """Say whether logits depend on which tokens there are already."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Ask for the continuation of one prompt.

    `prompt` holds the token ids as little-endian int32 (`pack_tokens`): decoding a list of 100k
    Python integers would stall the step loop for milliseconds.
    """

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    #: Higher runs first; of equal priorities the clients take turns.
    priority: int = 0
    #: Whose request it is, for the taking of turns.
    client: str = ""
    #: Output is sent at most once per this many tokens (and always at the end).
    stream_interval: int = 1
    #: Sent for the prompt's KV alone: that is worth storing durably however short it is.
    is_warm: bool = False
