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
    uv run pytest -m faults
    uv run pytest -m packaging

# Do what CI does, installs of system packages included.
ci:
    bash .ci/run
