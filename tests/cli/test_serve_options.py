"""Hold the options of `serve` to the configurations that they become."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import pytest

from vllm_mlx.cli.main import main
from vllm_mlx.engine.config import EngineConfig, ModelConfig
from vllm_mlx.server.config import ServerConfig
from vllm_mlx.server.services.plan import ServicePlan

MIB = 1024 * 1024

#: Every option with a value that is not its default, and where it must arrive.
EVERYTHING = {
    "--host": ("0.0.0.0", "server.host", "0.0.0.0"),
    "--port": ("0", "server.port", 0),
    "--ready-file": ("ready.json", "server.ready_file", "ready.json"),
    "--api-key": ("one", "server.api_keys", ("one",)),
    "--rate-limit": ("60", "server.rate_limit", 60),
    "--allowed-hosts": ("one.example", "server.allowed_hosts", ("one.example",)),
    "--allowed-origins": ("https://a.example", "server.allowed_origins", ("https://a.example",)),
    "--max-body-mb": ("0.5", "server.max_body_bytes", MIB // 2),
    "--max-header-kb": ("8", "server.max_header_bytes", 8 * 1024),
    "--timeout": ("2.5", "server.timeout_s", 2.5),
    "--drain-timeout": ("0", "server.drain_timeout_s", 0.0),
    "--model-alias": ("gpt-*=mine", "server.model_aliases", (("gpt-*", "mine"),)),
    "--served-model-name": ("mine", "server.served_model_name", "mine"),
    "--max-tokens": ("100", "server.default_max_tokens", 100),
    "--max-request-tokens": ("200", "server.max_request_tokens", 200),
    "--default-temperature": ("0", "server.default_temperature", 0.0),
    "--default-top-p": ("0.5", "server.default_top_p", 0.5),
    "--default-top-k": ("0", "server.default_top_k", 0),
    "--default-min-p": ("0.1", "server.default_min_p", 0.1),
    "--default-repetition-penalty": ("1.1", "server.default_repetition_penalty", 1.1),
    "--default-presence-penalty": ("-0.5", "server.default_presence_penalty", -0.5),
    "--default-frequency-penalty": ("2", "server.default_frequency_penalty", 2.0),
    "--stream-interval": ("4", "server.stream_interval", 4),
    "--strict-fields": (None, "server.strict_fields", True),
    "--max-queue": ("0", "server.max_queue", 0),
    "--max-queue-tokens": ("99", "server.max_queue_tokens", 99),
    "--max-num-seqs": ("3", "engine.max_num_seqs", 3),
    "--prefill-tokens-per-step": ("64", "engine.prefill_tokens_per_step", 64),
    "--target-itl-ms": ("50", "engine.target_itl_s", 0.05),
    "--step-timeout": ("7.5", "engine.step_timeout_s", 7.5),
    "--memory-reserve-mb": ("0", "engine.memory_reserve_bytes", 0),
    "--kv-memory-mb": ("128", "engine.kv_memory_bytes", 128 * MIB),
    "--warm-prompts": ("prompts.json", "server.warm_prompts", "prompts.json"),
    "--record": ("recorded", "server.record_dir", "recorded"),
    "--metrics": (None, "server.metrics", True),
    "--log-prompts": (None, "server.log_prompts", True),
    "--dtype": ("float16", "model.dtype", "float16"),
    "--load-format": ("dummy", "model.load_format", "dummy"),
    "--shape": ("tiny", "model.shape", "tiny"),
    "--moe-top-k": ("2", "model.moe_top_k", 2),
    "--max-model-len": ("1024", "model.max_model_len", 1024),
    "--adapter-path": ("adapter", "model.adapter_path", "adapter"),
    "--trust-remote-code": (None, "model.trust_remote_code", True),
    "--offline": (None, "model.offline", True),
    "--chat-template": (__file__, "model.chat.chat_template", __file__),
    "--default-chat-template-kwargs": ('{"a": 1}', "model.chat.template_kwargs", {"a": 1}),
    "--tool-call-parser": ("hermes", "model.chat.tool_parser", "hermes"),
    "--reasoning-parser": ("none", "model.chat.reasoning_parser", "none"),
    "--default-thinking-token-budget": ("0", "model.chat.thinking_budget", 0),
}
Configs = dict[str, Any]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Configs:
    """Catch the configurations that the server would be run with."""
    caught: Configs = {}

    def run_server(
        server: ServerConfig,
        model: ModelConfig,
        engine: EngineConfig,
        announce: Any,
        services: Sequence[ServicePlan],
    ) -> int:
        caught.update(server=server, model=model, engine=engine)
        # Absent where there are none, as most tests have it.
        caught.update({plan.flag: plan for plan in services})
        return 0

    monkeypatch.setattr("vllm_mlx.server.serving.run_server", run_server)
    monkeypatch.setattr("vllm_mlx.cli.announce.announce_if_local", lambda model, engine: None)
    monkeypatch.setattr("vllm_mlx.cli.logs.configure_logging", lambda level, log_format: None)
    for flag in EVERYTHING:
        monkeypatch.delenv("VLLM_MLX_" + flag[2:].replace("-", "_").upper(), raising=False)
    return caught


def value_at(configs: Configs, path: str) -> Any:
    """Return the configuration's value at `path`."""
    config, _, field = path.partition(".")
    return attrgetter(field)(configs[config])


