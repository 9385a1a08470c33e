"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time

from quart import Response

from vllm_mlx.server import sse
from vllm_mlx.server.answers.events import answer_parts, collect_answers
from vllm_mlx.server.answers.plan import plan_answer
from vllm_mlx.server.departures import explain_departure
from vllm_mlx.server.openai.answer_form import form_of
from vllm_mlx.server.openai.chat_input import chat_input, is_legacy
from vllm_mlx.server.openai.intake import check_streaming, limits_of, read_body, row_ids
from vllm_mlx.server.openai.responses import AnswerHead, chat_completion
from vllm_mlx.server.openai.schemas import ChatCompletionBody
from vllm_mlx.server.openai.streams import chat_events, error_event
from vllm_mlx.server.openai.translate import generation_request
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import current_context
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.stream_end import ended_properly


class ChatRoute:
    """Answer chats."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def create(self) -> Response:
        """Answer one chat, streamed or whole."""
        served = self._runtime.require_ready()
        body = await read_body(self._runtime, ChatCompletionBody)
        model = self._runtime.names.check(body.model)
        include_usage = check_streaming(body)
        num_choices = body.n or 1
        self._runtime.generations.check_room(num_choices, param="n")
        context = current_context()
        chat = chat_input(body, await form_of(self._runtime, body))
        plan = await plan_answer(served, chat)
        limits = limits_of(self._runtime, served)
        rows = [
            generation_request(
                body,
                row_id,
                plan.prompt,
                "messages",
                limits,
                choice=choice,
                client=context.client,
                plan=plan,
            )
            for choice, row_id in enumerate(row_ids(context.id, num_choices))
        ]
        spell = served.tokenizers.token_bytes if body.logprobs else None
        generation = self._runtime.generations.start(context.id, rows)
        context.closing.push_async_callback(generation.aclose)
        explain_departure(
            context, generation, served.tokenizers, chat.messages, chat.render_options
        )
        names_reasoning = plan.formats.reasoning is not None
        head = AnswerHead(context.id, model, int(time.time()), names_reasoning)
        if not body.stream:
            answers = await collect_answers(generation, plan)
            whole = chat_completion(head, answers, spell, is_legacy=is_legacy(body))
            return json_response(whole)
        await generation.peek()
        events = chat_events(
            answer_parts(generation, plan),
            head,
            num_choices=num_choices,
            include_usage=include_usage,
            spell=spell,
            is_legacy=is_legacy(body),
        )
        return sse.event_stream(ended_properly(events, context, error_event, last=sse.DONE))
