"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time

from quart import Response

from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.server import sse
from vllm_mlx.server.openai.intake import check_streaming, limits_of, read_body
from vllm_mlx.server.openai.prompts import Prompt, split_prompt
from vllm_mlx.server.openai.responses import AnswerHead, text_completion
from vllm_mlx.server.openai.schemas import CompletionBody
from vllm_mlx.server.openai.streams import completion_events, ended_properly
from vllm_mlx.server.openai.translate import generation_request
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.served_model import ServedModel


class CompletionRoute:
    """Continue plain prompts."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def create(self) -> Response:
        """Continue one prompt or several at once, streamed or whole."""
        served = self._runtime.require_ready()
        body = await read_body(self._runtime, CompletionBody)
        model = self._runtime.names.check(body.model)
        include_usage = check_streaming(body)
        context = current_context()
        rows = await self._rows(body, context.id, served)
        generation = self._runtime.generations.start(context.id, rows)
        context.closing.push_async_callback(generation.aclose)
        head = AnswerHead(context.id, model, int(time.time()))
        if not body.stream:
            return json_response(text_completion(head, await generation.collect()))
        await generation.peek()
        events = completion_events(generation, head, include_usage=include_usage)
        return sse.event_stream(ended_properly(events, context))

    async def _rows(
        self, body: CompletionBody, request_id: str, served: ServedModel
    ) -> list[GenerationRequest]:
        """Make one engine request for each prompt; their ids are the client's with a number."""
        add_special_tokens = body.add_special_tokens is not False

        async def tokens_of(prompt: Prompt) -> list[int]:
            if isinstance(prompt, list):
                return prompt
            return await served.tokenizers.encode(prompt, add_special_tokens=add_special_tokens)

        given = split_prompt(body.prompt)
        self._runtime.generations.check_room(len(given))
        prompts = await asyncio.gather(*map(tokens_of, given))
        limits = limits_of(self._runtime, served)
        return [
            generation_request(
                body,
                request_id if len(prompts) == 1 else f"{request_id}-{index}",
                prompt,
                "prompt" if len(prompts) == 1 else f"prompt[{index}]",
                limits,
            )
            for index, prompt in enumerate(prompts)
        ]
