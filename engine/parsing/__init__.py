from vllm_mlx.engine.parsing.detect import detect_parsers
from vllm_mlx.engine.parsing.events import (
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolArgumentsDelta,
    ToolCallEnd,
    ToolCallStart,
)
from vllm_mlx.engine.parsing.registry import (
    REASONING_PARSERS,
    TOOL_PARSERS,
    make_parser,
    make_reasoning,
)
from vllm_mlx.engine.parsing.special_tokens import kept_tokens
from vllm_mlx.engine.parsing.stream import StreamParser

__all__ = [
    "REASONING_PARSERS",
    "TOOL_PARSERS",
    "ContentDelta",
    "Event",
    "ReasoningDelta",
    "StreamParser",
    "ToolArgumentsDelta",
    "ToolCallEnd",
    "ToolCallStart",
    "detect_parsers",
    "kept_tokens",
    "make_parser",
    "make_reasoning",
]
