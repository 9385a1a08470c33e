"""The options of `serve` for the engines beside, or instead of, the chat model: encoders first."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import click

from vllm_mlx.cli.options import Decorator, option, stacked

if TYPE_CHECKING:
    from vllm_mlx.engine.host.service import ServiceKind
    from vllm_mlx.server.services.plan import ServicePlan

OVERFLOW_POLICIES = ("error", "truncate")

encoder_options: Decorator[Any] = stacked(
    option(
        "--embedding-model",
        multiple=True,
        metavar="[NAME=]MODEL",
        show_default=False,
        help="Encoder for /v1/embeddings, a folder or a repository; may be given several times.",
    ),
    option(
        "--embedding-max-length",
        type=click.IntRange(min=6),
        metavar="TOKENS",
        help="Longest text of an embedding; default: what the model says.",
    ),
    option(
        "--embedding-overflow-policy",
        type=click.Choice(OVERFLOW_POLICIES),
        default="error",
        help="What becomes of a longer text: a 400, or cut without being asked.",
    ),
    option(
        "--rerank-model",
        multiple=True,
        metavar="[NAME=]MODEL",
        show_default=False,
        help="Sequence classifier for /v1/rerank; may be given several times.",
    ),
    option(
        "--no-chat-model",
        is_flag=True,
        help="Serve without a chat model, only the engines of other kinds.",
    ),
    option(
        "--load-on-demand",
        is_flag=True,
        help="Load the engines of other kinds when a request first needs each, not at the start.",
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderOptions:
    """Hold the parsed options of `encoder_options`, by the names of their flags."""

    embedding_model: tuple[str, ...]
    embedding_max_length: int | None
    embedding_overflow_policy: str
    rerank_model: tuple[str, ...]
    no_chat_model: bool
    load_on_demand: bool

    def encoder_plans(self, *, offline: bool, trust_remote_code: bool) -> list[ServicePlan]:
        """Return the encoders to serve; raise `UsageError`."""
        if not self.embedding_model and not self.rerank_model:
            return []
        from vllm_mlx.engine.encoders.kinds import EMBEDDING, RERANK, EncoderConfig
        from vllm_mlx.server.services.plan import ServicePlan, split_served_name

        wanted: list[tuple[ServiceKind[Any, Any, Any], str, int | None]] = [
            (EMBEDDING, text, self.embedding_max_length) for text in self.embedding_model
        ]
        wanted += [(RERANK, text, None) for text in self.rerank_model]
        plans = []
        for kind, text, max_length in wanted:
            name, model = split_served_name(text)
            config = EncoderConfig(
                model=model,
                offline=offline,
                trust_remote_code=trust_remote_code,
                max_length=max_length,
            )
            plans.append(ServicePlan(kind, config, model, name))
        return plans

    def service_fields(self) -> dict[str, Any]:
        """Return the fields of `ServerConfig` that they become."""
        return {
            "serves_chat": not self.no_chat_model,
            "loads_on_demand": self.load_on_demand,
            "truncates_embeddings": self.embedding_overflow_policy == "truncate",
        }
