"""Write a model of a well-known shape with random weights: as fast as the real one, and as large.

Run as `python docs/benchmarks/random_model.py FOLDER`, for programs that read models from folders;
`vllm-mlx serve --load-format dummy --shape NAME` has the same weights without one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import click
import mlx.core as mx

from vllm_mlx.engine.models.dummy_folder import write_dummy_folder
from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES
from vllm_mlx.engine.models.dummy_weights import dummy_weights


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.option(
    "--shape",
    default="llama-3.2-3b-4bit",
    show_default=True,
    type=click.Choice(list(DUMMY_SHAPES)),
)
@click.option(
    "--tokenizer",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A model's folder, of which the tokenizer is taken; default: a synthetic one.",
)
def main(folder: Path, shape: str, tokenizer: Path | None) -> None:
    """Write weights, configuration and tokenizer into FOLDER, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    write_dummy_folder(folder, shape=DUMMY_SHAPES[shape])
    if tokenizer is not None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tokenizer / name, folder / name)
    weights = dummy_weights(DUMMY_SHAPES[shape])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    click.echo(folder)


if __name__ == "__main__":
    main()
