"""A model's name leads to a folder, or to one line that says what to do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.errors import HubUnreachableError, ModelLoadError, ModelNotFoundError
from vllm_mlx.engine.models import hub
from vllm_mlx.engine.models.progress import ignore_progress
from vllm_mlx.engine.models.resolve import resolve_model, weight_files

if TYPE_CHECKING:
    from tests.models.conftest import FakeHub

#: Resolves names in a fresh process, as the hub client reads its settings when it is imported.
RESOLVE = """
import json, sys, time
from vllm_mlx.engine.config import ModelConfig
from vllm_mlx.engine.models.resolve import resolve_model
import huggingface_hub
answers = []
for name in sys.argv[2:]:
    model = ModelConfig(model=name, offline=sys.argv[1] == "offline")
    heard = []
    begin = time.monotonic()
    try:
        result = str(resolve_model(model, lambda stage, fraction: heard.append([stage, fraction])))
    except Exception as error:
        result = f"{type(error).__name__}: {error}"
    answers.append({"result": result, "heard": heard, "seconds": time.monotonic() - begin})
assert "mlx.core" not in sys.modules
print(json.dumps(answers))
"""


class Answer(NamedTuple):
    """Say what came of one name."""

    #: The folder, or the error's class and message.
    result: str
    #: What progress heard.
    heard: list[list[object]]
    seconds: float


class Resolver:
    """Resolve names against one hub and one cache, in processes of their own."""

    def __init__(self, endpoint: str, cache: Path) -> None:
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HF_", "TRANSFORMERS_"))},
            "HF_ENDPOINT": endpoint,
            "HF_HUB_CACHE": str(cache),
            "NO_PROXY": "127.0.0.1",
        }

    def __call__(self, *names: str, mode: str = "online") -> list[Answer]:
        """Return what came of each name, one after the other."""
        done = subprocess.run(
            [sys.executable, "-c", RESOLVE, mode, *names],
            env=self.environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
        return [Answer(**answer) for answer in json.loads(done.stdout)]


def model_folder(folder: Path, names: tuple[str, ...] = ("model.safetensors",)) -> Path:
    """Make a folder that looks like a model."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def resolve(name: str | Path) -> Path:
    """Resolve a name on this machine alone."""
    return resolve_model(ModelConfig(model=str(name), offline=True), ignore_progress)