def test_nothing_given_is_the_demo_with_every_default(served: Configs) -> None:
    """`vllm-mlx serve` alone uses the configurations' own defaults."""
    assert main(["serve"]) == 0
    assert served == {"server": ServerConfig(), "model": ModelConfig(), "engine": EngineConfig()}


def test_every_flag_arrives(served: Configs) -> None:
    """Each flag of the command line arrives in its field."""
    args = [part for flag, (text, _, _) in EVERYTHING.items() for part in (flag, text) if part]
    assert main(["serve", "my/model", *args]) == 0
    assert served["model"].model == "my/model"
    expected = {path: value for _, path, value in EVERYTHING.values()}
    assert {path: value_at(served, path) for path in expected} == expected


def test_every_variable_arrives(served: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each option can come from its environment variable instead."""
    for flag, (text, _, _) in EVERYTHING.items():
        monkeypatch.setenv("VLLM_MLX_" + flag[2:].replace("-", "_").upper(), text or "1")
    monkeypatch.setenv("VLLM_MLX_MODEL", "my/model")
    assert main(["serve"]) == 0
    assert served["model"].model == "my/model"
    expected = {path: value for _, path, value in EVERYTHING.values()}
    assert {path: value_at(served, path) for path in expected} == expected


def test_the_command_line_wins_over_a_variable(
    served: Configs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A flag overrides its variable."""
    monkeypatch.setenv("VLLM_MLX_PORT", "1234")
    assert main(["serve", "--port", "4321"]) == 0
    assert served["server"].port == 4321


def test_several_keys(served: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys may be repeated as flags, or divided by spaces in the variable."""
    assert main(["serve", "--api-key", "one", "--api-key", "two"]) == 0
    assert served["server"].api_keys == ("one", "two")
    monkeypatch.setenv("VLLM_MLX_API_KEY", "three four")
    assert main(["serve"]) == 0
    assert served["server"].api_keys == ("three", "four")


def test_several_aliases_and_prompts_as_they_come(served: Configs) -> None:
    """Aliases may be repeated, and stand for any name that the model has."""
    aliases = ("--model-alias", "a=default", "--model-alias", "b=my/model")
    assert main(["serve", "my/model", *aliases, "--no-normalize-prompts"]) == 0
    assert served["server"].model_aliases == (("a", "default"), ("b", "my/model"))
    assert served["server"].normalize_prompts is False


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--continuous-batching"], 64),
        (["--continuous-batching", "--max-num-seqs", "1"], 1),
        (["--no-continuous-batching"], 1),
        (["--no-continuous-batching", "--max-num-seqs", "1"], 1),
    ],
)
def test_continuous_batching(served: Configs, args: list[str], expected: int) -> None:
    """Batching is always on, but for one request at a time when it is switched off."""
    assert main(["serve", *args]) == 0
    assert served["engine"].max_num_seqs == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--max-tokens", "100"], (100, 32768)),
        (["--max-request-tokens", "100"], (100, 100)),
        (["--max-tokens", "40000"], (40000, 40000)),
    ],
)
def test_a_default_length_gives_way(
    served: Configs, args: list[str], expected: tuple[int, int]
) -> None:
    """One given length moves the other one's default rather than contradict it."""
    assert main(["serve", *args]) == 0
    server = served["server"]
    assert (server.default_max_tokens, server.max_request_tokens) == expected


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--no-continuous-batching", "--max-num-seqs", "2"], "--max-num-seqs 2"),
        (["--max-tokens", "200", "--max-request-tokens", "100"], "raise the latter"),
        (["--model-alias", "gpt-4o"], "is written NAME=TARGET, not 'gpt-4o'"),
        (["--model-alias", "=default"], "is written NAME=TARGET"),
        (["--model-alias", "gpt-4o=other"], "no model 'other'; this server serves 'demo'"),
    ],
)
def test_contradictions_are_refused(
    served: Configs, args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two given options that contradict each other are a usage error."""
    assert main(["serve", *args]) == 2
    assert expected in capsys.readouterr().err
    assert served == {}


def test_an_open_door_is_pointed_out(served: Configs, capsys: pytest.CaptureFixture[str]) -> None:
    """Listening for other machines without a key warns; with one it does not, nor shows it."""
    assert main(["serve", "--host", "0.0.0.0"]) == 0
    assert "no --api-key is set" in capsys.readouterr().err
    assert main(["serve", "--host", "0.0.0.0", "--api-key", "secret"]) == 0
    assert capsys.readouterr() == ("", "")


def test_verbose_logs_more(served: Configs, monkeypatch: pytest.MonkeyPatch) -> None:
    """-v before or after the command logs debug records unless a level was given."""
    levels: list[str] = []
    monkeypatch.setattr(
        "vllm_mlx.cli.logs.configure_logging", lambda level, log_format: levels.append(level)
    )
    assert main(["serve"]) == 0
    assert main(["-v", "serve"]) == 0
    assert main(["serve", "-v"]) == 0
    assert main(["serve", "-v", "--log-level", "error"]) == 0
    assert levels == ["info", "debug", "debug", "error"]
