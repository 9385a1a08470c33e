"""What each agent must be told to talk to a server: variables, or a file; pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

#: A key for agents that insist on one, where the server asks for none.
NO_KEY = "not-needed"

#: The variable that files name instead of holding the key.
KEY_VARIABLE = "VLLM_MLX_API_KEY"


@dataclass(frozen=True)
class ServedChoice:
    """Say which server and model an agent is to use; `root` is the address without `/v1`."""

    root: str
    model: str
    api_key: str | None = None
    #: Longest prompt plus answer; None if nobody asked the server.
    context: int | None = None


@dataclass(frozen=True)
class AgentSetup:
    """Hold what an agent must be told."""

    #: Variables of its environment; an empty value overrides one that is in the way.
    variables: Mapping[str, str] = field(default_factory=dict)
    #: A file's place and content, where variables do not do.
    file: tuple[str, str] | None = None


def _claude_code(choice: ServedChoice) -> AgentSetup:
    names = [
        *("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL"),
        *("ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL"),
        # What older versions call the one for small tasks.
        "ANTHROPIC_SMALL_FAST_MODEL",
    ]
    variables = {
        "ANTHROPIC_BASE_URL": choice.root,
        "ANTHROPIC_AUTH_TOKEN": choice.api_key or NO_KEY,
        # Another key would go before the token.
        "ANTHROPIC_API_KEY": "",
        **dict.fromkeys(names, choice.model),
        # The server leaves this line out anyway; not to send it spares it the trouble.
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
        # What is done on this machine stays here.
        "DISABLE_TELEMETRY": "1",
        "DISABLE_ERROR_REPORTING": "1",
    }
    if choice.context is not None:
        variables["CLAUDE_CODE_AUTO_COMPACT_WINDOW"] = str(choice.context)
    return AgentSetup(variables)


def _codex(choice: ServedChoice) -> AgentSetup:
    lines = [f"model = {_quoted(choice.model)}", 'model_provider = "vllm-mlx"']
    if choice.context is not None:
        lines.append(f"model_context_window = {choice.context}")
    lines += [
        "",
        "[model_providers.vllm-mlx]",
        'name = "vllm-mlx"',
        f"base_url = {_quoted(choice.root + '/v1')}",
        'wire_api = "responses"',
    ]
    if choice.api_key is not None:
        lines.append(f'env_key = "{KEY_VARIABLE}"')
    text = "\n".join(lines) + "\n"
    return AgentSetup(_key_variable(choice), ("~/.codex/config.toml", text))


def _opencode(choice: ServedChoice) -> AgentSetup:
    options = {"baseURL": f"{choice.root}/v1"}
    if choice.api_key is not None:
        options["apiKey"] = f"{{env:{KEY_VARIABLE}}}"
    model: dict[str, Any] = {"name": choice.model}
    if choice.context is not None:
        # An answer may be as long as it likes within the context, but not push all else out.
        model["limit"] = {"context": choice.context, "output": max(1, choice.context // 4)}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "vllm-mlx",
        "options": options,
        "models": {choice.model: model},
    }
    config = {
        "$schema": "https://opencode.ai/config.json",
        "model": f"vllm-mlx/{choice.model}",
        "provider": {"vllm-mlx": provider},
    }
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    return AgentSetup(_key_variable(choice), ("~/.config/opencode/opencode.json", text))


def _qwen_code(choice: ServedChoice) -> AgentSetup:
    return AgentSetup(
        {
            "OPENAI_BASE_URL": f"{choice.root}/v1",
            "OPENAI_API_KEY": choice.api_key or NO_KEY,
            "OPENAI_MODEL": choice.model,
        }
    )


def _key_variable(choice: ServedChoice) -> dict[str, str]:
    return {} if choice.api_key is None else {KEY_VARIABLE: choice.api_key}


def _quoted(text: str) -> str:
    """Write a string as TOML does: as JSON does where no character is escaped in two halves."""
    return json.dumps(text, ensure_ascii=False)


@dataclass(frozen=True)
class Agent:
    """Name an agent, the route that it needs, and what makes its setup."""

    name: str
    route: str
    set_up: Callable[[ServedChoice], AgentSetup]


#: Every agent by its name on the command line.
AGENTS = {
    "claude-code": Agent("Claude Code", "/v1/messages", _claude_code),
    "codex": Agent("Codex", "/v1/responses", _codex),
    "opencode": Agent("OpenCode", "/v1/chat/completions", _opencode),
    "qwen-code": Agent("Qwen Code", "/v1/chat/completions", _qwen_code),
}
