"""Tokenizers load from a folder, render chats and may be used from several threads."""

from __future__ import annotations

import json
import random
import shutil
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from vllm_mlx.engine.errors import InvalidRequestError, ModelLoadError, ModelNotFoundError
from vllm_mlx.engine.text.tokenizer import Tokenizer, load_tokenizer, read_eos_token_ids

CHAT = [{"role": "user", "content": "Hello"}]


def test_eos_ids_are_all_that_the_folder_names(chat_tokenizer: Tokenizer) -> None:
    """Ends of sequence come from the tokenizer and from both configs, nested ones included."""
    end = chat_tokenizer.encode("<|end|>", add_special_tokens=False)
    assert chat_tokenizer.eos_token_ids == {*end, 7, 8, 9, 10}


def test_eos_ids_of_a_folder_without_configs(tmp_path: Path) -> None:
    """Missing files and null ids name no end of sequence."""
    assert read_eos_token_ids(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": null, "text_config": null}')
    assert read_eos_token_ids(tmp_path) == frozenset()


def test_a_damaged_config_is_a_load_error(tmp_path: Path) -> None:
    """A config that is not JSON names its file."""
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        read_eos_token_ids(tmp_path)


def test_encoding_adds_one_bos_only(chat_tokenizer: Tokenizer) -> None:
    """A prompt that spells out the beginning of sequence does not get a second one."""
    plain = chat_tokenizer.encode("Hello")
    bos = chat_tokenizer.encode("<|bos|>", add_special_tokens=False)
    assert plain[:1] == bos
    assert chat_tokenizer.encode("<|bos|>Hello") == plain
    assert chat_tokenizer.encode("Hello", add_special_tokens=False) == plain[1:]
    assert chat_tokenizer.encode("<|bos|><|bos|>Hello")[:2] == bos * 2


def test_a_chat_is_encoded_as_its_template_wrote_it(chat_tokenizer: Tokenizer) -> None:
    """The template writes the beginning of sequence itself, and encoding adds none."""
    text = "<|bos|><|start|>user\nHello<|end|>\n<|start|>assistant\n"
    assert chat_tokenizer.render_chat(CHAT) == text
    token_ids = chat_tokenizer.encode_chat(CHAT)
    assert token_ids == chat_tokenizer.encode(text, add_special_tokens=False)
    assert chat_tokenizer.decode(token_ids, skip_special_tokens=False) == text


def test_limits_in_tokenizer_json_do_not_cut_prompts(chat_tokenizer: Tokenizer) -> None:
    """A truncation that was saved with the tokenizer is taken off."""
    text = "Hello " * 50
    assert len(chat_tokenizer.encode(text)) > 50
    assert chat_tokenizer.decode(chat_tokenizer.encode(text)) == text


def test_tools_and_variables_reach_the_template(chat_tokenizer: Tokenizer) -> None:
    """Tools and further keyword arguments are the template's to use."""
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    text = chat_tokenizer.render_chat(CHAT, tools=tools, add_generation_prompt=False, mood="calm")
    assert text == "<|bos|><|start|>user\nHello<|end|>\ntools:look_up;mood:calm"
    assert "tools:" not in chat_tokenizer.render_chat(CHAT, tools=[])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "bad", "content": "x"}],
        [{"role": {"a": 1}, "content": []}, {"role": "bad"}],
        [],
    ],
)
def test_what_a_template_refuses_is_the_requests_mistake(
    chat_tokenizer: Tokenizer, messages: list[dict[str, Any]]
) -> None:
    """Whatever the template raises names the messages field."""
    with pytest.raises(InvalidRequestError, match="chat template") as raised:
        chat_tokenizer.render_chat(messages)
    assert raised.value.param == "messages"


def test_the_templates_own_words_are_handed_on(chat_tokenizer: Tokenizer) -> None:
    """`raise_exception` in a template tells the client what it said."""
    with pytest.raises(InvalidRequestError, match="unknown role bad"):
        chat_tokenizer.render_chat([{"role": "bad", "content": "x"}])


