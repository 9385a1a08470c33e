"""Write a page of the documentation that is made from the code, or hold it to the code."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn


def write_or_check(path: Path, expected: str, module: str) -> NoReturn:
    """Write `expected` with --write; with --check exit 1 if the page differs from it."""
    parser = argparse.ArgumentParser(description=f"Write {path.name}, or check it.")
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true")
    action.add_argument("--check", action="store_true")
    if parser.parse_args().write:
        path.write_text(expected, encoding="utf-8")
    elif not path.is_file() or path.read_text(encoding="utf-8") != expected:
        sys.exit(f"{path} is out of date: python -m {module} --write")
    sys.exit(0)
