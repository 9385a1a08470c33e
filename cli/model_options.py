"""The options that say which model to load and how, for every command that loads one."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.chat_config_options import TemplateOptions, template_options
from vllm_mlx.cli.options import Decorator, option, stacked
from vllm_mlx.cli.pending import env_name

if TYPE_CHECKING:
    from vllm_mlx.engine.config import ModelConfig

# Written out, because importing the configurations costs a help page 50 ms; a test holds them
# equal to the configurations' own.
DEFAULT_MODEL = "demo"
DTYPES = ("auto", "float32", "float16", "bfloat16")
LOAD_FORMATS = ("auto", "dummy")
SHAPES = (
    *("tiny", "tiny-wide", "tiny-moe"),
    *("qwen3-0.6b-8bit", "llama-3.2-3b-4bit", "qwen3-30b-a3b-4bit"),
)

#: MODEL, as `serve` and `chat` take it.
model_argument: Decorator[Any] = click.argument(
    "model", required=False, default=DEFAULT_MODEL, envvar=env_name("--model")
)

#: How the weights are loaded: the fields of `ModelConfig`, and the KV budget.
model_options: Decorator[Any] = stacked(
    option(
        "--dtype",
        type=click.Choice(DTYPES),
        default="auto",
        help="Type of the computation; auto takes float32 on CPU and the checkpoint's elsewhere.",
    ),
    option(
        "--load-format",
        type=click.Choice(LOAD_FORMATS),
        default="auto",
        help="dummy takes random weights of a --shape, to try speed and memory; what they write "
        "means nothing.",
    ),
    option(
        "--shape",
        type=click.Choice(SHAPES),
        metavar="NAME",
        help="Shape of random weights; MODEL is then no more than the name that is served. One of: "
        f"{', '.join(SHAPES)}.",
    ),
    option(
        "--moe-top-k",
        type=click.IntRange(min=1),
        metavar="EXPERTS",
        help="Ask fewer experts for each token than a mixture of experts was made for: faster, and "
        "a little worse. Refused for other models.",
    ),
    option(
        "--max-model-len",
        type=click.IntRange(min=1),
        metavar="TOKENS",
        help="Longest prompt plus completion; default: what the model was made for.",
    ),
    option(
        "--kv-memory-mb",
        type=click.IntRange(min=1),
        metavar="MIB",
        help="Budget of live KV; default: what is safe beside the weights.",
    ),
    option(
        "--adapter-path",
        type=click.Path(),
        metavar="FOLDER",
        help="LoRA adapter to load onto the model.",
    ),
    option(
        "--trust-remote-code",
        is_flag=True,
        help="Run code that comes with the model. It can do anything that you can.",
    ),
    option("--offline", is_flag=True, help="Never reach for the network."),
    template_options,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions(TemplateOptions):
    """Hold the parsed options of `model_options`, by the names of their flags."""

    model: str
    #: One of `DTYPES`.
    dtype: Any
    #: One of `LOAD_FORMATS`.
    load_format: Any
    shape: str | None
    moe_top_k: int | None
    max_model_len: int | None
    kv_memory_mb: int | None
    adapter_path: str | None
    trust_remote_code: bool
    offline: bool

    @property
    def kv_memory_bytes(self) -> int | None:
        """Return the KV budget in bytes; None leaves it to the engine."""
        return None if self.kv_memory_mb is None else self.kv_memory_mb * 1024 * 1024

    @property
    def model_name(self) -> str:
        """Return the model's name: random weights that are not given one have their shape's."""
        if self.shape is not None and self.model == DEFAULT_MODEL:
            return self.shape
        return self.model

    def model_config(self) -> ModelConfig:
        """Return the frozen configuration that these options become.

        Raises `UsageError` if the options contradict each other.
        """
        if (self.load_format == "dummy") != (self.shape is not None):
            raise click.UsageError("--load-format dummy and --shape NAME belong together")
        from vllm_mlx.engine.config import ChatConfig, ModelConfig

        return ModelConfig(
            model=self.model_name,
            load_format=self.load_format,
            shape=self.shape,
            moe_top_k=self.moe_top_k,
            dtype=self.dtype,
            adapter_path=self.adapter_path,
            trust_remote_code=self.trust_remote_code,
            offline=self.offline,
            max_model_len=self.max_model_len,
            chat=ChatConfig(**self.chat_fields()),
        )
