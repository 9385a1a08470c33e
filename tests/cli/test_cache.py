"""The commands of `cache`: what they print, what they ask, and how they end."""

from __future__ import annotations

import csv
import inspect
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import pytest
from support.runs import NAMESPACE, OTHER, chain_of, files_in, run_of
from support.store_worker import Worker

from vllm_mlx.cli.cache import cache
from vllm_mlx.cli.cache_selection import parse_moment
from vllm_mlx.cli.main import main
from vllm_mlx.engine.kv.disk_tier import DiskTier

if TYPE_CHECKING:
    from tests.cli.conftest import RunCli

#: Runs one command line and says which of the named modules it loaded.
PROBE = """
import json, sys
from vllm_mlx.cli.main import main
code = main(sys.argv[2:])
json.dump([name for name in json.loads(sys.argv[1]) if name in sys.modules], sys.stderr)
sys.exit(code)
"""
HEAVY = ["mlx", "mlx_lm", "transformers", "tokenizers", "huggingface_hub", "quart", "pandas"]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Give a store with the chains 1, 2, 3 of one model and 4 of another."""
    path = tmp_path / "store"
    tier = DiskTier.open(path, None)
    tier.write(run_of([1, 2]))
    tier.write(run_of([1, 2, 3], 2))
    tier.write(run_of([4], namespace=OTHER))
    tier.read(chain_of(1, 2, 3))
    tier.close()
    return path


def damage(store: Path) -> None:
    """Flip a bit in the run that ends the chain 1, 2, 3."""
    end = chain_of(1, 2, 3)[-1].hex()
    (path,) = (path for path in files_in(store) if path.name.startswith(end))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def run(*args: object) -> int:
    """Run a command of `cache` in this process."""
    return main(["cache", *map(str, args)])


def test_every_command_has_an_example_and_documented_options() -> None:
    """Each command shows an example, and each of its options has a help text."""
    for command in [cache, *cache.commands.values()]:
        assert "\b\nExample" in (inspect.getdoc(command.callback) or "")
        options = [p for p in command.params if isinstance(p, click.Option)]
        assert [option.name for option in options if not option.help] == []


@pytest.mark.parametrize(
    "args", [["inspect"], ["prune", "--all", "--dry-run"], ["prune", "--all", "--yes"], ["verify"]]
)
def test_no_command_loads_a_model_library(
    store: Path, cli_env: dict[str, str], args: list[str]
) -> None:
    """They work, in a moment, on machines that could not load a model."""
    command = [sys.executable, "-c", PROBE, json.dumps(HEAVY), "cache", *args, str(store)]
    done = subprocess.run(command, capture_output=True, text=True, env=cli_env, check=True)
    assert json.loads(done.stderr) == []


def test_inspect_prints_tables(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Totals by model and the tree of prefixes are shown, and no words of prompts."""
    assert run("inspect", store) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(f"{store}: 3 files, ")
    lines = [line.split() for line in out.splitlines()]
    assert ["model-a", NAMESPACE.digest.hex()[:8], "bfloat16", "12"] in [x[:4] for x in lines]
    assert ["model-b", OTHER.digest.hex()[:8], "float16", "4"] in [x[:4] for x in lines]
    assert ["12", "model-a", "0"] in [x[:3] for x in lines]


