"""Hold `warm` to what it computes, skips, says and locks; most of it without a process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.engines import make_engine, random_prompt, tiny_namespace

from vllm_mlx.cli.main import main
from vllm_mlx.cli.warm_engine import STORE_TIMEOUT_S, StoringEngine, WarmingThread
from vllm_mlx.cli.warm_lock import LOCK_NAME, warm_lock
from vllm_mlx.cli.warm_plan import PlannedPrefix, plan_prefixes
from vllm_mlx.cli.warm_report import WarmReport
from vllm_mlx.engine.core.outputs import RowOutput, StepOutputs
from vllm_mlx.engine.core.stats import DiskPrefixStats, EngineStats, PrefixStats, RequestStats
from vllm_mlx.engine.errors import CacheError, InvalidRequestError
from vllm_mlx.engine.kv.disk_tier import DiskTier
from vllm_mlx.engine.kv.resume import ResumeRule
from vllm_mlx.engine.kv.spill import open_spill
from vllm_mlx.engine.kv.stored import StoredPrefixes
from vllm_mlx.server.anthropic.chat_input import ChatSettings
from vllm_mlx.server.warm_prompts import WarmPrompt, warm_prompt

BLOCK = 64


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Return a file of one prompt."""
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([[{"role": "user", "content": "Hi"}]]))
    return file


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "--ssd-cache-dir"),
        (["--ssd-cache-dir", "x", "--timeout", "5"], "--timeout needs --url"),
        (["--url", "http://x", "--dtype", "float16"], "--dtype cannot be used with --url"),
        (["--url", "http://x", "--ssd-cache-dir", "x"], "--ssd-cache-dir cannot be used"),
        (["--url", "http://x", "--check"], "--check cannot be used with --url"),
        (["--url", "http://x", "--no-normalize-prompts"], "cannot be used with --url"),
        (["--ssd-cache-dir", "x", "--no-prefix-cache", "--check"], "switched off"),
    ],
)
def test_options_without_effect_are_refused(
    prompts: Path, args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each says what is missing, or what takes no effect."""
    assert main(["warm", "--prompts", str(prompts), *args]) == 2
    assert expected in capsys.readouterr().err


def test_a_file_that_cannot_be_read_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is loaded for it."""
    arguments = ["--prompts", str(tmp_path / "none.json"), "--ssd-cache-dir", str(tmp_path)]
    assert main(["warm", *arguments]) == 2
    assert "none.json cannot be read" in capsys.readouterr().err


def test_a_model_that_is_not_here_has_nothing_stored(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A check fetches nothing and makes no folder."""
    arguments = ["--prompts", str(prompts), "--ssd-cache-dir", str(tmp_path / "ssd"), "--check"]
    assert main(["warm", str(tmp_path / "no-model"), *arguments]) == 3
    assert "is not on this machine" in capsys.readouterr().err
    assert not (tmp_path / "ssd").exists()


@contextlib.contextmanager
def held_lock(folder: Path) -> Iterator[int]:
    """Hold the lock as another process would."""
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def test_a_second_run_leaves_the_work_to_the_first(
    tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says so and is done, as cron expects."""
    arguments = ["--prompts", str(prompts), "--ssd-cache-dir", str(tmp_path)]
    with held_lock(tmp_path):
        assert main(["warm", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("another 'warm' is at work in")


def test_who_waits_gets_the_lock_when_it_is_free(tmp_path: Path) -> None:
    """Waiting is said before it begins."""
    waited: list[str] = []
    with held_lock(tmp_path) as descriptor:

        def on_wait() -> None:
            waited.append("waited")
            fcntl.flock(descriptor, fcntl.LOCK_UN)

        with warm_lock(tmp_path, on_wait) as is_ours:
            assert is_ours
            with warm_lock(tmp_path, None) as is_second:
                assert not is_second
    assert waited == ["waited"]


def test_a_folder_that_cannot_be_made_is_a_cache_error(tmp_path: Path) -> None:
    """Exit code 4 says that the store is of no use."""
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError), warm_lock(tmp_path / "file" / "ssd", None):
        pass


class Characters:
    """Make each character a token."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the code points."""
        return [ord(character) for character in text]

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        """Join the contents; refuse one that says `bad`."""
        text = "".join(message["content"] for message in messages)
        if "bad" in text:
            raise InvalidRequestError("refused")
        return self.encode(text)


def prompt_of(content: str) -> WarmPrompt:
    """Return a prompt of one question."""
    prompt = warm_prompt([{"role": "user", "content": content}], f"here, {content[:3]}")
    assert prompt is not None
    return prompt


def test_a_plan_has_each_prefix_once() -> None:
    """Prompts that share their whole blocks are one; others are too short, or wrong by name."""
    contents = ["abcdefgh", "abcdefgh and more"[:10], "abc", "bad one", "bbbbcccc"]
    plan = plan_prefixes([prompt_of(content) for content in contents], Characters(), 4)
    assert ["".join(map(chr, prefix.blocks)) for prefix in plan.prefixes] == [
        *("abcdefgh", "bbbbcccc"),
    ]
    assert plan.num_too_short == 1
    assert plan.faults == ["here, bad: refused"]


def test_a_recorded_message_is_planned_as_its_server_would_render_it() -> None:
    """Two turns of one agent have one prefix, unless the server leaves their first lines in."""
    prompts = []
    for checksum in ("aaaaa", "bbbbb"):
        system = f"x-anthropic-billing-header: cch={checksum};\nBe brief."
        body = {"system": system, "messages": [{"role": "user", "content": "Hi!"}]}
        prompts.append(warm_prompt({"path": "/v1/messages", "body": body}, checksum))
    found = [prompt for prompt in prompts if prompt is not None]
    for settings, expected in ((None, 1), (ChatSettings(normalize=False), 2)):
        plan = plan_prefixes(found, Characters(), 4, settings)
        assert len(plan.prefixes) == expected
    assert "".join(map(chr, plan.prefixes[0].blocks)).startswith("x-anthropic")


def planned(num_blocks: int, seed: int) -> PlannedPrefix:
    """Return a prefix of random tokens."""
    return PlannedPrefix(f"prompt {seed}", random_prompt(num_blocks * BLOCK, seed))


def test_a_prefix_is_on_disk_when_it_is_handed_out(tmp_path: Path) -> None:
    """Killed right after, nothing that was reported is lost."""
    namespace = tiny_namespace("full")
    thread = WarmingThread(
        lambda on_progress: make_engine(
            namespace=namespace, spill=open_spill(namespace, tmp_path, max_bytes=None)
        )
    )
    thread.start(lambda stage, fraction: None)
    tier = DiskTier.open(tmp_path, None)
    stored = StoredPrefixes(tier, namespace, ResumeRule(BLOCK, frozenset({"kv"})))
    prefixes = [planned(2, 1), planned(3, 2)]
    done: list[int] = []
    warming = thread.warm(prefixes, done.append)
    for number in (2, 3):
        prefix, output = next(warming)
        assert output.finish_reason == "length"
        assert stored.count(prefix.blocks) == number * BLOCK
    assert done[-1] == 5 * BLOCK
    assert thread.close()
    assert thread.faults == {}
    tier.close()


class FakeEngine:
    """Finish one request at its second step, and remember when it was told to store."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def step(self) -> StepOutputs:
        """Compute, then finish."""
        self.log.append("step")
        reason = "length" if len(self.log) > 1 else None
        rows = (RowOutput(request_id="a", finish_reason="length"),) if reason else ()
        return StepOutputs(rows=rows)

    def store_prefixes(self, timeout_s: float) -> bool:
        """Take note."""
        assert timeout_s == STORE_TIMEOUT_S
        self.log.append("store")
        return False

    def stats(self) -> EngineStats:
        """Say how far the request is, and what the disk did."""
        request = RequestStats(
            request_id="a",
            phase="prefill",
            num_prompt_tokens=200,
            num_prefilled_tokens=120,
            num_cached_tokens=0,
            num_completion_tokens=0,
            max_tokens=1,
            age_s=1.0,
        )
        disk = DiskPrefixStats(faults={"full": 2})
        return EngineStats(prefixes=PrefixStats(disk=disk), requests=(request,))


def test_progress_and_faults_are_passed_on() -> None:
    """While a prompt is computed its tokens are told, at its end what the disk did."""
    fake, told = FakeEngine(), []  # type: ignore[var-annotated]
    engine = StoringEngine(fake, told.append)  # type: ignore[arg-type]
    assert engine.step().rows == ()
    assert (told, engine.faults) == ([120], {})
    assert len(engine.step().rows) == 1
    assert (fake.log, engine.faults) == (["step", "step", "store"], {"full": 2})


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, ""),
        ({"skipped": 3}, ""),
        (
            {"stored": 1, "skipped": 2, "computed_tokens": 12345, "too_short": 1},
            "12,345 tokens computed; 2 stored before; 1 too short to be stored",
        ),
    ],
)
def test_a_log_hears_only_of_what_was_done(
    counts: dict[str, int], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing had to be done nothing is said."""
    report = WarmReport("there", as_json=False)
    for name, value in counts.items():
        setattr(report.counts, name, value)
    report.print_counts()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (expected in captured.err) if expected else captured.err == ""
