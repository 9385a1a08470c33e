"""Frozen configurations, built by the CLI, validated once and passed down."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from vllm_mlx.engine.errors import UsageError

DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "dummy"]

DEMO_MODEL = "demo"


#: In place of a parser's name: none at all.
NO_PARSER = "none"

#: The reasoning parser that is told its two markers: `delimiters:OPEN,CLOSE`.
_DELIMITERS = "delimiters:"


#: What decides a prompt and is no variable of its template.
_PROMPT_FIELDS = frozenset(
    {
        *("messages", "conversation", "tools", "documents", "add_generation_prompt"),
        *("continue_final_message", "chat_template", "tokenize", "padding", "truncation"),
        *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
        "tokenizer_kwargs",
    }
)


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Say how chats become prompts and how the answers are read.

    Raises `UsageError` for a parser that does not exist.
    """

    #: File of a Jinja template in place of the model's own.
    chat_template: str | None = None
    #: Variables of the template where a request does not set them.
    template_kwargs: dict[str, Any] = {}
    #: Name of a tool parser, or `none`; None takes what the template shows.
    tool_parser: str | None = None
    #: The same for reasoning; also `delimiters:OPEN,CLOSE`.
    reasoning_parser: str | None = None
    #: Most tokens of reasoning where a request does not say; None does not limit.
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        if self.tool_parser is not None or self.reasoning_parser is not None:
            # Only now: the formats are many modules.
            from vllm_mlx.engine.parsing.registry import check_parser_names

            tools = None if self.tool_parser == NO_PARSER else self.tool_parser
            check_parser_names(tools, *self.reasoning_choice)
        if own := _PROMPT_FIELDS.intersection(self.template_kwargs):
            raise UsageError(f"{min(own)} is no variable of a chat template that has a default")

    @property
    def reasoning_choice(self) -> tuple[str | None, tuple[str, str] | None]:
        """Return the name of the reasoning parser, None for none, and its markers."""
        name = self.reasoning_parser
        if name is None or name == NO_PARSER:
            return None, None
        if not name.startswith(_DELIMITERS):
            return name, None
        opener, _, closer = name.removeprefix(_DELIMITERS).partition(",")
        return _DELIMITERS[:-1], (opener, closer)


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Say which weights to load and how.

    Raises `UsageError` for a shape that is not known, or without random weights to fill it, and
    for no experts.
    """

    #: `demo`, a local folder, or a hub repository; with random weights no more than a name.
    model: str = DEMO_MODEL
    #: `dummy` takes random weights of a `shape`.
    load_format: LoadFormat = "auto"
    #: A name of `DUMMY_SHAPES`.
    shape: str | None = None
    #: `auto` follows the platform's policy: float32 on CPU, the checkpoint's own elsewhere.
    dtype: DtypeName = "auto"
    adapter_path: str | None = None
    trust_remote_code: bool = False
    #: Never reach for the network.
    offline: bool = False
    #: Experts asked for each token, of a mixture of experts; None asks as many as it was made for.
    moe_top_k: int | None = None
    #: Shortens the model's own context length.
    max_model_len: int | None = None
    chat: ChatConfig = ChatConfig()

    def __post_init__(self) -> None:
        if (self.load_format == "dummy") != (self.shape is not None):
            raise UsageError("random weights need a shape, and a shape is for random weights only")
        if self.moe_top_k is not None and self.moe_top_k < 1:
            raise UsageError(f"a token asks at least one expert, not {self.moe_top_k}")
        if self.shape is not None:
            from vllm_mlx.engine.models.dummy_shapes import DUMMY_SHAPES

            if self.shape not in DUMMY_SHAPES:
                raise UsageError(
                    f"no shape is called {self.shape!r}; there are {', '.join(DUMMY_SHAPES)}"
                )


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Say how one engine batches; immutable for its life."""

    #: Most rows that compute at once; 1 serves one request at a time.
    max_num_seqs: int = 64
    #: Most prompt tokens computed between two decode steps.
    prefill_tokens_per_step: int = 512
    #: Seconds between two tokens of a row that prompts beside it are cut to; None does not cut.
    target_itl_s: float | None = None
    #: A row starts only if its prompt and this many new tokens fit (or all it may still generate).
    admission_headroom_tokens: int = 512
    #: Seconds that one step may take before the engine counts as hung; 0 for any time.
    step_timeout_s: float = 300.0
    #: Budget of live KV in bytes; None takes what is safe beside the weights.
    kv_memory_bytes: int | None = None
    #: Bytes of the machine's memory to leave to others; None for a small part of it, 0 for none.
    memory_reserve_bytes: int | None = None

    #: Keep the KV of prefixes for later requests.
    prefix_cache: bool = True
    #: Most bytes of RAM for prefixes; None takes `cache_memory_fraction` of the memory.
    cache_memory_bytes: int | None = None
    cache_memory_fraction: float = 0.20
    #: Tokens that are stored, found and evicted together.
    cache_block_size: int = 64
    #: Folder of the SSD tier, shared by any number of processes; None keeps prefixes in RAM only.
    ssd_cache_dir: str | None = None
    #: Most bytes of all runs in that folder; None does not cap.
    ssd_cache_max_bytes: int | None = 10 * 2**30

    def __post_init__(self) -> None:
        if not 0.0 <= self.cache_memory_fraction <= 1.0:
            raise UsageError(
                f"the part of memory for prefixes must be 0 to 1, not {self.cache_memory_fraction}"
            )
        if self.ssd_cache_dir is not None and not self.prefix_cache:
            raise UsageError("an SSD tier needs the prefix cache, which is switched off")
        if self.cache_block_size < 1:
            raise UsageError(f"the block size must be at least 1, not {self.cache_block_size}")
        if self.max_num_seqs < 1:
            raise UsageError(f"max_num_seqs must be at least 1, not {self.max_num_seqs}")
        if self.prefill_tokens_per_step < 1:
            raise UsageError(
                f"prefill_tokens_per_step must be at least 1, not {self.prefill_tokens_per_step}"
            )
        if self.target_itl_s is not None and not 0 < self.target_itl_s < math.inf:
            raise UsageError(f"the time between tokens must be positive, not {self.target_itl_s}")
        if not 0 <= self.step_timeout_s < math.inf:
            raise UsageError(f"the step timeout must be 0 or more, not {self.step_timeout_s}")
        if self.kv_memory_bytes is not None and self.kv_memory_bytes <= 0:
            raise UsageError(f"the KV budget must be positive, not {self.kv_memory_bytes} bytes")
        if self.memory_reserve_bytes is not None and self.memory_reserve_bytes < 0:
            raise UsageError(f"the reserve is 0 or more bytes, not {self.memory_reserve_bytes}")


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Say what was loaded, and what fits; the engine's word that it is ready."""

    #: What the user asked for.
    model: str
    #: The folder that the weights came from.
    path: str
    model_type: str
    #: Longest prompt plus completion.
    max_model_len: int
    dtype: str
    weights_bytes: int
    kv_bytes_per_token: int
    kv_budget_bytes: int
    #: Longest row that the KV budget holds; a request is limited by this and `max_model_len`.
    kv_max_tokens: int
    #: MLX's device: `gpu (Metal)`, `gpu (CUDA)` or `cpu`.
    device: str
    #: BLAS library in use on Linux CPU, None elsewhere.
    blas: str | None = None
    eos_token_ids: tuple[int, ...] = ()
    #: Sampling defaults of the model's generation_config.json, by their field names there.
    generation_defaults: dict[str, float] = {}
    pid: int = 0