@pytest.mark.parametrize(
    "name", ["chat_template", "tokenize", "return_tensors", "tokenizer_kwargs"]
)
def test_a_request_cannot_steer_the_library(chat_tokenizer: Tokenizer, name: str) -> None:
    """Template variables never replace the template or the library's own parameters."""
    with pytest.raises(InvalidRequestError, match=name) as raised:
        chat_tokenizer.render_chat(CHAT, **{name: "{{ 1 }}"})
    assert raised.value.param == "chat_template_kwargs"


def test_templates_run_in_a_sandbox(chat_folder: Path, tmp_path: Path) -> None:
    """A template cannot reach Python's internals."""
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(InvalidRequestError, match="unsafe"):
        load_tokenizer(folder).render_chat(CHAT)


def test_a_model_without_template_says_what_to_do(
    tokenizers_by_kind: dict[str, Tokenizer],
) -> None:
    """No template: the error points to plain completions."""
    tokenizer = tokenizers_by_kind["byte_level"]
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequestError, match="/v1/completions") as raised:
        tokenizer.render_chat(CHAT)
    assert raised.value.param == "messages"


def test_named_templates_choose_the_one_for_tools(chat_folder: Path, tmp_path: Path) -> None:
    """Of several named templates, the one for tools serves requests with tools only."""
    folder = tmp_path / "model"
    shutil.copytree(chat_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools[0].function.name }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(CHAT) == "plain"
    assert tokenizer.render_chat(CHAT, tools=[]) == "plain"
    tool = {"type": "function", "function": {"name": "f"}}
    assert tokenizer.render_chat(CHAT, tools=[tool]) == "with f"


@pytest.mark.parametrize("surrogate", ["\ud800", "ok \udc80"])
def test_lone_surrogates_are_the_requests_mistake(
    chat_tokenizer: Tokenizer, surrogate: str
) -> None:
    """JSON may escape half a surrogate pair; that is no text."""
    with pytest.raises(InvalidRequestError, match="surrogate"):
        chat_tokenizer.encode(surrogate)
    with pytest.raises(InvalidRequestError, match="surrogate"):
        chat_tokenizer.encode_chat([{"role": "user", "content": surrogate}])


@pytest.mark.parametrize("token_id", [-1, 2**32, 2**80])
def test_ids_that_no_token_can_have_are_refused(chat_tokenizer: Tokenizer, token_id: int) -> None:
    """Ids out of 32 bits are an error of the request, ids merely unknown are no text."""
    with pytest.raises(InvalidRequestError, match="token ids"):
        chat_tokenizer.decode([token_id])
    assert chat_tokenizer.decode([2**31]) == ""


def test_decode_skips_special_tokens_and_cleans_nothing_up(chat_tokenizer: Tokenizer) -> None:
    """Spaces before punctuation stay, though the folder asks for clean-up."""
    token_ids = chat_tokenizer.encode("it 's , don 't .<|end|><tool_call>")
    assert chat_tokenizer.decode(token_ids) == "it 's , don 't .<tool_call>"
    detokenizer = chat_tokenizer.detokenizer()
    streamed = "".join([*map(detokenizer.add, token_ids), detokenizer.flush()])
    assert streamed == "it 's , don 't .<tool_call>"


def test_vocab_size_counts_added_tokens(chat_tokenizer: Tokenizer) -> None:
    """The largest id lies below the vocabulary size."""
    marker = chat_tokenizer.encode("工具", add_special_tokens=False)
    assert marker == [chat_tokenizer.vocab_size - 1]


def test_copies_work_in_threads(chat_tokenizer: Tokenizer) -> None:
    """Copies encode, decode, render and stream in several threads at once without a panic."""
    text = "Grüße 🙂 the quick brown fox " * 20
    expected = chat_tokenizer.encode(text)
    barrier = threading.Barrier(6)

    def work(tokenizer: Tokenizer) -> None:
        barrier.wait()
        for _ in range(30):
            assert tokenizer.encode(text) == expected
            assert tokenizer.decode(expected) == text
            assert len(tokenizer.encode_chat(CHAT)) > 3
            detokenizer = tokenizer.detokenizer()
            pieces = [*map(detokenizer.add, expected), detokenizer.flush()]
            assert "".join(pieces) == text

    with ThreadPoolExecutor(6) as pool:
        for future in [pool.submit(work, chat_tokenizer.copy()) for _ in range(6)]:
            future.result()


