"""Grammars are tried in a process of their own, which they may crash, fill or hold up."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from support.grammar_tokens import ByteTokens

from vllm_mlx.engine.core.grammar import GrammarCompiler
from vllm_mlx.engine.errors import InvalidRequestError, VllmMlxError
from vllm_mlx.engine.host.grammar_checker import GrammarChecker

HEAD = "%llguidance {}\nstart: "
GOOD = f'{HEAD}"yes"'


def of_schema(schema: object) -> str:
    """Return a grammar of JSON that follows a schema."""
    return f"{HEAD}%json {json.dumps(schema)}"


def chain(length: int) -> str:
    """Return a schema whose definitions are nested so deeply that compiling it overruns a stack."""
    definitions: dict[str, object] = {
        f"d{n}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{n + 1}"}}}
        for n in range(length)
    }
    definitions[f"d{length}"] = {"type": "string"}
    return of_schema({"$ref": "#/$defs/d0", "$defs": definitions})


#: Takes minutes.
ENDLESS = of_schema({"type": "integer", "multipleOf": 99_999_989})


@pytest.fixture
def make_checker() -> Iterator[Callable[..., GrammarChecker]]:
    """Return a function that makes checkers, which are closed at the end."""
    made: list[GrammarChecker] = []

    def make(tokens: ByteTokens | None = None, **options: float) -> GrammarChecker:
        made.append(GrammarChecker(tokens or ByteTokens(), **options))
        return made[-1]

    yield make
    for checker in made:
        checker.close()


def test_verdicts_are_the_compilers(make_checker: Callable[..., GrammarChecker]) -> None:
    """Reasons, special tokens and what is known are those of compiling in place."""
    tokens = ByteTokens(["<think>", "[X]"])
    checker, compiler = make_checker(tokens), GrammarCompiler(tokens)
    assert checker.special_tokens == compiler.special_tokens
    checker.check(GOOD)
    assert checker.knows(GOOD)
    for wrong in (f"{HEAD}x", of_schema({"not": {}}), f"{HEAD}start", f'{HEAD}"\udc80"'):
        with pytest.raises(InvalidRequestError) as there:
            checker.check(wrong, param="the_field")
        with pytest.raises(InvalidRequestError) as here:
            compiler.check(wrong, param="the_field")
        assert (there.value.message, there.value.param) == (here.value.message, "the_field")
        assert not checker.knows(wrong)


def test_a_grammar_that_breaks_the_process_is_refused(
    make_checker: Callable[..., GrammarChecker],
) -> None:
    """Overrun stacks and endless work are reasons like others, and the next grammar is checked."""
    checker = make_checker(timeout_s=1.0)
    for wrong, reason in ((chain(5000), "too complex"), (ENDLESS, "takes over 1 s")):
        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match=reason):
            checker.check(wrong)
        assert time.monotonic() - started < 15
        checker.check(f"{GOOD}\n# behind {reason}")


def test_a_killed_process_is_started_anew(make_checker: Callable[..., GrammarChecker]) -> None:
    """Between two checks its death is not noticed by anybody."""
    checker = make_checker()
    checker.check(GOOD)
    process = checker._process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    checker.check(f'{HEAD}"no"')


def test_a_closed_checker_checks_nothing(make_checker: Callable[..., GrammarChecker]) -> None:
    """Closing ends the process, and none is started after it."""
    checker = make_checker()
    checker.check(GOOD)
    process = checker._process
    assert process is not None
    checker.close()
    assert process.poll() is not None
    with pytest.raises(VllmMlxError, match="closing"):
        checker.check(f'{HEAD}"no"')


def test_the_process_ends_with_its_parent() -> None:
    """Even amid a grammar without end, a killed server leaves nothing behind."""
    code = (
        "import sys; sys.path.insert(0, 'tests')\n"
        "from support.grammar_tokens import ByteTokens\n"
        "from vllm_mlx.engine.host.grammar_checker import GrammarChecker\n"
        "checker = GrammarChecker(ByteTokens(), timeout_s=60)\n"
        "checker.special_tokens\n"
        "print(checker._process.pid, flush=True)\n"
        f"checker.check({ENDLESS!r})\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    deadline = time.monotonic() + 20
    while child.cpu_times().user < 0.5 and time.monotonic() < deadline:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    with contextlib.suppress(psutil.NoSuchProcess):
        child.wait(10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
