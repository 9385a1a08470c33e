"""lm-eval's scores of a served model are those of mlx-lm on the same weights.

Needs lm-eval, which is no dependency of the project:
`uv run --with 'lm-eval[api]' pytest -m slow tests/server/test_lm_eval.py --log-cli-level INFO`
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.utils import load_model
from support.server_process import ServerProcess

from vllm_mlx.engine.text.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("lm_eval") is None,
        reason="lm-eval is not installed: uv run --with 'lm-eval[api]' pytest -m slow ...",
    ),
]

CHOICES = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "Oslo"], "label": 0},
    {"question": "Two and two make", "choices": ["seven", "four", "a hundred"], "label": 1},
    {"question": "Fish live in", "choices": ["trees", "the desert", "water"], "label": 2},
    {"question": "At night the sky is", "choices": ["dark", "made of cheese", "green"], "label": 0},
    {"question": "Ice is frozen", "choices": ["sand", "water", "wood"], "label": 1},
    {"question": "Über Köln scheint die", "choices": ["Sonne", "Gabel", "数学"], "label": 0},
]
TEXTS = [
    {"text": "The quick brown fox jumps over the lazy dog. It was a bright day in April."},
    {"text": "Water boils at one hundred degrees. " * 12},
]

TASKS = {
    "local_choice": """
task: local_choice
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "local_text": """
task: local_text
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}]
""",
}

#: Largest difference of a log-probability, for each token.
TOLERANCE = 1e-3


def write_tasks(folder: Path) -> None:
    """Write the tasks and their documents."""
    for name, documents in (("local_choice", CHOICES), ("local_text", TEXTS)):
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        (folder / f"{name}.yaml").write_text(TASKS[name] % json.dumps(str(data)))


def run_lm_eval(folder: Path, url: str, tokenizer: Path, prefix: int) -> dict[str, Any]:
    """Run lm-eval over the tasks and return its results and samples."""
    arguments = {
        "model": "default",
        "base_url": f"{url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(tokenizer),
        "custom_prefix_token_id": prefix,
        "num_concurrent": 2,
        "max_retries": 1,
    }
    command = [
        *(sys.executable, "-m", "lm_eval", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", ",".join(TASKS), "--include_path", str(folder)),
        *("--batch_size", "2", "--log_samples", "--output_path", str(folder / "out")),
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    environment = {**os.environ, **offline, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found: dict[str, Any] = {"samples": {}}
    for path in (folder / "out").rglob("*"):
        if path.name.startswith("results"):
            found["results"] = json.loads(path.read_text())["results"]
        elif path.name.startswith("samples"):
            task = next(name for name in TASKS if name in path.name)
            found["samples"][task] = [json.loads(line) for line in path.read_text().splitlines()]
    return found


class Scorer:
    """Score continuations with mlx-lm's model, one plain forward each."""

    def __init__(self, folder: Path) -> None:
        self._model, _ = load_model(folder, lazy=True)
        self._model.set_dtype(mx.float32)
        self.tokenizer: Tokenizer = load_tokenizer(folder)

    def score(self, context: list[int], continuation: list[int]) -> tuple[float, bool, float]:
        """Return the sum of log-probabilities, whether each was the best, and the closest call."""
        tokens = mx.array(context + continuation)[None]
        logits = self._model(tokens)[0, len(context) - 1 : -1].astype(mx.float32)
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        picked = mx.take_along_axis(scores, mx.array(continuation)[:, None], axis=-1)[:, 0]
        gaps = scores.max(axis=-1) - picked
        closest = mx.where(gaps > 0, gaps, mx.inf).min()
        return float(picked.sum().item()), not bool((gaps > 0).any().item()), float(closest.item())


def pair_of(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Split the tokens of both together where lm-eval does; spaces go with what follows."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation
    whole = tokenizer.encode(context + continuation, add_special_tokens=False)
    start = len(tokenizer.encode(context, add_special_tokens=False))
    return whole[:start], whole[start:]


def test_lm_eval_agrees_with_mlx_lm(tmp_path: Path, demo_model_path: Path) -> None:
    """Every log-likelihood, every "is greedy" and so every score is the library's own."""
    write_tasks(tmp_path)
    scorer = Scorer(demo_model_path)
    (prefix,) = scorer.tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    server_folder = tmp_path / "server"
    server_folder.mkdir()
    with ServerProcess("demo", server_folder) as process:
        found = run_lm_eval(tmp_path, process.wait_ready().url, demo_model_path, prefix)
    worst, num_compared, num_right = 0.0, 0, 0
    for sample in found["samples"]["local_choice"]:
        sums = []
        for argument, (response,) in zip(
            sample["arguments"].values(), sample["resps"], strict=True
        ):
            context, continuation = argument["arg_0"], argument["arg_1"]
            pair = pair_of(scorer.tokenizer, context, continuation)
            total, is_greedy, closest = scorer.score(*pair)
            value, said_greedy = float(response[0]), str(response[1]) == "True"
            worst = max(worst, abs(value - total) / len(pair[1]))
            assert said_greedy == is_greedy or closest < TOLERANCE
            sums.append(total)
            num_compared += 1
        num_right += sums.index(max(sums)) == int(sample["target"])
    for sample, document in zip(found["samples"]["local_text"], TEXTS, strict=True):
        tokens = scorer.tokenizer.encode(document["text"], add_special_tokens=False)
        total, _, _ = scorer.score([prefix], tokens)
        worst = max(worst, abs(float(sample["resps"][0][0]) - total) / len(tokens))
        num_compared += 1
    assert num_compared == sum(len(document["choices"]) for document in CHOICES) + len(TEXTS)
    logger.info("%s", json.dumps(found["results"], indent=1))
    logger.info("%d log-likelihoods; largest difference per token %.2e", num_compared, worst)
    assert worst < TOLERANCE
    assert found["results"]["local_choice"]["acc,none"] == num_right / len(CHOICES)