def test_a_local_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its whole path, from the current folder, and from the home folder."""
    folder = model_folder(tmp_path / "m")
    assert resolve(folder) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve("m").samefile(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/m").samefile(folder)


@pytest.mark.parametrize("name", ["/nowhere/m", "./m", "../x/m", "~/no-such-model", "a/b/c"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(name: str) -> None:
    """A wrong path is told as one."""
    with pytest.raises(ModelNotFoundError, match=r"no model folder .*check the path"):
        resolve(name)


def test_folders_that_hold_no_model_say_what_is_missing(tmp_path: Path) -> None:
    """No config, no weights, weights of another format, and a file: each is named."""
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelNotFoundError, match=r"has no config\.json"):
        resolve(tmp_path / "empty")
    with pytest.raises(ModelNotFoundError, match=r"has no model\*\.safetensors weights$"):
        resolve(model_folder(tmp_path / "bare", ()))
    with pytest.raises(ModelNotFoundError, match=r"w\.gguf is in a format that is not read"):
        resolve(model_folder(tmp_path / "other", ("w.gguf",)))
    with pytest.raises(ModelNotFoundError, match="is a file; give the folder"):
        resolve(tmp_path / "other/w.gguf")


def test_missing_shards_are_counted(tmp_path: Path) -> None:
    """A folder whose index names files that are not there is not half loaded."""
    folder = model_folder(tmp_path / "m", ("model-1.safetensors",))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match=r"lacks 1 of 2 weight files, model-2\.safet"):
        resolve(folder)
    (folder / "model-2.safetensors").write_bytes(b"")
    assert [path.name for path in weight_files(resolve(folder))] == [
        "model-1.safetensors",
        "model-2.safetensors",
    ]
    (folder / "model.safetensors.index.json").write_text('{"weight_map": [')
    with pytest.raises(ModelLoadError, match=r"index\.json is damaged"):
        resolve(folder)


def test_the_demo_is_resolved_without_mlx(demo_model_path: Path) -> None:
    """`demo` is a folder with everything that a model needs, in reach of the HTTP process."""
    names = {path.name for path in demo_model_path.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    code = (
        "import sys\n"
        "from vllm_mlx.engine.config import ModelConfig\n"
        "from vllm_mlx.engine.models.resolve import resolve_model\n"
        "resolve_model(ModelConfig(), print)\n"
        "assert 'mlx.core' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_a_repository_is_downloaded_once_and_served_from_the_cache(
    fake_hub: FakeHub, tmp_path: Path
) -> None:
    """Only what loading needs is downloaded, with progress; then the hub may be gone."""
    fake_hub.files = {
        "config.json": b"{}",
        "model.safetensors": b"w" * 100_000,
        "chat_template.jinja": b"{{ x }}",
        "pytorch_model.bin": b"b" * 100,
        "modeling.py": b"print('no')",
    }
    fake_hub.pause_s = 0.6
    resolver = Resolver(fake_hub.url, tmp_path / "cache")
    (first,) = resolver("owner/tiny")
    wanted = ["chat_template.jinja", "config.json", "model.safetensors"]
    assert sorted(path.name for path in Path(first.result).iterdir()) == wanted
    assert sorted(fake_hub.downloads) == wanted
    assert first.heard[0] == ["resolving", None]
    assert {stage for stage, _ in first.heard[1:]} == {"downloading"}
    assert any(fraction is not None for _, fraction in first.heard)
    fake_hub.stop()
    (again,) = resolver("owner/tiny")
    assert again.result == first.result
    (offline,) = resolver("owner/tiny", mode="offline")
    assert offline.result == first.result
    assert offline.heard == [["resolving", None]]


def test_what_the_hub_refuses_is_told_in_one_line(fake_hub: FakeHub, tmp_path: Path) -> None:
    """An unknown repository, a gated one and an impossible name: each says what to do."""
    expected = {
        "owner/unknown": "no hub repository owner/unknown; a private one needs",
        "owner/gated": "owner/gated is gated: accept its terms",
        "not a name": "neither a local folder nor a repository's name",
    }
    answers = Resolver(fake_hub.url, tmp_path / "cache")(*expected)
    for answer, part in zip(answers, expected.values(), strict=True):
        assert answer.result.startswith("ModelNotFoundError: "), answer
        assert part in answer.result
        assert "\n" not in answer.result


def test_a_hub_out_of_reach_is_told_at_once(tmp_path: Path) -> None:
    """A closed port, and an offline run: both end within seconds with what to do."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, and nobody listens
        resolver = Resolver(f"http://127.0.0.1:{closed.getsockname()[1]}", tmp_path / "cache")
        (online,) = resolver("owner/tiny")
    assert online.result.startswith("HubUnreachableError: owner/tiny is not on this machine, and h")
    assert "owner/name" not in online.result
    assert online.seconds < 4
    offline, mistyped = resolver("owner/tiny", "dmeo", mode="offline")
    assert "offline mode is on" in offline.result
    assert offline.seconds < 4
    assert mistyped.result.endswith("named owner/name; 'demo' is the one model that needs none")


def test_a_hub_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub that takes the connection and then says nothing does not hang the program."""
    monkeypatch.setattr(hub, "_ANSWER_TIMEOUT_S", 0.3)
    begin = time.monotonic()
    with pytest.raises(HubUnreachableError, match="does not answer"):
        hub._run_watched(lambda: str(time.sleep(5)), lambda: None, lambda: False)
    assert time.monotonic() - begin < 4
