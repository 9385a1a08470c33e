"""`POST /v1/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from quart import Response

from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.server import sse
from vllm_mlx.server.openai.answer_form import form_of
from vllm_mlx.server.openai.intake import check_streaming, limits_of, read_body, row_ids
from vllm_mlx.server.openai.logprobs import CompletionPieces, Echo
from vllm_mlx.server.openai.prompts import Prompt, num_prompts, split_prompt
from vllm_mlx.server.openai.responses import AnswerHead, text_completion
from vllm_mlx.server.openai.schemas import CompletionBody
from vllm_mlx.server.openai.streams import completion_events, error_event
from vllm_mlx.server.openai.translate import Limits, generation_request
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import RequestContext, current_context
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.served_model import ServedModel
from vllm_mlx.server.stream_end import ended_properly


@dataclass(frozen=True)
class _Prompt:
    """Hold one prompt's tokens, and how it is repeated where the request echoes it."""

    tokens: list[int]
    echo: Echo | None = None


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
        num_choices = body.n or 1
        grammar = await self._grammar(body, served)
        prompts = await self._prompts(body, served)
        rows = self._rows(body, context, prompts, limits_of(self._runtime, served), grammar)
        pieces = CompletionPieces(
            [prompt.echo for prompt in prompts for _ in range(num_choices)],
            served.tokenizers.token_bytes if body.logprobs is not None else None,
        )
        generation = self._runtime.generations.start(context.id, rows)
        context.closing.push_async_callback(generation.aclose)
        head = AnswerHead(context.id, model, int(time.time()))
        if not body.stream:
            answers = await generation.collect()
            return json_response(text_completion(head, answers, pieces, num_choices))
        await generation.peek()
        events = completion_events(
            generation, head, pieces, include_usage=include_usage, num_choices=num_choices
        )
        return sse.event_stream(ended_properly(events, context, error_event, last=sse.DONE))

    async def _grammar(self, body: CompletionBody, served: ServedModel) -> str | None:
        form = await form_of(self._runtime, body)
        if form is None:
            return None
        await served.tokenizers.check_grammar(form.lark, param=form.param)
        return form.lark

    async def _prompts(self, body: CompletionBody, served: ServedModel) -> list[_Prompt]:
        """Encode the prompts, and prepare what is to be repeated of them."""
        add_special_tokens = body.add_special_tokens is not False
        tokenizers = served.tokenizers

        async def prepared(prompt: Prompt) -> _Prompt:
            if isinstance(prompt, list):
                tokens, text = prompt, None
            else:
                tokens = await tokenizers.encode(prompt, add_special_tokens=add_special_tokens)
                text = prompt
            if not body.echo:
                return _Prompt(tokens)
            if text is None:
                text = await tokenizers.decode(tokens, skip_special_tokens=False)
            wants_offsets = body.logprobs is not None
            offsets = await tokenizers.token_offsets(tokens, text) if wants_offsets else []
            return _Prompt(tokens, Echo(text, tokens, offsets))

        self._runtime.generations.check_room(num_prompts(body.prompt) * (body.n or 1))
        given = await self._runtime.run_aside(lambda: split_prompt(body.prompt, served.info))
        return await asyncio.gather(*map(prepared, given))

    @staticmethod
    def _rows(
        body: CompletionBody,
        context: RequestContext,
        prompts: Sequence[_Prompt],
        limits: Limits,
        grammar: str | None,
    ) -> list[GenerationRequest]:
        """Make one engine request for each choice of each prompt."""
        num_choices = body.n or 1
        ids = row_ids(context.id, len(prompts) * num_choices)
        return [
            generation_request(
                body,
                ids[index * num_choices + choice],
                prompt.tokens,
                "prompt" if len(prompts) == 1 else f"prompt[{index}]",
                limits,
                choice=choice,
                client=context.client,
                grammar=grammar,
            )
            for index, prompt in enumerate(prompts)
            for choice in range(num_choices)
        ]
