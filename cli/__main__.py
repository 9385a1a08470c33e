"""Run the command line as `python -m vllm_mlx.cli`."""

from __future__ import annotations

import sys

from vllm_mlx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
