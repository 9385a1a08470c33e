"""Hold that the encoders of a command line arrive at the server, with or without a chat model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from vllm_mlx.cli.main import main
from vllm_mlx.engine.encoders.kinds import EncoderConfig
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.services.plan import ServicePlan

Caught = dict[str, Any]


@pytest.fixture
def caught(monkeypatch: pytest.MonkeyPatch) -> Caught:
    """Catch what the server would be run with."""
    found: Caught = {}

    def run_server(
        server: ServerConfig, *configs: Any, announce: Any, services: Sequence[ServicePlan]
    ) -> int:
        announce()
        found.update(server=server, services=list(services))
        return 0

    def announce_if_local(*configs: Any) -> None:
        found["announced"] = True

    monkeypatch.setattr("vllm_mlx.server.serving.run_server", run_server)
    monkeypatch.setattr("vllm_mlx.cli.announce.announce_if_local", announce_if_local)
    monkeypatch.setattr("vllm_mlx.cli.logs.configure_logging", lambda level, log_format: None)
    return found


def test_encoders_arrive_with_their_names_and_limits(caught: Caught) -> None:
    """Models of both kinds, one under a name of its own; the longest text is of embeddings only."""
    words = ["--embedding-model", "e5=org/e5", "--embedding-max-length", "128"]
    words += ["--rerank-model", "org/reranker", "--offline", "--load-on-demand"]
    assert main(["serve", *words, "--embedding-overflow-policy", "truncate"]) == 0
    assert [(p.kind.name, p.served_name, p.flag, p.config) for p in caught["services"]] == [
        *[
            (
                "embedding",
                "e5",
                "--embedding-model",
                EncoderConfig(model="org/e5", offline=True, max_length=128),
            )
        ],
        ("rerank", None, "--rerank-model", EncoderConfig(model="org/reranker", offline=True)),
    ]
    server = caught["server"]
    assert (server.serves_chat, server.loads_on_demand, server.truncates_embeddings) == (
        *(True, True, True),
    )
    assert caught["announced"]


def test_a_server_without_chat_announces_no_chat_model(caught: Caught) -> None:
    """Nothing is said of the demo model, which is not loaded."""
    assert main(["serve", "--no-chat-model", "--embedding-model", "org/e5"]) == 0
    assert not caught["server"].serves_chat
    assert "announced" not in caught


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--no-chat-model"], "leaves nothing to serve"),
        (["demo", "--no-chat-model", "--embedding-model", "x"], "MODEL is for a chat model"),
        (["--no-chat-model", "--rerank-model", "x", "--warm-prompts", "p"], "--warm-prompts is"),
        (["--embedding-model", "=org/x"], "NAME=MODEL"),
        (["--embedding-max-length", "5"], "--embedding-max-length"),
        (["--embedding-overflow-policy", "ignore"], "'error', 'truncate'"),
    ],
)
def test_what_contradicts_itself_is_a_usage_error(
    caught: Caught, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    """Nothing to serve, what is for a chat model without one, and bad values are refused."""
    assert main(["serve", *words]) == 2
    assert said in capsys.readouterr().err
    assert caught == {}
