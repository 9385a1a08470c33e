"""`POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import functools

import msgspec
from quart import Response

from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.errors import ContextLengthExceededError
from vllm_mlx.server import sse
from vllm_mlx.server.answers.events import answer_parts, prompt_only
from vllm_mlx.server.answers.plan import AnswerPlan, plan_answer
from vllm_mlx.server.anthropic.blocks import BlockWriter
from vllm_mlx.server.anthropic.chat_input import chat_input
from vllm_mlx.server.anthropic.fields import POLICIES
from vllm_mlx.server.anthropic.responses import MessageHead
from vllm_mlx.server.anthropic.schemas import CountTokensBody, MessagesBody
from vllm_mlx.server.anthropic.streams import (
    collect_message,
    error_event,
    message_events,
)
from vllm_mlx.server.departures import explain_departure
from vllm_mlx.server.openai.intake import limits_of, read_body
from vllm_mlx.server.openai.schemas import GenerationBody
from vllm_mlx.server.openai.translate import Limits, generation_request
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.stream_end import ended_properly


class MessageRoutes:
    """Answer chats in Anthropic's API, and count their tokens."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime
        self._settings = runtime.chat_settings

    async def create(self) -> Response:
        """Answer one chat in Anthropic's API, streamed or whole."""
        runtime = self._runtime
        served = runtime.require_ready()
        body = await read_body(runtime, MessagesBody, POLICIES)
        model = runtime.names.check(body.model, is_agents=True)
        runtime.generations.check_room(1, param="messages")
        context = current_context()
        chat = await runtime.run_aside(lambda: chat_input(body, self._settings))
        plan = await plan_answer(served, chat)
        limits = limits_of(runtime, served)
        row = row_request(body, context.id, plan, limits, client=context.client)
        generation = runtime.generations.start(context.id, [row])
        context.closing.push_async_callback(generation.aclose)
        explain_departure(
            context, generation, served.tokenizers, plan.chat.messages, plan.chat.render_options
        )
        parts = answer_parts(generation, plan)
        if body.max_tokens == 0:
            parts = prompt_only(parts, "length")
        head = MessageHead(context.id, model)
        writer = BlockWriter(shows_thinking=_shows_thinking(body))
        if not body.stream:
            return json_response(await collect_message(parts, writer, head))
        await generation.peek()
        events = message_events(parts, writer, head)
        write_error = functools.partial(error_event, request_id=context.id)
        return sse.event_stream(ended_properly(events, context, write_error))

    async def count_tokens(self) -> Response:
        """Count the tokens of a chat's prompt: messages, system prompt and tools."""
        served = self._runtime.require_ready()
        body = await read_body(self._runtime, CountTokensBody, POLICIES)
        self._runtime.names.check(body.model, is_agents=True)
        chat = await self._runtime.run_aside(lambda: chat_input(body, self._settings))
        plan = await plan_answer(served, chat)
        return json_response({"input_tokens": len(plan.prompt)})


def _shows_thinking(body: MessagesBody) -> bool:
    return body.thinking is None or body.thinking.display != "omitted"


def row_request(
    body: MessagesBody, request_id: str, plan: AnswerPlan, limits: Limits, *, client: str
) -> GenerationRequest:
    """Resolve a request by the same rules as OpenAI's; agents may ask for any length of answer.

    Raises `ContextLengthExceededError` in the words that agents look for, to shorten the prompt.
    """
    most = min(limits.info.max_model_len, limits.info.kv_max_tokens) - 1
    if len(plan.prompt) > most:
        raise ContextLengthExceededError(
            f"prompt is too long: {len(plan.prompt)} tokens > {most} maximum", param="messages"
        )
    asked = GenerationBody.model_validate(
        {
            "max_tokens": min(body.max_tokens, limits.max_request_tokens) or 1,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "stream": body.stream,
        }
    )
    row = generation_request(
        asked, request_id, plan.prompt, "messages", limits, client=client, plan=plan
    )
    return msgspec.structs.replace(row, is_warm=body.max_tokens == 0)
