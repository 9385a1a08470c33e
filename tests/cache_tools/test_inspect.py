"""What a store holds, from its headers: totals, the tree of prefixes, and what is of no use."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pytest
from support.runs import BLOCK_SIZE, NAMESPACE, OTHER, files_in, run_of, write_run

from vllm_mlx.cache_tools.inspect import SORT_KEYS, InspectReport, inspect_store
from vllm_mlx.cache_tools.listing import ListedRun, StoreListing, list_store, mark_orphans
from vllm_mlx.cache_tools.selection import Selection
from vllm_mlx.cache_tools.text import FirstWords
from vllm_mlx.engine.errors import CacheError, UsageError
from vllm_mlx.engine.kv.disk_format import RunHeader

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cache_tools.conftest import FilledStore

DAY_S, NOW_S = 86400.0, 1_800_000_000.0


def report_of(
    store: FilledStore, selection: Selection | None = None, **options: object
) -> InspectReport:
    """Inspect a store."""
    return inspect_store(list_store(store.path), selection or Selection(), **options)  # type: ignore[arg-type]


def test_totals_are_by_namespace(store: FilledStore) -> None:
    """Tokens, bytes and hits of each model's forms are summed up, and times span all runs."""
    report = report_of(store)
    assert [found.model for found in report.namespaces] == ["model-a", "model-b"]
    first, second = report.namespaces
    assert (first.num_runs, first.num_tokens, first.num_hits) == (4, 5 * BLOCK_SIZE, 7)
    assert (second.num_runs, second.num_tokens, second.num_hits) == (1, 2 * BLOCK_SIZE, 2)
    assert first.namespace == NAMESPACE.digest.hex()
    assert (second.weights, second.kv_dtype) == (OTHER.weights, "float16")
    assert second.created == datetime.fromtimestamp(NOW_S - 40 * DAY_S, UTC)
    assert second.last_used == datetime.fromtimestamp(NOW_S - 30 * DAY_S, UTC)
    files = files_in(store.path)
    assert (report.num_runs, report.num_bytes) == (5, sum(f.stat().st_size for f in files))
    assert first.num_bytes + second.num_bytes == report.num_bytes


def test_prefixes_are_a_tree(store: FilledStore) -> None:
    """Runs that follow one another are one prefix; what forks off comes below it."""
    prefixes = report_of(store).prefixes
    shape = [(p.depth, p.parent, p.tokens_before, p.num_tokens, p.num_runs) for p in prefixes]
    assert shape == [
        (0, None, 0, 2 * BLOCK_SIZE, 1),
        (1, 0, 2 * BLOCK_SIZE, 2 * BLOCK_SIZE, 2),
        (1, 0, 2 * BLOCK_SIZE, BLOCK_SIZE, 1),
        (0, None, 0, 2 * BLOCK_SIZE, 1),
    ]
    assert [p.id for p in prefixes] == [0, 1, 2, 3]
    assert [p.num_hits for p in prefixes] == [7, 7, 0, 2]


@pytest.mark.parametrize(
    ("sort", "models"),
    [
        ("used", ["model-a", "model-b"]),
        ("created", ["model-a", "model-b"]),
        ("hits", ["model-b", "model-a"]),
        ("size", ["model-a", "model-b"]),
        ("tokens", ["model-a", "model-b"]),
    ],
)
def test_the_most_comes_first(store: FilledStore, sort: str, models: list[str]) -> None:
    """Models and prefixes are sorted by what was asked for."""
    assert sort in SORT_KEYS
    store.age(40, 30, 9, store.name(1, 2, namespace=OTHER))
    report = report_of(store, sort=sort)
    assert [found.model for found in report.namespaces] == models
    first = [prefix.model for prefix in report.prefixes if prefix.depth == 0]
    if sort in ("used", "created", "hits"):
        assert first == models


@pytest.mark.parametrize(
    ("selection", "num_tokens"),
    [
        (Selection(models=("model-b",)), 2),
        (Selection(models=("model-?",)), 7),
        (Selection(models=("Model-a",)), 0),
        (Selection(namespaces=(OTHER.digest.hex()[:6].upper(),)), 2),
        (Selection(created_before_s=NOW_S - 20 * DAY_S), 2),
        (Selection(used_before_s=NOW_S - 3 * DAY_S), 4),
        (Selection(min_hits=3), 3),
        (Selection(models=("model-a",), min_hits=1, used_before_s=NOW_S - 3 * DAY_S), 0),
    ],
)
def test_a_selection_narrows(store: FilledStore, selection: Selection, num_tokens: int) -> None:
    """Model, namespace, ages and hits each narrow what is summed up, and all of them together."""
    report = report_of(store, selection)
    blocks = sum(found.num_tokens for found in report.namespaces) // BLOCK_SIZE
    assert blocks == num_tokens
    assert sum(prefix.num_tokens for prefix in report.prefixes) == num_tokens * BLOCK_SIZE
    assert report.num_runs == 5


