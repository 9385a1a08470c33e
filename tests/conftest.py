"""Shared fixtures; MLX's environment is prepared here, before any test module imports it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.models.progress import ignore_progress
from vllm_mlx.engine.models.resolve import resolve_model
from vllm_mlx.engine.platform import prepare_environment

prepare_environment()


@pytest.fixture(scope="session")
def demo_model_path() -> Path:
    """Return the demo model's folder, converted into the user's cache at first use."""
    return resolve_model(ModelConfig(), ignore_progress)


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """Give each test the loggers as they are made: what starts a server here sets their level."""
    project = logging.getLogger("vllm_mlx")
    level = project.level
    project.setLevel(logging.NOTSET)
    yield
    project.setLevel(level)
