# The commands of docs/contributing.md under short names; `.ci/run` calls the same ones.

# List the recipes.
default:
    @just --list

# Install the locked environment.
install:
    uv sync --locked

# Rewrite the sources in the one style and apply the safe fixes.
format:
    uv run ruff format
    uv run ruff check --fix

# Check style.
lint:
    uv run ruff format --check
    uv run ruff check

# Check types.
types:
    uv run mypy

# Run the default tests; options go to pytest: `just test tests/core -k abort`.
test *options:
    uv run pytest {{ options }}

# Run every tier of tests.
test-all: test
    uv run pytest -m thorough
    uv run pytest -m faults
    uv run pytest -m packaging

# Write the pages that are generated from the code.
docs:
    uv run python -m vllm_mlx.cli.reference --write
    uv run python -m vllm_mlx.cli.configuration_page --write
    uv run python -m vllm_mlx.server.http_api_page --write
    uv run python -m vllm_mlx.server.metrics_page --write

# Measure one part of the engine: `just bench sampling --rows 16`; the names are in engine/benchmark.
bench part *options:
    uv run python -m vllm_mlx.engine.benchmark.{{ part }} {{ options }}

# Measure the engine beside mlx-lm's generators: `just bench-engine --shape llama-3.2-3b-4bit`.
bench-engine *options:
    uv run python -m vllm_mlx.engine.benchmark {{ options }}

# Do what CI does, installs of system packages included.
ci:
    bash .ci/run

# Measure ratios side by side; wants a quiet machine, so CI does not.
performance *options:
    uv run pytest -m performance {{ options }}
