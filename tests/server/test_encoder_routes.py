"""Embeddings and reranking over real sockets and processes, with the real `openai` client."""

from __future__ import annotations

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from support.server_process import ServerProcess
from support.tiny_encoders import HIDDEN, QUERY, TEXTS, write_modules, write_tiny_encoder

from tests.encoders import golden

EXPECTED: dict[str, Any] = json.loads(golden.FILE.read_text())["bert/gelu"]

#: Beyond the 40 tokens of the tiny models.
LONG = "the cat sat on the mat " * 8


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return the folders of an encoder and of a reranker."""
    folder = tmp_path_factory.mktemp("encoders")
    encoder = write_tiny_encoder(folder / "encoder")
    write_modules(encoder, {"pooling_mode": "mean"}, prompts={"query": "how do i "})
    return encoder, write_tiny_encoder(folder / "reranker", num_labels=1)


@pytest.fixture(scope="module")
def server(
    folders: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """Return a ready server of both, and of no chat model."""
    options = ("--embedding-model", f"small={folders[0]}", "--rerank-model", str(folders[1]))
    folder = tmp_path_factory.mktemp("live")
    with ServerProcess("--no-chat-model", folder, *options, "--metrics") as process:
        yield process.wait_ready()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    """Return a client that does not retry."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x", max_retries=0) as made:
        yield made


def post(server: ServerProcess, path: str, **body: Any) -> tuple[int, Any]:
    """Post JSON and return the status and the answer."""
    response = server.post(path, body)
    return response.status_code, response.json()


def test_the_openai_client_gets_the_vectors_of_transformers(client: openai.OpenAI) -> None:
    """A list (sent for base64 by itself), a text and floats give the library's own figures."""
    answer = client.embeddings.create(model="small", input=list(TEXTS))
    vectors = np.array([entry.embedding for entry in answer.data])
    assert np.abs(vectors - EXPECTED["mean"]).max() < 2e-5
    assert [entry.index for entry in answer.data] == list(range(len(TEXTS)))
    assert answer.model == "small"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > len(TEXTS)
    one = client.embeddings.create(model="default", input=TEXTS[0], encoding_format="float")
    assert np.abs(np.array(one.data[0].embedding) - EXPECTED["mean"][0]).max() < 2e-5
    cut = client.embeddings.create(model="small", input=TEXTS[0], dimensions=4)
    assert np.isclose(np.linalg.norm(cut.data[0].embedding), 1.0)
    assert len(cut.data[0].embedding) == 4


def test_token_ids_are_texts_of_the_models_own(
    client: openai.OpenAI, folders: tuple[Path, Path]
) -> None:
    """One list of ids and a list of lists are what the same words are."""
    vocabulary = json.loads((folders[0] / "tokenizer.json").read_text())["model"]["vocab"]
    ids = [vocabulary[word] for word in ("[CLS]", "a", "dog", "[SEP]")]
    for given in (ids, [ids]):
        answer = client.embeddings.create(model="small", input=given)
        assert np.abs(np.array(answer.data[0].embedding) - EXPECTED["mean"][1]).max() < 2e-5


def test_base64_is_little_endian_float32(server: ServerProcess) -> None:
    """The bytes are those of the numbers."""
    _, floats = post(server, "/v1/embeddings", input="a dog")
    _, packed = post(server, "/v1/embeddings", input="a dog", encoding_format="base64")
    data = np.frombuffer(base64.b64decode(packed["data"][0]["embedding"]), "<f4")
    assert data.shape == (HIDDEN,)
    assert np.array_equal(data, np.array(floats["data"][0]["embedding"], dtype=np.float32))


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({}, "input", "Field required"),
        ({"input": []}, "input", "not empty"),
        ({"input": 7}, "input", "must be a text"),
        ({"input": ["a", 7]}, "input[1]", "no text"),
        ({"input": [1, "a"]}, "input[1]", "no token id"),
        ({"input": [[]]}, "input[0]", "not empty"),
        ({"input": [[-1]]}, "input[0][0]", "no token id"),
        ({"input": [999]}, "input", "the vocabulary ends at"),
        ({"input": ["x"] * 2049}, "input", "at most 2048"),
        ({"input": "x", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "x", "dimensions": 33}, "dimensions", "vectors have 32"),
        ({"input": "x", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "x", "normalize": False}, "normalize", "not supported"),
        ({"input": "x", "prompt_name": "passage"}, "prompt_name", "'query'"),
        ({"input": "x", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "-1 or at least"),
        ({"input": ["a dog", LONG]}, "input[1]", "--embedding-overflow-policy truncate"),
    ],
)
def test_wrong_bodies_are_named(
    server: ServerProcess, body: dict[str, Any], param: str, said: str
) -> None:
    """Each fault is a 400 of OpenAI's shape that names the field."""
    status, answer = post(server, "/v1/embeddings", **body)
    assert (status, answer["error"]["param"]) == (400, param)
    assert said in answer["error"]["message"]


