"""Every format at once, for models of which nothing else is known."""

from __future__ import annotations

from vllm_mlx.engine.parsing.fenced_json import FencedJson
from vllm_mlx.engine.parsing.format_group import FormatGroup
from vllm_mlx.engine.parsing.json_calls import CallKeys
from vllm_mlx.engine.parsing.tools.anthropic import AnthropicTags
from vllm_mlx.engine.parsing.tools.deepseek import DeepSeek
from vllm_mlx.engine.parsing.tools.deepseek_v4 import DeepSeekV4Tags, DeepSeekV32Tags
from vllm_mlx.engine.parsing.tools.gemma4 import Gemma4Call, GemmaCode
from vllm_mlx.engine.parsing.tools.glm47 import Glm47
from vllm_mlx.engine.parsing.tools.granite import GraniteList
from vllm_mlx.engine.parsing.tools.hermes import HermesJson
from vllm_mlx.engine.parsing.tools.kimi import Kimi
from vllm_mlx.engine.parsing.tools.llama import FunctionTag, LlamaBuiltin, LlamaPythonic
from vllm_mlx.engine.parsing.tools.minimax import MiniMax
from vllm_mlx.engine.parsing.tools.mistral import Mistral
from vllm_mlx.engine.parsing.tools.nemotron import NemotronList
from vllm_mlx.engine.parsing.tools.qwen import QwenBracket
from vllm_mlx.engine.parsing.tools.qwen3_xml import Qwen3Xml


class AnyJson(FencedJson):
    """Read calls that are plain JSON, whatever the names of their parts."""

    triggers = ("```json", "<|python_tag|>")
    keys = CallKeys(
        names=("name", "tool_name"),
        arguments=("arguments", "parameters", "input", "args"),
        nested=("function", "function_call", "functionCall"),
        lists=("tool_calls", "functionCalls", "function_calls", "parts", "content"),
        ignored=("type", "index", "tool_call_id"),
    )


class Auto(FormatGroup):
    """Read whatever comes; write JSON in tags.

    Harmony and Functionary are not among them: they frame the answer itself, so that reading them
    by chance would take text out of it.
    """

    members = (
        HermesJson,
        Qwen3Xml,
        Glm47,
        FunctionTag,
        QwenBracket,
        DeepSeek,
        DeepSeekV4Tags,
        DeepSeekV32Tags,
        Kimi,
        Mistral,
        MiniMax,
        AnthropicTags,
        GraniteList,
        NemotronList,
        Gemma4Call,
        GemmaCode,
        AnyJson,
        LlamaPythonic,
        LlamaBuiltin,
    )
