"""Write a model of a well-known shape with random weights: as fast as the real one, and as large.

Run as `python docs/benchmarks/random_model.py FOLDER --tokenizer FOLDER`; any tokenizer will do.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

#: Llama-3.2-3B, as its publishers describe it.
LLAMA_3_2_3B = {
    "model_type": "llama",
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "intermediate_size": 8192,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
QUANTIZATION = {"group_size": 64, "bits": 4}


def write_model(folder: Path, tokenizer: Path) -> None:
    """Write weights, configuration and tokenizer into `folder`, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, folder / name)
    base = json.loads((tokenizer / "config.json").read_text())
    config: dict[str, Any] = {**LLAMA_3_2_3B, "torch_dtype": "bfloat16"}
    config |= {name: base.get(name) for name in ("bos_token_id", "eos_token_id")}
    mx.random.seed(0)
    model = llama.Model(llama.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, **QUANTIZATION)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config["quantization"] = QUANTIZATION
    (folder / "config.json").write_text(json.dumps(config, indent=2))


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--tokenizer",
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A model's folder, of which the tokenizer is taken.",
)
def main(folder: Path, tokenizer: Path) -> None:
    """Write a random 4-bit model of Llama-3.2-3B's shape into FOLDER."""
    write_model(folder, tokenizer)
    click.echo(folder)


if __name__ == "__main__":
    main()