def test_what_is_of_no_use_is_named(store: FilledStore) -> None:
    """Damaged, orphaned and left files are told apart, and none of them counts as a prefix."""
    os.truncate(store.file(1, 2, 3), 100)
    folder = store.file(1, 2).parent
    write_run(folder / ".tmp-left", run_of([5]))
    os.utime(folder / ".tmp-left", (0, 0))
    (store.path / "quarantine" / "old.run").write_bytes(b"x" * 10)
    report = report_of(store)
    faults = {fault.file: (fault.state, fault.fault) for fault in report.faults}
    assert faults.pop(store.name(1, 2, 3))[0] == "damaged"
    assert faults.pop(store.name(1, 2, 3, 4))[0] == "orphaned"
    assert faults == {}
    assert (report.num_quarantined, report.quarantined_bytes, report.num_leftovers) == (1, 10, 1)
    assert sum(prefix.num_tokens for prefix in report.prefixes) == 5 * BLOCK_SIZE


def test_looking_changes_nothing(store: FilledStore) -> None:
    """Neither files nor times change, whatever is wrong with them."""
    os.truncate(store.file(1, 2, 3), 100)
    before = store.contents()
    report_of(store)
    assert store.contents() == before


def test_without_an_index_only_uses_are_unknown(store: FilledStore) -> None:
    """The files say everything else."""
    for path in store.path.glob("index*"):
        path.unlink()
    report = report_of(store)
    assert [found.num_tokens for found in report.namespaces] == [5 * BLOCK_SIZE, 2 * BLOCK_SIZE]
    assert {found.num_hits for found in report.namespaces} == {0}
    assert not list(store.path.glob("index*"))


def test_no_store_is_an_error(tmp_path: Path) -> None:
    """A folder that is not a store, or none, is told as such."""
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CacheError, match="no prefix store"):
            list_store(path)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Give a folder with a tokenizer whose token n is the n-th word."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = ["[UNK]", "one", "two", "three", "four", "line\nbreak", "six", "seven", "eight", "nine"]
    model = WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    (tmp_path / "tokenizer").mkdir()
    Tokenizer(model).save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    return tmp_path / "tokenizer"


def test_first_words_are_shown_on_request(store: FilledStore, tokenizer: Path) -> None:
    """Each prefix begins with the words that its own tokens stand for, on one line."""
    store.put([5], 1)
    words = FirstWords(tokenizer, lambda model: None)
    texts = [prefix.text for prefix in report_of(store, show_text=words).prefixes]
    assert "one one one one two two two two" in texts
    assert "three three three three" in texts
    assert "line break line break line break line break" in texts
    assert words.models_without == []
    assert {prefix.text for prefix in report_of(store).prefixes} == {None}


def test_a_models_own_tokenizer_is_found(store: FilledStore, tokenizer: Path) -> None:
    """Without a tokenizer of one model its prefixes have no words, and the model is named."""
    folders = {"model-b": tokenizer}
    words = FirstWords(None, folders.get)
    prefixes = report_of(store, show_text=words).prefixes
    assert {prefix.model for prefix in prefixes if prefix.text is not None} == {"model-b"}
    assert words.models_without == ["model-a"]


def test_a_tokenizer_that_cannot_be_read_is_an_error(store: FilledStore, tmp_path: Path) -> None:
    """A wrong path is told to whoever gave it; a model's own damaged one is only missing."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be read as a tokenizer"):
        report_of(store, show_text=FirstWords(tmp_path, lambda model: None))
    words = FirstWords(None, lambda model: tmp_path)
    assert {prefix.text for prefix in report_of(store, show_text=words).prefixes} == {None}


def test_a_chain_of_many_forks_is_listed(tmp_path: Path) -> None:
    """Depth has no limit: a conversation may fork at every turn."""

    def listed(number: int, parent: int | None) -> ListedRun:
        header = RunHeader(
            namespace=NAMESPACE,
            digest=NAMESPACE.digest,
            parent=None if parent is None else parent.to_bytes(32, "big"),
            hashes=(number.to_bytes(32, "big"),),
            tokens=bytes(4 * BLOCK_SIZE),
            tensors=(),
        )
        return ListedRun(f"run-{number}", "whole", 1, NOW_S, NOW_S, header=header)

    turns = [listed(number, number - 1 if number else None) for number in range(1100)]
    forks = [listed(10_000 + number, number) for number in range(1100)]
    listing = StoreListing(tmp_path, tuple(mark_orphans(turns + forks)), (), ())
    prefixes = inspect_store(listing, Selection()).prefixes
    assert len(prefixes) == 2199
    assert max(prefix.depth for prefix in prefixes) == 1099
    assert max(prefix.tokens_before or 0 for prefix in prefixes) == 1099 * BLOCK_SIZE
