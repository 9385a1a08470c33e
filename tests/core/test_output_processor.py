"""Log-probabilities go with the text of their tokens, however that is held back, cut and sent."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import make_sequence

from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.output_processor import OutputProcessor
from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.engine.core.sequence import Finish, Sequence

EOS = 999


class Spelling:
    """Decode by a table; token 0 only begins a character, which the next token completes."""

    def __init__(self, texts: dict[int, str]) -> None:
        self._texts = texts

    def add(self, token_id: int) -> str:
        """Return the token's text."""
        return self._texts[token_id]

    def flush(self) -> str:
        """Hold nothing back."""
        return ""


TEXTS = {0: "", 1: "a", 2: "b", 3: "ab", 4: "ba", 5: "abc", 6: "c", 7: " aab"}


def run(
    tokens: list[int], *, stop: tuple[str, ...] = (), interval: int = 1, **sampling: Any
) -> tuple[Sequence, list[RowOutput]]:
    """Feed the tokens to one row until it ends; return it and every output."""
    sequence = make_sequence(
        "row", stop=stop, logprobs=1, max_tokens=len(tokens), ignore_eos=False, **sampling
    )
    processor = OutputProcessor(lambda: Spelling(TEXTS))
    processor.open(sequence)
    outputs = []
    for index, token in enumerate(tokens):
        sequence.append(token, frozenset({EOS}))
        processor.take(sequence, TokenLogprob(token, -float(index), ((token, -float(index)),)))
        if len(sequence.output) % interval == 0 or sequence.is_finished:
            output = processor.report(sequence)
            outputs += [output] if output is not None else []
        if sequence.is_finished:
            break
    return sequence, outputs


def text_and_entries(outputs: list[RowOutput]) -> tuple[str, list[TokenLogprob]]:
    """Join what was sent."""
    parts = Logprobs.joined([o.logprobs for o in outputs if o.logprobs is not None])
    return "".join(o.text for o in outputs), parts.unpack() if parts is not None else []


@given(
    tokens=st.lists(st.sampled_from([*TEXTS, EOS]), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["abc", "bb", "a", "cab", "zz", "b a"]), max_size=3),
    interval=st.integers(1, 5),
)
def test_every_token_has_one_entry_up_to_where_the_text_is_cut(
    tokens: list[int], stop: list[str], interval: int
) -> None:
    """Offsets are where each token's text begins, and how it was sent does not matter."""
    sequence, outputs = run(tokens, stop=tuple(stop), interval=interval)
    text, entries = text_and_entries(outputs)
    starts, length = [], 0
    for token in sequence.output:
        starts.append(length)
        length += len(TEXTS.get(token, ""))
    assert sequence.finish is not None
    is_cut = isinstance(sequence.finish.stop_reason, str)
    wanted = [
        (index, token, start)
        for index, (token, start) in enumerate(zip(sequence.output, starts, strict=True))
        if not is_cut or start < len(text) or (not TEXTS[token] and start == len(text))
    ]
    assert [(-int(e.logprob), e.token_id, e.offset) for e in entries] == wanted
    if not is_cut:
        assert len(entries) == len(sequence.output)


@given(
    tokens=st.lists(st.sampled_from([*TEXTS, EOS]), min_size=1, max_size=12),
    stop=st.lists(st.sampled_from(["abc", "bb", "cab"]), min_size=1, max_size=3),
)
def test_an_entry_is_never_sent_before_its_text(tokens: list[int], stop: list[str]) -> None:
    """At any time, all of an entry's text is among what was sent, but at a cut."""
    _, outputs = run(tokens, stop=tuple(stop))
    for count in range(1, len(outputs)):
        text, entries = text_and_entries(outputs[:count])
        for entry in entries:
            assert entry.offset + len(TEXTS.get(entry.token_id, "")) <= len(text)


def test_a_token_that_is_cut_in_two_keeps_its_entry() -> None:
    """What is left of its text is in the answer; tokens after the cut are not."""
    sequence, outputs = run([6, 7, 2, 6], stop=("abb",))
    text, entries = text_and_entries(outputs)
    assert (text, sequence.finish.stop_reason if sequence.finish else None) == ("c a", "abb")
    assert [(entry.token_id, entry.offset) for entry in entries] == [(6, 0), (7, 1)]