def test_a_tokenizer_written_in_python_is_copied(python_tokenizer: Tokenizer) -> None:
    """Without a Rust backend a copy shares no state, and encodes the same."""
    copied = python_tokenizer.copy()
    assert copied._tokenizer is not python_tokenizer._tokenizer
    assert copied.encode("Grüße 🙂") == python_tokenizer.encode("Grüße 🙂")
    assert copied.decode(copied.encode("Grüße 🙂")) == "Grüße 🙂"


def test_long_texts_leave_other_threads_running(chat_tokenizer: Tokenizer) -> None:
    """Encoding releases the interpreter: another thread goes on ticking meanwhile."""
    text = "the quick brown fox " * 60_000
    ticks = 0
    started, done = threading.Event(), threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1
            started.set()

    thread = threading.Thread(target=tick)
    thread.start()
    started.wait()
    before = ticks
    chat_tokenizer.encode(text)
    during = ticks - before
    done.set()
    thread.join()
    assert during > 10


def test_a_missing_folder_is_not_found(tmp_path: Path) -> None:
    """No folder: the path is in the message."""
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")


@pytest.mark.parametrize("content", [None, "{", '{"version": "1.0"}'])
def test_a_broken_tokenizer_is_a_load_error(tmp_path: Path, content: str | None) -> None:
    """Missing or damaged tokenizer files are one error of the tree, whatever the library raised."""
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "PreTrainedTokenizerFast"}'
        )
    with pytest.raises(ModelLoadError, match="tokenizer"):
        load_tokenizer(tmp_path)


def test_loading_reaches_for_no_network(chat_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder loads where every connection is refused."""

    def refuse(*_: object) -> None:
        raise AssertionError("loading a local tokenizer reached for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert load_tokenizer(chat_folder).has_chat_template


def test_loading_imports_no_mlx_and_prints_nothing(chat_folder: Path) -> None:
    """A process that only tokenizes never loads MLX, and its streams stay clean."""
    code = (
        "import sys; from pathlib import Path\n"
        "from vllm_mlx.engine.text.tokenizer import load_tokenizer\n"
        "assert 'transformers' not in sys.modules\n"
        "load_tokenizer(Path(sys.argv[1])).encode('x')\n"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'mlx', 'mlx_lm', 'torch'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(chat_folder)], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_demo_models_tokenizer(demo_model_path: Path) -> None:
    """The demo model's own tokenizer round-trips, streams, ends turns and renders ChatML."""
    tokenizer = load_tokenizer(demo_model_path)
    text = "Hello,  world! 42 + 1 = 43\n数学 🙂 👩‍👩‍👧"
    token_ids = tokenizer.encode(text)
    assert tokenizer.decode(token_ids) == text
    detokenizer = tokenizer.detokenizer()
    assert "".join([*map(detokenizer.add, token_ids), detokenizer.flush()]) == text
    generator = random.Random(0)
    for _ in range(300):
        noise = [generator.randrange(tokenizer.vocab_size) for _ in range(20)]
        noise[5:10] = [generator.randrange(300) for _ in range(5)]
        detokenizer = tokenizer.detokenizer()
        streamed = "".join([*map(detokenizer.add, noise), detokenizer.flush()])
        assert streamed == tokenizer.decode(noise)
    rendered = tokenizer.render_chat(CHAT)
    assert rendered.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")
    end = tokenizer.encode("<|im_end|>", add_special_tokens=False)
    assert len(end) == 1
    assert end[0] in tokenizer.eos_token_ids
    assert "<|im" not in tokenizer.decode(tokenizer.encode_chat(CHAT))
