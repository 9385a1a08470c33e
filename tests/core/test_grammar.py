"""Compile grammars: reasons, special tokens, copies, vocabularies of each kind, bounds."""

from __future__ import annotations

import json
import threading

import pytest
from llguidance import LLMatcher
from support.grammar_tokens import ByteTokens

from vllm_mlx.engine.core.grammar import MAX_GRAMMAR_LENGTH, GrammarCompiler
from vllm_mlx.engine.errors import InvalidRequestError

HEAD = "%llguidance {}\nstart: "


def json_grammar(schema: object) -> str:
    """Return a grammar of JSON that follows a schema."""
    return f"{HEAD}%json {json.dumps(schema)}"


def takes(matcher: LLMatcher, tokens: list[int]) -> bool:
    """Say whether tokens are a whole answer."""
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def test_a_grammar_is_handed_out_at_its_beginning_each_time() -> None:
    """A second row's matcher knows nothing of what the first has read."""
    tokens = ByteTokens()
    compiler = GrammarCompiler(tokens)
    for _ in range(2):
        matcher = compiler.compile(f'{HEAD}"yes" | "no"')
        assert takes(matcher, tokens.encode("yes"))
        assert matcher.is_stopped()


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("start: (", "Expected token"),
        (f"{HEAD}/[/", "unclosed character class"),
        (f"{HEAD}unknown", 'unknown name: "unknown"'),
        (f"{HEAD}start", "nothing can follow"),
        (f"{HEAD}%json false", "Unsatisfiable schema"),
        (json_grammar({"type": "string", "pattern": "^(?=a)b$"}), "look-ahead"),
        (json_grammar({"type": "string", "minLength": 3, "maxLength": 2}), "is greater than"),
        (json_grammar({"$ref": "https://example.org/x.json"}), "is not present in a registry"),
        (json_grammar({"$ref": "#"}), "nothing can follow"),
        (json_grammar({"oneOf": [{}, {"type": "null"}]}), "hold at once; use anyOf"),
        (f'{HEAD}("a" "b"){{1000000}}', "Too many items"),
        (HEAD + "(" * 5000 + '"a"' + ")" * 5000, "too deeply nested"),
        (f"{HEAD}%json " + '{"items":' * 5000 + "{}" + "}" * 5000, "recursion limit"),
        (f'{HEAD}"\udc80"', "lone surrogate"),
        (f'{HEAD}"{"a" * MAX_GRAMMAR_LENGTH}"', "at most"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_refused(grammar: str, reason: str) -> None:
    """The reason is llguidance's own in one line, without the grammar, and the field is named."""
    with pytest.raises(InvalidRequestError, match=reason) as refused:
        GrammarCompiler(ByteTokens()).check(grammar, param="response_format")
    assert refused.value.param == "response_format"
    assert "\n" not in refused.value.message
    assert len(refused.value.message) < 600
    assert "%llguidance" not in refused.value.message


def test_special_tokens_are_those_that_no_text_matches() -> None:
    """A special token is told by its id; a grammar's text does not let it through."""
    tokens = ByteTokens(["<think>", "[STOP]"])
    compiler = GrammarCompiler(tokens)
    assert compiler.special_tokens == {"<think>": 257, "[STOP]": 258}
    assert not takes(compiler.compile(f'{HEAD}"<think>"'), [257])
    assert takes(compiler.compile(f"{HEAD}<[257]>"), [257])


def test_the_vocabulary_may_be_wider_than_the_tokenizer() -> None:
    """Ids that only pad the logits are never allowed."""
    matcher = GrammarCompiler(ByteTokens(), vocab_size=1000).compile(f"{HEAD}/(?s:.*)/")
    mask = matcher.compute_bitmask()
    allowed = [token for token in range(1000) if mask[token // 8] >> token % 8 & 1]
    assert max(allowed) == 256
    assert len(mask) * 8 >= 1000


def test_threads_share_one_compiler() -> None:
    """Rows of many threads each read their own answer from one compiled grammar."""
    tokens = ByteTokens()
    compiler = GrammarCompiler(tokens)
    grammar = json_grammar({"enum": [f"value {number}" for number in range(50)]})
    right: list[int] = []

    def read(number: int) -> None:
        if takes(compiler.compile(grammar), tokens.encode(f'"value {number}"')):
            right.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(right) == list(range(16))
