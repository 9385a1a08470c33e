"""Measure how many characters a second the parsers take.

Run as `python -m vllm_mlx.engine.benchmark.parsing`; prints one table. Every figure is of CPU time
on one core, for texts fed in pieces of 4 characters (about a token), of 64, and of 4,096.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

from vllm_mlx.engine.parsing import TOOL_PARSERS, make_parser

PIECE_SIZES = (4, 64, 4096)

TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "write_file",
        "parameters": {
            "type": "object",
            "properties": {
                "path": {"type": "string"},
                "text": {"type": "string"},
                "table": {"type": "object"},
            },
        },
    },
}

_PROSE = 'The quick brown fox (a < b, see [1]) jumps over the "lazy" dog.\nIt is {x}.\n'
_CODE = "def f(x: int) -> str:\n    return 'a' + x if x < 3 else {'k': [1, 2]}\n"


def texts(tools: str) -> Iterator[tuple[str, str]]:
    """Yield kinds of answers: prose, a long string in a call, nested values, many short calls."""
    kind = TOOL_PARSERS[tools]
    rows = [[index, index * 1.5, {"k": "v", "b": True}] for index in range(2000)]
    yield "prose", _PROSE * 2000
    yield "long string", kind.render_call("write_file", {"path": "a.py", "text": _CODE * 2000})
    yield "nested values", kind.render_call("write_file", {"path": "a.py", "table": {"r": rows}})
    yield "short calls", kind.render_calls([("write_file", {"path": "a.py", "text": "b"})] * 1000)


def rate(text: str, piece_size: int, tools: str) -> float:
    """Return the best of three rates, in millions of characters a second of CPU time."""
    pieces = [text[at : at + piece_size] for at in range(0, len(text), piece_size)]
    best = 0.0
    for _ in range(3):
        parser = make_parser(tools, "qwen3", [TOOL])
        start = time.process_time()
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        best = max(best, len(text) / 1e6 / (time.process_time() - start))
    return best


def main() -> None:
    """Print a table of rates for the named formats."""
    write = sys.stdout.write
    write(f"{'Mchar/s':14}{'text':16}{''.join(f'{size:>8}' for size in PIECE_SIZES)}\n")
    for tools in sys.argv[1:] or ["hermes", "qwen3_xml", "deepseek_v31", "harmony", "auto"]:
        for name, text in texts(tools):
            rates = "".join(f"{rate(text, size, tools):8.1f}" for size in PIECE_SIZES)
            write(f"{tools:14}{name:16}{rates}\n")


if __name__ == "__main__":
    main()
