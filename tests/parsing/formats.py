"""How answers with calls look in each format: text before and behind, calls, reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_mlx.engine.parsing import TOOL_PARSERS
from vllm_mlx.engine.parsing.registry import make_reasoning

Calls = Sequence[tuple[str, Mapping[str, Any]]]


def _plain(before: str, calls: str, behind: str) -> str:
    return "\n".join(part for part in (before, calls, behind) if part)


def _fenced(before: str, calls: str, behind: str) -> str:
    """Only in a fence are bare calls found behind text."""
    return _plain(before, f"```json\n{calls}\n```" if before else calls, behind)


def _python_tag(before: str, calls: str, behind: str) -> str:
    return _plain(before, f"<|python_tag|>{calls}" if before else calls, behind)


def _python_start(before: str, calls: str, behind: str) -> str:
    return _plain(before, f"<|python_start|>{calls}<|python_end|>" if before else calls, behind)


def _functionary(before: str, calls: str, behind: str) -> str:
    return "".join(
        (before and f"all\n{before}", calls and f"{calls}", behind and f">>>all\n{behind}")
    )


def _harmony(before: str, calls: str, behind: str) -> str:
    parts = [
        before and f"<|channel|>commentary<|message|>{before}<|end|>",
        calls,
        behind and f"<|channel|>final<|message|>{behind}<|return|>",
    ]
    return "<|start|>assistant".join(part for part in parts if part)


@dataclass(frozen=True)
class Answers:
    """Write answers of one tool format, with the reasoning format that models pair with it."""

    tools: str
    reasoning: str = "qwen3"
    put: Callable[[str, str, str], str] = _plain
    #: Kinds of arguments that the format itself cannot write.
    unwritable: tuple[str, ...] = ()

    def write(
        self, calls: Calls = (), *, before: str = "", behind: str = "", reasoning: str = ""
    ) -> str:
        """Return the text of one answer."""
        rendered = TOOL_PARSERS[self.tools].render_calls(calls) if calls else ""
        thought = ""
        if reasoning:
            found = make_reasoning(self.reasoning)
            assert found is not None
            thought = found.render(reasoning)
        return thought + self.put(before, rendered, behind)


ANSWERS = [
    Answers("anthropic", put=_fenced),
    Answers("apertus", "apertus"),
    Answers("apriel", "apriel"),
    Answers("auto"),
    Answers("cohere", "cohere"),
    Answers("command_r"),
    Answers("deepseek", "deepseek_r1"),
    Answers("deepseek_v31", "deepseek_v3"),
    Answers("deepseek_v32", "deepseek_v4"),
    Answers("deepseek_v4", "deepseek_v4"),
    Answers("firefunction"),
    Answers("functionary", put=_functionary),
    Answers("functionary_v31"),
    Answers("gemini", put=_fenced),
    Answers("gemma3"),
    Answers("gemma4", "gemma4"),
    Answers("gigachat"),
    Answers("gigachat3"),
    Answers("glm47", "glm4"),
    Answers("granite"),
    Answers("harmony", "harmony", put=_harmony),
    Answers("hermes"),
    Answers("hunyuan", "hunyuan"),
    Answers("kimi", "kimi"),
    Answers("kimi_k3", "kimi_k3"),
    Answers("lfm2"),
    Answers("llama", put=_python_tag),
    Answers("llama4", put=_python_start),
    Answers("minicpm5"),
    Answers("minimax", "minimax"),
    Answers("minimax_m1"),
    Answers("minimax_m3", "minimax_m3", unwritable=("nested", "angles")),
    Answers("mistral", "mistral"),
    Answers("mistral_list", "mistral"),
    Answers("nemotron"),
    Answers("nemotron_v2"),
    Answers("openai", put=_fenced),
    Answers("poolside_v1", "poolside_v1"),
    Answers("qwen"),
    Answers("qwen3_xml"),
    Answers("seed_oss", "seed_oss"),
    Answers("solar", "solar"),
    Answers("step3p5", "step3p5"),
    Answers("xlam", put=_fenced),
]
