"""Names of the formats, as the command line knows them, and the parser made of two of them.

A format is a class in a file of its own; its line in one of the tables below is all that makes it
known.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import Any

from vllm_mlx.engine.errors import UsageError
from vllm_mlx.engine.parsing.reasoning.delimiters import Delimiters
from vllm_mlx.engine.parsing.reasoning_format import ReasoningFormat
from vllm_mlx.engine.parsing.schema import ToolSet
from vllm_mlx.engine.parsing.stream import StreamParser
from vllm_mlx.engine.parsing.tool_format import ToolFormat

#: Module and class of each tool format, and its names. Where the signs of several formats are in
#: a chat template, the first of them is meant: special formats stand before those they vary.
_TOOLS = {
    "apertus.Apertus": ("apertus",),
    "cohere.Cohere": ("cohere", "command_r7b"),
    "cohere.CommandR": ("command_r",),
    "deepseek.DeepSeek": ("deepseek", "deepseek_r1", "deepseek_v3"),
    "deepseek.DeepSeekV31": ("deepseek_v31",),
    "deepseek_v4.DeepSeekV32": ("deepseek_v32",),
    "deepseek_v4.DeepSeekV4": ("deepseek_v4", "dsml"),
    "firefunction.FireFunction": ("firefunction",),
    "functionary.Functionary": ("functionary", "functionary_v32", "meetkai"),
    "functionary.FunctionaryV31": ("functionary_v31",),
    "gemma4.Gemma4": ("gemma4",),
    "gemma4.Gemma3": ("gemma3",),
    "gigachat.GigaChat": ("gigachat", "gigachat31"),
    "gigachat.GigaChat3": ("gigachat3",),
    "granite.Granite": ("granite", "granite3"),
    "harmony.Harmony": ("harmony", "gpt-oss", "gpt_oss"),
    "hunyuan.Hunyuan": ("hunyuan",),
    "json_blocks.Apriel": ("apriel",),
    "json_blocks.MiniMaxM1": ("minimax_m1",),
    "kimi.Kimi": ("kimi", "kimi_k2", "moonshot"),
    "kimi_k3.KimiK3": ("kimi_k3",),
    "lfm2.Lfm2": ("lfm2",),
    "minicpm5.MiniCpm5": ("minicpm5",),
    "minimax.MiniMax": ("minimax", "minimax_m2"),
    "minimax_m3.MiniMaxM3": ("minimax_m3",),
    "mistral.Mistral": ("mistral",),
    "mistral.MistralList": ("mistral_list",),
    "nemotron.NemotronV2": ("nemotron_v2",),
    "poolside_v1.PoolsideV1": ("poolside_v1",),
    "glm47.Glm47": ("glm47", "glm4", "glm45"),
    "seed_oss.SeedOss": ("seed_oss",),
    "solar.Solar": ("solar",),
    "step3p5.Step3p5": ("step3p5", "step"),
    "qwen3_xml.Qwen3Xml": ("qwen3_xml", "qwen3_coder", "qwen3.5"),
    "hermes.Hermes": ("hermes", "nous"),
    "llama.Llama": ("llama", "llama3", "llama3_json"),
    "llama.Llama4": ("llama4", "llama4_pythonic", "pythonic"),
    "nemotron.Nemotron": ("nemotron", "nemotron3"),
    "qwen.Qwen": ("qwen", "qwen3"),
    "anthropic.Anthropic": ("anthropic", "claude"),
    "gemini.GeminiJson": ("gemini",),
    "openai.OpenAIJson": ("openai",),
    "xlam.XLam": ("xlam",),
    "auto.Auto": ("auto", "generic"),
}

#: The same for reasoning.
_REASONING = {
    "apertus.Apertus": ("apertus",),
    "apriel.Apriel": ("apriel",),
    "cohere.Cohere": ("cohere",),
    "deepseek_v4.DeepSeekV4": ("deepseek_v4",),
    "gemma4.Gemma4": ("gemma4",),
    "glm4.Glm4": ("glm4", "glm45", "glm47"),
    "granite.Granite": ("granite",),
    "harmony.Harmony": ("gpt_oss", "gpt-oss", "harmony"),
    "hunyuan.Hunyuan": ("hunyuan",),
    "kimi_k3.KimiK3": ("kimi_k3",),
    "minimax_m3.MiniMaxM3": ("minimax_m3",),
    "mistral.Mistral": ("mistral",),
    "seed_oss.SeedOss": ("seed_oss",),
    "solar.Solar": ("solar",),
    "think_tags.ThinkTags": (
        "qwen3",
        "deepseek_r1",
        "deepseek_v3",
        "kimi",
        "minimax",
        "poolside_v1",
        "step3p5",
    ),
    "delimiters.Delimiters": ("delimiters",),
}


def _load(package: str, table: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return the classes of `table` by every one of their names."""
    found: dict[str, Any] = {}
    for path, names in table.items():
        module, _, class_name = path.partition(".")
        loaded = import_module(f"vllm_mlx.engine.parsing.{package}.{module}")
        found.update(dict.fromkeys(names, getattr(loaded, class_name)))
    return found