def test_the_token_that_ends_a_sequence_has_an_entry() -> None:
    """It was generated and counted, though it has no text."""
    _, outputs = run([1, EOS])
    assert [(e.token_id, e.offset) for e in text_and_entries(outputs)[1]] == [(1, 0), (EOS, 1)]


def test_held_text_is_released_with_its_entries_at_the_end() -> None:
    """A stop string that was begun and not completed is text after all."""
    _, outputs = run([6, 3], stop=("abc",))
    assert text_and_entries(outputs[:-1]) == ("c", [TokenLogprob(6, 0.0, ((6, 0.0),))])
    assert [entry.token_id for entry in text_and_entries(outputs)[1]] == [6, 3]


def test_prompt_log_probabilities_go_out_once_and_whole() -> None:
    """They come with the first output; a prompt that was begun again is not sent twice."""
    sequence = make_sequence("row", 4, prompt_logprobs=0, max_tokens=2)
    processor = OutputProcessor(lambda: Spelling(TEXTS))
    processor.open(sequence)

    def part(*tokens: int) -> Logprobs:
        return Logprobs.pack([TokenLogprob(token, -1.0) for token in tokens])

    processor.add_prompt_logprobs(sequence, 0, part(2))
    sequence.restart()
    processor.add_prompt_logprobs(sequence, 0, part(2, 3))
    processor.add_prompt_logprobs(sequence, 2, part(4))
    sequence.num_prompt_scored = 3
    outputs = []
    for token in (1, 2):
        sequence.append(token, frozenset())
        processor.take(sequence)
        output = processor.report(sequence)
        assert output is not None
        outputs.append(output.prompt_logprobs)
    assert outputs[0] is not None
    assert [entry.token_id for entry in outputs[0].unpack()] == [2, 3, 4]
    assert outputs[1] is None


@pytest.mark.parametrize("is_complete", [False, True])
def test_an_aborted_prompt_has_all_its_log_probabilities_or_none(is_complete: bool) -> None:
    """A list that ends early could not be told from a whole one."""
    sequence = make_sequence("row", 4, prompt_logprobs=0)
    processor = OutputProcessor(lambda: Spelling(TEXTS))
    processor.open(sequence)
    processor.add_prompt_logprobs(sequence, 0, Logprobs.pack([TokenLogprob(2, -1.0)]))
    sequence.num_prompt_scored = 3 if is_complete else 1
    sequence.finish = Finish("abort")
    output = processor.report(sequence)
    assert output is not None
    assert (output.prompt_logprobs is not None) == is_complete


def test_shown_tokens_are_text_like_any_other() -> None:
    """Special tokens that parsers need can be stopped at, and their entries lie where they do."""
    shown = ((8, "<call>"), (9, "</call>"))
    _, outputs = run([1, 8, 2, 9, 6], shown_tokens=shown)
    text, entries = text_and_entries(outputs)
    assert text == "a<call>b</call>c"
    assert [entry.offset for entry in entries] == [0, 1, 7, 8, 15]
    sequence, outputs = run([1, 8, 2, 9, 6], shown_tokens=shown, stop=("b</c",))
    assert text_and_entries(outputs)[0] == "a<call>"
    assert sequence.finish == Finish("stop", "b</c")


def test_what_is_held_of_a_character_comes_before_a_shown_token() -> None:
    """No later token can complete it."""

    class Held(Spelling):
        def flush(self) -> str:
            """Give up the character that was begun."""
            return "?"

    sequence = make_sequence("row", max_tokens=9, shown_tokens=((8, "<call>"),))
    processor = OutputProcessor(lambda: Held(TEXTS))
    processor.open(sequence)
    for token in (0, 8):
        sequence.append(token, frozenset({EOS}))
        processor.take(sequence)
    output = processor.report(sequence)
    assert output is not None
    assert output.text == "?<call>"