def test_a_text_is_cut_where_the_request_asks(server: ServerProcess) -> None:
    """What is cut is counted, and gives the vector of the beginning."""
    _, cut = post(server, "/v1/embeddings", input=LONG, truncate_prompt_tokens=-1)
    assert cut["usage"] == {"prompt_tokens": 40, "total_tokens": 40, "truncated_inputs": 1}
    _, short = post(server, "/v1/embeddings", input="a dog ran", truncate_prompt_tokens=4)
    assert np.abs(np.array(short["data"][0]["embedding"]) - EXPECTED["mean"][1]).max() < 2e-5
    _, named = post(server, "/v1/embeddings", input="bake", prompt_name="query")
    _, written = post(server, "/v1/embeddings", input="how do i bake")
    assert named["data"] == written["data"]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_are_ranked_by_the_scores_of_transformers(
    server: ServerProcess, path: str
) -> None:
    """The order and the relevance are those of the library's logits."""
    _, answer = post(server, path, query=QUERY, documents=list(TEXTS), model="default")
    relevance = 1 / (1 + np.exp(-np.array(EXPECTED["scores"])))
    order = np.argsort(-relevance, kind="stable").tolist()
    assert [result["index"] for result in answer["results"]] == order
    for result in answer["results"]:
        assert abs(result["relevance_score"] - relevance[result["index"]]) < 1e-4
        assert result["document"] == {"text": TEXTS[result["index"]]}
    assert answer["usage"]["total_tokens"] > 0


def test_documents_may_be_objects(server: ServerProcess) -> None:
    """Jina's and Cohere's forms: objects, fields of choice, the best few, without documents."""
    documents = [{"text": text, "title": "a dog", "id": n} for n, text in enumerate(TEXTS)]
    _, plain = post(server, "/v1/rerank", query=QUERY, documents=list(TEXTS))
    _, objects = post(server, "/v1/rerank", query=QUERY, documents=documents, top_n=2)
    assert [r["index"] for r in objects["results"]] == [r["index"] for r in plain["results"]][:2]
    assert objects["results"][0]["document"] == documents[objects["results"][0]["index"]]
    _, titles = post(
        server,
        "/v1/rerank",
        query=QUERY,
        documents=documents,
        rank_fields=["title"],
        return_documents=False,
    )
    relevance = [result["relevance_score"] for result in titles["results"]]
    # The same title in each, but for the rounding of its place in the batch.
    assert max(relevance) - min(relevance) < 1e-5
    assert all("document" not in result for result in titles["results"])
    _, cut = post(server, "/v1/rerank", query=QUERY, documents=[LONG], max_tokens_per_doc=2)
    assert cut["usage"]["truncated_documents"] == 1


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["x"]}, "query"),
        ({"query": "x"}, "documents"),
        ({"query": "x", "documents": []}, "documents"),
        ({"query": "x", "documents": [7]}, "documents[0]"),
        ({"query": "x", "documents": ["a", {"title": "b"}]}, "documents[1].text"),
        ({"query": "x", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "x", "documents": ["a"], "max_chunks_per_doc": 3}, "max_chunks_per_doc"),
    ],
)
def test_wrong_rerank_bodies_are_named(
    server: ServerProcess, body: dict[str, Any], param: str
) -> None:
    """Each fault is a 400 that names the field."""
    status, answer = post(server, "/v1/rerank", **body)
    assert (status, answer["error"]["param"]) == (400, param)


def test_models_that_are_not_served_name_the_flag(client: openai.OpenAI) -> None:
    """An unknown name, a chat and speech are 404s that say how to serve them."""
    with pytest.raises(openai.NotFoundError, match="--embedding-model") as unknown:
        client.embeddings.create(model="other", input="x")
    assert unknown.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="--no-chat-model"):
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "x"}])
    kinds = {model.id: model.model_dump()["kind"] for model in client.models.list()}
    assert list(kinds.values()) == ["embedding", "rerank"]


def test_a_killed_engine_comes_back_and_the_other_goes_on(server: ServerProcess) -> None:
    """Reranking answers while the embedding engine is gone; then that answers again."""
    services = {service["kind"]: service for service in server.status()["services"]}
    os.kill(services["embedding"]["pid"], signal.SIGKILL)
    status, _ = post(server, "/v1/rerank", query=QUERY, documents=list(TEXTS))
    assert status == 200
    assert server.get("/health").status_code == 200
    deadline = time.monotonic() + 20
    while post(server, "/v1/embeddings", input="a dog")[0] != 200:
        assert time.monotonic() < deadline, server.log
        time.sleep(0.1)
    page = server.get("/metrics").text
    assert 'vllm_mlx_service_restarts_total{kind="embedding",model="small"} 1.0' in page
    assert (
        f'vllm_mlx_service_restarts_total{{kind="rerank",model="{services["rerank"]["model"]}"'
        in page
    )
    assert 'vllm_mlx_service_tokens_total{kind="embedding",model="small"}' in page
    assert 'vllm_mlx_service_truncated_texts_total{kind="embedding",model="small"}' in page
