"""Which formats a model's answers are read with: the user's choice, or what its template shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from vllm_mlx.engine.config import NO_PARSER, ChatConfig
from vllm_mlx.engine.parsing import TOOL_PARSERS, detect_parsers, kept_tokens, make_reasoning
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.tool_format import ToolFormat
from vllm_mlx.engine.text.template_facts import TemplateFacts

#: What a template that knows no tools is made to say, and what one whose own form nobody knows is
#: read with.
DESCRIBED_FORMAT = "hermes"
_UNKNOWN_FORMAT = "auto"


@dataclass(frozen=True)
class ChatFormats:
    """Name the formats of one served model's answers."""

    #: A name of `TOOL_PARSERS`; None leaves calls in the content.
    tools: str | None = None
    #: A name of `REASONING_PARSERS`; None leaves reasoning in the content.
    reasoning: str | None = None
    delimiters: tuple[str, str] | None = None
    #: Most tokens of reasoning where a request does not say; None does not limit.
    thinking_budget: int | None = None
    #: Why these.
    reason: str = ""
    #: The special tokens of the model, by their text.
    special_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def tool_format(self) -> type[ToolFormat] | None:
        """Return the class of the tool format."""
        return None if self.tools is None else TOOL_PARSERS[self.tools]

    def reasoning_format(self) -> ReasoningFormat | None:
        """Return the reasoning format."""
        return make_reasoning(self.reasoning, self.delimiters)

    def shown_tokens(self, *, reads_tools: bool) -> tuple[tuple[int, str], ...]:
        """Return the special tokens that must be text for the formats to be found."""
        kept = kept_tokens(
            self.tool_format if reads_tools else None, self.reasoning_format(), self.special_tokens
        )
        return tuple(sorted((self.special_tokens[text], text) for text in kept))


def choose_formats(
    config: ChatConfig,
    template: str,
    vocabulary: Collection[str],
    facts: TemplateFacts,
    special_tokens: Mapping[str, int],
) -> ChatFormats:
    """Return the formats: those of `config`, else what template and vocabulary show."""
    if not template:
        tools, reasoning, reason = None, None, "the model has no chat template"
    else:
        tools, reasoning, reason = detect_parsers(template, vocabulary)
        if tools is None and facts.takes_tools:
            tools = _UNKNOWN_FORMAT
            reason += f"; {_UNKNOWN_FORMAT!r} reads what is known of other models"
        elif tools is None:
            tools = DESCRIBED_FORMAT
            reason += f"; tools are described to the model, in the form of {DESCRIBED_FORMAT!r}"
    delimiters = None
    if config.tool_parser is not None:
        tools = None if config.tool_parser == NO_PARSER else config.tool_parser
        reason += f"; but {tools or 'none'} for tools was asked for"
    if config.reasoning_parser is not None:
        reasoning, delimiters = config.reasoning_choice
        reason += f"; but {reasoning or 'none'} for reasoning was asked for"
    return ChatFormats(tools, reasoning, delimiters, config.thinking_budget, reason, special_tokens)