#: Tool formats by name, aliases included.
TOOL_PARSERS: Mapping[str, type[ToolFormat]] = MappingProxyType(_load("tools", _TOOLS))

#: Reasoning formats by name, aliases included.
REASONING_PARSERS: Mapping[str, type[ReasoningFormat]] = MappingProxyType(
    _load("reasoning", _REASONING)
)


def make_parser(
    tools: str | None = None,
    reasoning: str | None = None,
    tool_schemas: Sequence[Mapping[str, Any]] | None = None,
    in_reasoning: bool = False,
    *,
    reasoning_delimiters: tuple[str, str] | None = None,
) -> StreamParser:
    """Make the parser of one stream.

    `tools` and `reasoning` are names of `TOOL_PARSERS` and `REASONING_PARSERS`; None leaves calls
    or reasoning in the content. `tool_schemas` are the request's OpenAI tool objects: a call to
    anything else is content (None knows no tools and takes any name). `in_reasoning` says that
    the prompt ends within a reasoning block; `ReasoningFormat.is_open` tells. For the reasoning
    format `delimiters`, `reasoning_delimiters` are the two markers.

    Raises `UsageError` for an unknown name.
    """
    if tools is not None and tools not in TOOL_PARSERS:
        raise UsageError(f"no tool parser {tools!r}; there are: {', '.join(TOOL_PARSERS)}")
    formats = [] if tools is None else [TOOL_PARSERS[tools]]
    found = make_reasoning(reasoning, reasoning_delimiters)
    return StreamParser(formats, found, ToolSet(tool_schemas), in_reasoning=in_reasoning)


def check_parser_names(
    tools: str | None, reasoning: str | None, delimiters: tuple[str, str] | None = None
) -> None:
    """Raise `UsageError` for names of formats that do not exist."""
    make_parser(tools, reasoning, reasoning_delimiters=delimiters)


def make_reasoning(
    name: str | None, delimiters: tuple[str, str] | None = None
) -> ReasoningFormat | None:
    """Return the reasoning format of this name; `delimiters` are for the one of that name.

    Raises `UsageError` for an unknown name, and for delimiters that are missing or not asked for.
    """
    if name is not None and name not in REASONING_PARSERS:
        raise UsageError(f"no reasoning parser {name!r}; there are: {', '.join(REASONING_PARSERS)}")
    if name is not None and issubclass(REASONING_PARSERS[name], Delimiters):
        return REASONING_PARSERS[name](*(delimiters or ()))
    if delimiters is not None:
        raise UsageError("delimiters go with the reasoning parser 'delimiters' only")
    return None if name is None else REASONING_PARSERS[name]()
