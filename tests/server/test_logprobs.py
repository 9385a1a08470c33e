"""Log-probabilities in OpenAI's shapes, echoed prompts and several choices, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from vllm_mlx.engine.core.logprobs import Logprobs, TokenLogprob
from vllm_mlx.engine.core.outputs import unpack_tokens

if TYPE_CHECKING:
    from tests.server.conftest import Served, ServerFactory

ReadEvents = Callable[[bytes], list[Any]]

#: The tokens of "H", of two halves of an emoji, and of the end; ids are characters, 1 to 4 bytes.
H = TokenLogprob(ord("H"), -0.25, ((ord("H"), -0.25), (ord("J"), -2.0)))
LEFT = TokenLogprob(1, -1.0, ((ord("x"), -0.5), (1, -1.0)), 1)
RIGHT = TokenLogprob(2, float("-inf"), ((ord("x"), -0.5), (ord("y"), -1.5)), 1)
#: The prompt's "a" and "b", after its beginning.
PROMPT = Logprobs.pack(
    [
        TokenLogprob(97, -3.0, ((98, -0.5), (99, -1.0))),
        TokenLogprob(98, -0.5, ((98, -0.5), (99, -2.5))),
    ]
)


async def drive(server: Served, num_rows: int = 1, prompt: Logprobs | None = None) -> None:
    """Answer each row with an H, and an emoji in two pieces."""
    while len(server.engine.requests) < num_rows:
        await server.engine.sleep()
    for request in server.engine.requests:
        name = request.request_id
        server.engine.put(name, "H", logprobs=Logprobs.pack([H]), prompt_logprobs=prompt)
        await server.engine.sleep()
        server.engine.put(name, "", 2, logprobs=Logprobs.pack([LEFT]))
        await server.engine.sleep()
        server.engine.put(name, "\N{GRINNING FACE}", 3, logprobs=Logprobs.pack([RIGHT]))
        server.engine.finish(name)


@pytest.fixture
async def held(make_server: ServerFactory) -> Served:
    """Return a server whose engine waits for the test."""
    server: Served = await make_server()
    server.engine.is_held = True
    return server


CHAT_ENTRIES = [
    {
        "token": "H",
        "logprob": -0.25,
        "bytes": [72],
        "top_logprobs": [
            {"token": "H", "logprob": -0.25, "bytes": [72]},
            {"token": "J", "logprob": -2.0, "bytes": [74]},
        ],
    },
    {
        "token": "\N{REPLACEMENT CHARACTER}",
        "logprob": -1.0,
        "bytes": [0xF0],
        "top_logprobs": [
            {"token": "x", "logprob": -0.5, "bytes": [120]},
            {"token": "\N{REPLACEMENT CHARACTER}", "logprob": -1.0, "bytes": [0xF0]},
        ],
    },
    {
        "token": "\N{REPLACEMENT CHARACTER}",
        "logprob": -9999.0,
        "bytes": [0x9F],
        "top_logprobs": [
            {"token": "x", "logprob": -0.5, "bytes": [120]},
            {"token": "y", "logprob": -1.5, "bytes": [121]},
        ],
    },
]


async def test_a_chat_tells_each_token_its_bytes_and_alternatives(held: Served) -> None:
    """The shape is the one that the real client reads, and the probability 0 is a number."""
    async with held.driven_by(drive(held)):
        response = await held.chat(logprobs=True, top_logprobs=2)
    body = await response.get_json()
    ChatCompletion.model_validate(body, strict=True)
    assert body["choices"][0]["logprobs"] == {"content": CHAT_ENTRIES, "refusal": None}
    assert held.engine.requests[0].sampling.logprobs == 2


async def test_a_streamed_chat_has_the_same_entries_with_their_text(
    held: Served, read_events: ReadEvents
) -> None:
    """Each entry comes once, with the chunk that its text is in or, if it has none, the next."""
    async with held.driven_by(drive(held)):
        response = await held.chat(logprobs=True, top_logprobs=2, stream=True)
        *chunks, done = read_events(await response.get_data())
    assert done == "[DONE]"
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    choices = [chunk["choices"][0] for chunk in chunks]
    entries = [e for choice in choices if choice["logprobs"] for e in choice["logprobs"]["content"]]
    assert entries == CHAT_ENTRIES
    assert [len((c["logprobs"] or {"content": []})["content"]) for c in choices if c["delta"]] == (
        [0, 1, 2]
    )
    assert choices[-1]["logprobs"] is None


async def test_nothing_is_said_of_log_probabilities_unasked(held: Served) -> None:
    """The field is null in every chunk and body."""
    async with held.driven_by(drive(held)):
        response = await held.chat()
    assert (await response.get_json())["choices"][0]["logprobs"] is None


async def test_a_completion_has_four_lists(held: Served) -> None:
    """A token is always among its alternatives; part of a character is named by its bytes."""
    async with held.driven_by(drive(held)):
        response = await held.post("/v1/completions", prompt="ab", logprobs=2)
    body = await response.get_json()
    Completion.model_validate(body, strict=True)
    assert body["choices"][0]["text"] == "H\N{GRINNING FACE}"
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["H", "bytes:\\xf0", "bytes:\\x9f"],
        "token_logprobs": [-0.25, -1.0, -9999.0],
        "top_logprobs": [
            {"H": -0.25, "J": -2.0},
            {"x": -0.5, "bytes:\\xf0": -1.0},
            {"x": -0.5, "y": -1.5, "bytes:\\x9f": -9999.0},
        ],
        "text_offset": [0, 1, 1],
    }


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "names", "offsets"),
    [("ab", ["bytes:\\xf0"], [0, 0, 1]), ([5, 97, 98], ["\x05"], [0, 1, 2])],
)
async def test_an_echo_repeats_the_prompt_and_scores_it(
    held: Served,
    read_events: ReadEvents,
    prompt: Any,
    names: list[str],
    offsets: list[int],
    stream: bool,
) -> None:
    """The prompt comes first, its first token without a value, and offsets go on behind it."""
    async with held.driven_by(drive(held, prompt=PROMPT)):
        response = await held.post(
            "/v1/completions", prompt=prompt, logprobs=2, echo=True, stream=stream
        )
        data = await response.get_data()
    text = "ab" if prompt == "ab" else "\x05ab"
    if stream:
        *chunks, _ = read_events(data)
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        choices = (await response.get_json())["choices"]
    assert "".join(choice["text"] for choice in choices) == f"{text}H\N{GRINNING FACE}"
    columns: dict[str, list[Any]] = {}
    for choice in choices:
        for name, values in (choice["logprobs"] or {}).items():
            columns.setdefault(name, []).extend(values)
    shift = len(text)
    assert columns["tokens"] == [*names, "a", "b", "H", "bytes:\\xf0", "bytes:\\x9f"]
    assert columns["token_logprobs"] == [None, -3.0, -0.5, -0.25, -1.0, -9999.0]
    assert columns["top_logprobs"][:3] == [
        None,
        {"b": -0.5, "c": -1.0, "a": -3.0},
        {"b": -0.5, "c": -2.5},
    ]
    assert columns["text_offset"] == [*offsets, shift, shift + 1, shift + 1]
    assert held.engine.requests[0].sampling.prompt_logprobs == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_alone_repeats_the_prompt_before_each_choice(
    served: Served, read_events: ReadEvents, stream: bool
) -> None:
    """Without log-probabilities nothing is scored, and the prompt comes once for each choice."""
    response = await served.post(
        "/v1/completions", prompt=["ab", "c"], echo=True, n=2, max_tokens=5, stream=stream
    )
    if stream:
        *chunks, _ = read_events(await response.get_data())
        choices = [chunk["choices"][0] for chunk in chunks]
    else:
        choices = (await response.get_json())["choices"]
    texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in range(4)]
    assert texts == ["abHello world"] * 2 + ["cHello world"] * 2
    assert all(choice["logprobs"] is None for choice in choices)
    assert all(r.sampling.prompt_logprobs is None for r in served.engine.requests)


async def test_nothing_may_be_asked_for_but_the_prompt(make_server: ServerFactory) -> None:
    """With `max_tokens` 0 the answer is the prompt."""
    server = await make_server()
    server.engine.texts = []
    response = await server.post("/v1/completions", prompt="ab", echo=True, max_tokens=0)
    body = await response.get_json()
    assert body["choices"][0]["text"] == "ab"
    assert server.engine.requests[0].sampling.max_tokens == 0


async def test_a_cancelled_prompt_has_a_short_list(held: Served) -> None:
    """A row that ends before its prompt is scored still answers in the right shape."""

    async def cancel() -> None:
        while not held.engine.requests:
            await held.engine.sleep()
        held.runtime.generations.cancel(held.engine.requests[0].request_id)

    async with held.driven_by(cancel()):
        response = await held.post("/v1/completions", prompt="ab", logprobs=1, echo=True)
    choice = (await response.get_json())["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("ab", "abort")
    assert choice["logprobs"]["token_logprobs"] == [None]


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_of_a_chat_are_rows_with_seeds_of_their_own(
    served: Served, read_events: ReadEvents, stream: bool
) -> None:
    """Each begins with its role and ends once; the prompt is counted once."""
    options = {"stream_options": {"include_usage": True}} if stream else {}
    response = await served.chat("hey", n=3, seed=11, stream=stream, **options)
    if stream:
        *chunks, last, _ = read_events(await response.get_data())
        usage = last["usage"]
        deltas = [chunk["choices"][0] for chunk in chunks]
        texts = [
            "".join(d["delta"].get("content", "") for d in deltas if d["index"] == index)
            for index in range(3)
        ]
        assert [d["index"] for d in deltas if "role" in d["delta"]] == [0, 1, 2]
        assert sorted(d["index"] for d in deltas if d["finish_reason"]) == [0, 1, 2]
    else:
        body = await response.get_json()
        usage = body["usage"]
        texts = [choice["message"]["content"] for choice in body["choices"]]
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert texts == ["Hello world"] * 3
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 6)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    requests = served.engine.requests
    assert [r.request_id.rpartition("-")[2] for r in requests] == ["0", "1", "2"]
    assert len({r.sampling.seed for r in requests}) == 3
    assert requests[0].sampling.seed == 11
    assert len({tuple(unpack_tokens(r.prompt)) for r in requests}) == 1


async def test_choices_of_several_prompts_come_prompt_by_prompt(served: Served) -> None:
    """Index 3 of two prompts with two choices each is the second choice of the second prompt."""
    response = await served.post("/v1/completions", prompt=["a", "bc"], n=2, best_of=2)
    body = await response.get_json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert [unpack_tokens(r.prompt) for r in served.engine.requests] == (
        [[1, 97], [1, 97], [1, 98, 99], [1, 98, 99]]
    )
    assert body["usage"]["prompt_tokens"] == 2 + 3
    assert body["usage"]["completion_tokens"] == 8


async def test_unknown_fields_are_refused_when_strict(make_server: ServerFactory) -> None:
    """With `strict_fields` a field that no schema knows is a 400 that names it."""
    server = await make_server(strict_fields=True)
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x", "mood": 1}]}),
        ("/v1/completions", {"prompt": "x", "mood": 1}),
    ):
        response = await server.post(path, **body)
        assert response.status_code == 400
        error = (await response.get_json())["error"]
        assert error["param"] in ("mood", "messages[].mood")
        assert "mood" in error["message"]
    assert server.engine.requests == []


async def test_more_choices_than_would_ever_fit_are_a_400(make_server: ServerFactory) -> None:
    """Rows and queue together bound the choices of one request, which names its field."""
    server = await make_server(max_num_seqs=1, max_queue=1)
    response = await server.chat(n=3)
    assert response.status_code == 400
    assert (await response.get_json())["error"]["param"] == "n"
