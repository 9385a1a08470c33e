"""Hold that the speech models of a command line arrive at the server, with their limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_mlx.cli.main import main
from vllm_mlx.engine.audio.kind import TranscriptionConfig
from vllm_mlx.engine.audio.limits import AudioLimits
from vllm_mlx.server.services.plan import ServicePlan


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[ServicePlan]:
    """Catch the engines that the server would be run with."""
    caught: list[ServicePlan] = []

    def run_server(*configs: Any, announce: Any, services: Sequence[ServicePlan]) -> int:
        caught.extend(services)
        return 0

    monkeypatch.setattr("vllm_mlx.server.serving.run_server", run_server)
    monkeypatch.setattr("vllm_mlx.cli.logs.configure_logging", lambda level, log_format: None)
    return caught


def test_models_arrive_with_their_names_and_limits(plans: list[ServicePlan]) -> None:
    """Several models, one of them under a name of its own, share the limits."""
    words = ["--stt-model", "whisper-1=org/large", "--stt-model", "org/small", "--offline"]
    assert main(["serve", *words, "--max-audio-mb", "7", "--max-audio-minutes", "1.5"]) == 0
    limits = AudioLimits(max_bytes=7 * 2**20, max_seconds=90.0)
    assert [(plan.served_name, plan.model, plan.flag) for plan in plans] == [
        ("whisper-1", "org/large", "--stt-model"),
        (None, "org/small", "--stt-model"),
    ]
    assert [plan.config for plan in plans] == [
        TranscriptionConfig(model=name, offline=True, limits=limits)
        for name in ("org/large", "org/small")
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--stt-model", "=org/x"], "NAME=MODEL"),
        (["--max-audio-mb", "0"], "--max-audio-mb"),
        (["--max-audio-minutes", "0"], "--max-audio-minutes"),
        (["--max-audio-upload-mb", "25"], "instead of --max-audio-upload-mb use --max-audio-mb"),
    ],
)
def test_what_cannot_be_is_a_usage_error(
    plans: list[ServicePlan], capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Names and limits of nothing, and another server's flag, are refused with what to do."""
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err
    assert plans == []
