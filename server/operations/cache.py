"""`GET /v1/cache`, `DELETE /v1/cache` and `POST /v1/cache/warm`: the stored prefixes."""

from __future__ import annotations

from typing import Any

from quart import Response, request

from vllm_mlx.engine.errors import CacheError, EngineUnavailableError, InvalidRequestError
from vllm_mlx.server.openai.validation import decode_object
from vllm_mlx.server.operations.status import cache_fields
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.warm_prompts import WarmPrompt, warm_prompt

TIERS = ("ram", "ssd")


class CacheRoutes:
    """Show, remove and compute stored prefixes."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def show(self) -> Response:
        """Describe what is held, its limits, and what it was found useful for."""
        self._runtime.require_ready()
        stats = await self._runtime.generations.progress.snapshot()
        if stats is None:
            raise EngineUnavailableError("the engine does not answer", retry_after_s=1.0)
        fields: dict[str, Any] = {"object": "cache", "model": self._runtime.names.primary}
        fields |= cache_fields(stats.prefixes)
        if stats.prefixes is not None:
            fields |= {
                "block_size": stats.prefixes.block_size,
                "namespace": stats.prefixes.namespace,
                "namespace_label": stats.prefixes.label,
            }
        return json_response(fields)

    async def clear(self) -> Response:
        """Remove what is not in use of one tier, or of both; from SSD this model's only."""
        self._runtime.require_ready()
        unknown = sorted(set(request.args) - {"tier"})
        if unknown:
            raise InvalidRequestError(f"unknown parameter {unknown[0]!r}", param=unknown[0])
        tiers = request.args.getlist("tier") or list(TIERS)
        wrong = [tier for tier in tiers if tier not in TIERS]
        if wrong:
            raise InvalidRequestError(f"tier must be ram or ssd, not {wrong[0]!r}", param="tier")
        if "ssd" in tiers and request.args and not self._runtime.engine_config.ssd_cache_dir:
            raise InvalidRequestError(
                "there is no SSD tier: the server was started without --ssd-cache-dir", param="tier"
            )
        cleared = await self._runtime.engine.clear_cache(ram="ram" in tiers, ssd="ssd" in tiers)
        if cleared.fault is not None:
            raise CacheError(f"the files could not be removed: {cleared.fault}")
        return json_response(
            {
                "object": "cache.cleared",
                "tiers": [tier for tier in TIERS if tier in tiers],
                "blocks": cleared.num_blocks,
                "files": cleared.num_runs,
            }
        )

    async def warm(self) -> Response:
        """Compute and store prefixes, and answer when that is done."""
        served = self._runtime.require_ready()
        raw = await request.get_data(cache=False, as_text=False, parse_form_data=False)
        body = decode_object(raw)
        self._runtime.names.check(_name_of(body))
        if unknown := sorted(body.keys() - {"prompts", "model"}):
            current_context().ignored_fields = self._runtime.unknown_fields.record(unknown)
        if not self._runtime.engine_config.prefix_cache:
            raise InvalidRequestError("the prefix cache is switched off: --no-prefix-cache")
        summary = await self._runtime.warmer.warm(_prompts_of(body), served.tokenizers)
        return json_response({"object": "cache.warm", **summary.fields()})


def _name_of(body: dict[str, Any]) -> str | None:
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise InvalidRequestError("model must be a string", param="model")
    return name


def _prompts_of(body: dict[str, Any]) -> list[WarmPrompt]:
    entries = body.get("prompts")
    if not isinstance(entries, list) or not entries:
        raise InvalidRequestError("prompts must be a list that is not empty", param="prompts")
    prompts = []
    for index, entry in enumerate(entries):
        where = f"prompts[{index}]"
        try:
            prompt = warm_prompt(entry, where)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}: {error.message}", param=where) from None
        if prompt is not None:
            prompts.append(prompt)
    return prompts