def test_inspect_limits_the_tree(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A long list is cut, and says so."""
    assert run("inspect", store, "--limit", 1) == 0
    assert "1 more prefixes: --limit 0 shows all" in capsys.readouterr().out
    assert run("inspect", store, "--limit", 0) == 0
    assert "--limit" not in capsys.readouterr().out


def test_inspect_prints_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Everything is there for scripts, with times in ISO 8601."""
    assert run("inspect", store, "--json", "--model", "model-a") == 0
    report = json.loads(capsys.readouterr().out)
    (namespace,) = report["namespaces"]
    assert (namespace["model"], namespace["num_tokens"], namespace["num_hits"]) == (
        "model-a",
        12,
        1,
    )
    assert namespace["last_used"].endswith("Z")
    assert [prefix["num_runs"] for prefix in report["prefixes"]] == [2]
    assert report["num_runs"] == 3


def test_inspect_prints_csv(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line a prefix, and one a file that is of no use."""
    os.truncate(files_in(store)[0], 10)
    assert run("inspect", store, "--csv") == 0
    rows = list(csv.DictReader(capsys.readouterr().out.splitlines()))
    states = {row["state"] for row in rows}
    assert "whole" in states
    assert "damaged" in states
    (bad,) = (row for row in rows if row["state"] == "damaged")
    assert (bad["num_bytes"], bad["model"]) == ("10", "")
    assert bad["file"].endswith(files_in(store)[0].name)


def test_inspect_shows_text_on_request(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words need --show-text and a tokenizer; without one the model is named."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {"[UNK]": 0, "one": 1, "\x1b[31mtwo": 2, "three": 3, "four": 4}
    Tokenizer(WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    assert run("inspect", store, "--show-text", "--tokenizer", tmp_path / "tokenizer.json") == 0
    out, err = capsys.readouterr()
    assert "one one one one [31mtwo" in out
    assert "\x1b" not in out
    assert err == ""
    assert run("inspect", store, "--show-text") == 0
    out, err = capsys.readouterr()
    assert "one one" not in out
    assert "No tokenizer of 'model-a' is on this machine: give --tokenizer" in err


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["inspect", "--tokenizer", "."], "--tokenizer needs --show-text"),
        (["inspect", "--older-than", "soon"], "'soon' is neither an age"),
        (["inspect", "--namespace", "xyz"], "'xyz' is not the beginning of a namespace"),
        (["prune"], "say what to remove"),
        (["prune", "--all", "--max-gb", "1"], "--all leaves no room"),
        (["prune", "--corrupt", "--model", "x"], "--corrupt cannot be combined"),
        (["prune", "--all"], "nobody can be asked whether to remove 3 files"),
        (["prune", "--max-gb", "-1"], "--max-gb"),
    ],
)
def test_usage_errors(
    store: Path,
    args: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A command line that means nothing exits with 2, and changes nothing."""
    before = files_in(store)
    monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115
    code = run(*args, store)
    err = capsys.readouterr().err
    sys.stdin.close()
    assert code == 2
    assert expected in err
    assert files_in(store) == before


def test_a_folder_that_is_no_store_exits_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each command says that there is no store, and makes none."""
    for args in (["inspect"], ["prune", "--all", "--yes"], ["verify"]):
        assert run(*args, tmp_path / "nowhere") == 4
        assert capsys.readouterr().err == (
            f"Error: no prefix store in {tmp_path / 'nowhere'}: check the path\n"
        )
    assert not (tmp_path / "nowhere").exists()


def test_prune_shows_its_plan_and_keeps_to_it(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run removes nothing; --yes removes what the dry run said."""
    assert run("prune", store, "--model", "model-b", "--dry-run") == 0
    planned = capsys.readouterr().out
    assert planned.startswith(f"To be removed from {store}: 1 file, ")
    assert "(of 3 stored, " in planned
    assert len(files_in(store)) == 3
    assert run("prune", store, "--model", "model-b", "--yes") == 0
    done = capsys.readouterr().out
    assert done.startswith(planned)
    assert "Removed 1 file, " in done
    assert len(files_in(store)) == 2
    assert run("prune", store, "--model", "model-b", "--yes") == 0
    assert capsys.readouterr().out == "Nothing to remove.\n"


def test_prune_prints_json(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan names each file; the result is null unless something was removed."""
    assert run("prune", store, "--all", "--dry-run", "--json") == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_files"], len(plan["runs"]), plan["removed"]) == (3, 3, None)
    assert run("prune", store, "--max-gb", 0, "--yes", "--json") == 0
    done = json.loads(capsys.readouterr().out)
    assert done["removed"] == {"num_files": 3, "num_bytes": plan["num_bytes"]}
    assert files_in(store) == []


@pytest.mark.parametrize(("answer", "num_left"), [("n\n", 3), ("y\n", 0)])
def test_prune_asks_in_a_terminal(
    store: Path, cli_env: dict[str, str], answer: str, num_left: int
) -> None:
    """Whoever sits there is asked, on stderr, and only a yes removes."""
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_mlx.cli", "cache", "prune", str(store), "--all"],
        stdin=end,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cli_env,
    )
    os.close(end)
    os.write(terminal, answer.encode())
    out, err = process.communicate(timeout=60)
    os.close(terminal)
    assert process.returncode == 0
    assert "Remove them? [y/N]" in err
    assert ("Removed" in out) == (num_left == 0)
    assert len(files_in(store)) == num_left


def test_verify_exits_4_on_damage(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One flipped bit anywhere is told, and pruning what is corrupt heals the store."""
    assert run("verify", store) == 0
    assert capsys.readouterr().out.endswith("No damage.\n")
    damage(store)
    assert run("verify", store) == 4
    out, err = capsys.readouterr()
    assert "checksum of" in out
    assert err == (
        f"Error: 1 of 3 files in {store} are damaged; "
        "'vllm-mlx cache prune --corrupt' removes them\n"
    )
    assert run("verify", store, "--json") == 4
    found = json.loads(capsys.readouterr().out)
    assert [len(found[key]) for key in ("damaged", "orphaned", "other_version")] == [1, 0, 0]
    assert run("prune", store, "--corrupt", "--yes") == 0
    capsys.readouterr()
    assert run("verify", store) == 0
    assert len(files_in(store)) == 2


def test_the_folder_can_come_from_the_environment(run_cli: RunCli, store: Path) -> None:
    """The variable that `serve` reads names the folder; no condition comes from one."""
    done = run_cli("cache", "verify", VLLM_MLX_SSD_CACHE_DIR=str(store))
    assert done.returncode == 0
    done = run_cli("cache", "prune", VLLM_MLX_SSD_CACHE_DIR=str(store), VLLM_MLX_MODEL="model-a")
    assert done.returncode == 2
    assert "say what to remove" in done.stderr


def test_ages_and_dates() -> None:
    """An age counts back from now, and a date is local time."""
    assert parse_moment("2w") - parse_moment("1w") == pytest.approx(-7 * 86400, abs=5)
    assert parse_moment("90m") - parse_moment("1.5h") == pytest.approx(0, abs=5)
    assert parse_moment("2026-01-31T00:00:10+00:00") == 1769817610
    assert parse_moment("2026-01-31T18:00") - parse_moment("2026-01-31") == 18 * 3600
    for text in ("", "7", "7 days", "-1d", "yesterday"):
        with pytest.raises(click.BadParameter, match="neither an age"):
            parse_moment(text)


def test_commands_are_safe_beside_writers(tmp_path: Path, cli_env: dict[str, str]) -> None:
    """While a server stores, every command works, and nobody meets an error."""
    store = tmp_path / "store"
    commands = (["inspect", "--json"], ["verify"], ["prune", "--max-gb", "0.0002", "--yes"])
    codes = []
    with Worker(tmp_path / "told", "write", store, 3, 1, 2_000_000) as writer:
        while writer.process.poll() is None:
            for arguments in commands:
                done = subprocess.run(
                    [sys.executable, "-m", "vllm_mlx.cli", "cache", *arguments, str(store)],
                    capture_output=True,
                    text=True,
                    env=cli_env,
                    check=False,
                )
                codes.append((done.returncode, done.stderr))
        said = writer.result()
    assert set(codes) == {(0, "")}
    assert len(codes) >= 3
    assert said["faults"].keys() <= {"missing", "orphan", "no_room"}
    assert run("verify", store) == 0
