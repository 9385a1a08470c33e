"""Requests as a coding agent sends them to the Messages API, turn by turn; made up."""

from __future__ import annotations

import random
from typing import Any

_WORDS = [
    *("file", "edit", "read", "search", "branch", "commit", "test", "build", "error", "line"),
    *("change", "function", "module", "import", "project", "directory", "command", "output"),
    *("result", "check", "before", "after", "never", "always", "prefer", "explain"),
]
_TOOL_NAMES = [
    *("Bash", "Edit", "Glob", "Grep", "LS", "MultiEdit", "NotebookEdit", "NotebookRead", "Read"),
    *("Task", "TodoWrite", "WebFetch", "WebSearch", "Write", "ExitPlanMode"),
]


class AgentSession:
    """Make the requests of one session, each of which begins as the one before it did.

    But for what an agent writes anew each time: a checksum at the very beginning, and how much of
    a budget is left.
    """

    def __init__(self, *, num_system_words: int, num_tools: int = len(_TOOL_NAMES)) -> None:
        """Make up a system prompt of so many words, and so many tools."""
        self._random = random.Random(num_system_words)
        self._prompt = self._text(num_system_words)
        self._tools = [self._tool(name) for name in _TOOL_NAMES[:num_tools]]
        self._messages: list[dict[str, Any]] = [{"role": "user", "content": self._text(12)}]
        self._left = 15_000_000

    def request(self) -> dict[str, Any]:
        """Return the next request; every one has another checksum."""
        checksum = f"{self._random.randrange(16**5):05x}"
        self._left -= self._random.randrange(1000, 9000)
        left = f"<total_tokens>{self._left} tokens left</total_tokens>"
        cached = {"type": "ephemeral"}
        billing = f"x-anthropic-billing-header: cc_version=2.1.117.48f; cch={checksum};"
        self._messages.append({"role": "system", "content": left})
        return {
            "model": "claude-sonnet-9",
            "max_tokens": 4,
            "system": [
                {"type": "text", "text": billing},
                {"type": "text", "text": "You are an agent.", "cache_control": cached},
                {"type": "text", "text": self._prompt, "cache_control": cached},
            ],
            "tools": self._tools,
            "messages": list(self._messages),
            "metadata": {"user_id": "user_made_up"},
        }

    def use_tool(self, call_id: str) -> None:
        """Let a turn pass: the model has called a tool, and the tool has answered."""
        call = {
            "type": "tool_use",
            "id": call_id,
            "name": "Read",
            "input": {"path": f"src/{self._random.choice(_WORDS)}.py"},
        }
        result = {"type": "tool_result", "tool_use_id": call_id, "content": self._text(30)}
        said = {"type": "text", "text": self._text(5)}
        self._messages += [
            {"role": "assistant", "content": [said, call]},
            {"role": "user", "content": [result]},
        ]

    def _tool(self, name: str) -> dict[str, Any]:
        properties = {
            word: {"type": "string", "description": self._text(6)}
            for word in self._random.sample(_WORDS, 3)
        }
        return {
            "name": name,
            "description": self._text(20),
            "input_schema": {"type": "object", "properties": properties},
        }

    def _text(self, num_words: int) -> str:
        words = self._random.choices(_WORDS, k=num_words)
        return " ".join(words).capitalize() + "."
