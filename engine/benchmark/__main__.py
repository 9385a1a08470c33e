"""Measure this engine beside mlx-lm's own generators, cell by cell.

Run as `python -m vllm_mlx.engine.benchmark`; prints a table, and keeps each cell's result in a file
so that a run that was cut short goes on.
"""

from __future__ import annotations

from pathlib import Path

import click

from vllm_mlx.engine.benchmark.cells import CPU_CELLS, GPU_CELLS, Cell, Results, table
from vllm_mlx.engine.config import DEMO_MODEL, ModelConfig
from vllm_mlx.engine.errors import VllmMlxError
from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES
from vllm_mlx.engine.platform import device_name, installed_backend, require_backend


@click.command()
@click.argument("model", default=DEMO_MODEL)
@click.option(
    "--shape",
    type=click.Choice(list(DUMMY_SHAPES)),
    help="Random weights of this shape instead of MODEL.",
)
@click.option("--dtype", type=click.Choice(["auto", "float32", "float16", "bfloat16"]))
@click.option(
    "--cell",
    "names",
    multiple=True,
    metavar="CELL",
    help="decode:ROWSxTOKENS, join:ROWSxTOKENS, contended:ROWSxTOKENS or prefill:TOKENS; may be "
    "given several times. Default: a list for this kind of device.",
)
@click.option(
    "--results",
    "folder",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of result files, one a cell; what is there is not measured again.",
)
@click.option("--time-limit", type=float, metavar="SECONDS", help="Begin no cell after so long.")
@click.option(
    "--target-itl-ms",
    type=click.FloatRange(min=0, min_open=True),
    help="Of this engine, as of serve; keep its results in a folder of their own.",
)
@click.option("--rounds", default=5, show_default=True, help="Turns that each contender has.")
@click.option("--steps", default=8, show_default=True, help="Steps of a turn.")
def main(
    model: str,
    shape: str | None,
    dtype: str | None,
    names: tuple[str, ...],
    folder: Path | None,
    time_limit: float | None,
    target_itl_ms: float | None,
    rounds: int,
    steps: int,
) -> None:
    """Print rates and times of this engine and of mlx-lm's generators on MODEL, side by side."""
    # Before anything that imports MLX: it takes the BLAS that it finds loaded.
    require_backend()
    from vllm_mlx.engine.benchmark.matrix import measure_cells
    from vllm_mlx.engine.benchmark.measures import Effort

    names = names or (CPU_CELLS if installed_backend() == "cpu" else GPU_CELLS)
    try:
        cells = [Cell.parse(name) for name in names]
        config = ModelConfig(
            model=shape or model,
            load_format="auto" if shape is None else "dummy",
            shape=shape,
            dtype=dtype or "auto",  # type: ignore[arg-type]
        )
    except VllmMlxError as error:
        raise click.UsageError(str(error)) from error
    results = Results(folder, config.model) if folder is not None else None
    effort = Effort(rounds, steps)
    found, missing = measure_cells(
        config,
        cells,
        results,
        effort,
        time_limit_s=time_limit,
        target_itl_s=None if target_itl_ms is None else target_itl_ms / 1000,
    )
    click.echo(f"{config.model} on {device_name()}; medians of {rounds} rounds of {steps} steps")
    click.echo("")
    click.echo("\n".join(table(found, ["this engine", "BatchGenerator", "generate_step"])))
    if missing:
        click.echo(f"\nno time for {', '.join(str(cell) for cell in missing)}")


if __name__ == "__main__":
    main()
