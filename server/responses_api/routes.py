"""`POST /v1/responses`, and what clients may do with a response later."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import msgspec
from quart import Response, request

from vllm_mlx.engine.core.request import GenerationRequest
from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server import sse
from vllm_mlx.server.answers.events import answer_parts, prompt_only
from vllm_mlx.server.answers.plan import AnswerPlan, ChatInput, plan_answer
from vllm_mlx.server.departures import explain_departure
from vllm_mlx.server.openai.intake import limits_of, read_body
from vllm_mlx.server.openai.schemas import GenerationBody
from vllm_mlx.server.openai.translate import Limits, generation_request
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.request_context import RequestContext, current_context
from vllm_mlx.server.responses_api.chat_input import (
    SEALED_REASONING,
    chat_input,
    check_include,
    is_prompt_only,
)
from vllm_mlx.server.responses_api.fields import POLICIES
from vllm_mlx.server.responses_api.input_items import has_unseen, input_items, is_reference
from vllm_mlx.server.responses_api.output_items import ItemWriter
from vllm_mlx.server.responses_api.responses import response_head
from vllm_mlx.server.responses_api.schemas import ResponsesBody
from vllm_mlx.server.responses_api.store import History, StoredResponse
from vllm_mlx.server.responses_api.streams import (
    ResponseRun,
    collect_response,
    defect_events,
    failure_events,
    response_events,
)
from vllm_mlx.server.responses_api.tools import OfferedTools, left_out, offered_tools
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.stream_end import ended_properly

#: How long a cancelled response is waited for; its row ends within one step.
_CANCEL_WAIT_S = 5.0

#: Items of one page of a list.
_DEFAULT_PAGE, _MAX_PAGE = 20, 100

#: Fields that mean the same on every route.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "stop", "stop_token_ids"),
    *("ignore_eos", "frequency_penalty", "presence_penalty", "repetition_penalty", "priority"),
    "stream",
)


class ResponseRoutes:
    """Answer in the Responses API, and give back, continue, cancel and delete its responses."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime
        self._store = runtime.responses
        #: The responses that are being answered.
        self._runs: dict[str, ResponseRun] = {}

    async def create(self) -> Response:
        """Answer in the Responses API, streamed or whole."""
        runtime = self._runtime
        served = runtime.require_ready()
        body = await read_body(runtime, ResponsesBody, POLICIES)
        model = runtime.names.check(body.model)
        context = current_context()
        self._note_left_out(body, context)
        check_include(body.include or ())
        runtime.generations.check_room(1, param="input")
        references = self._references(body, context.client)
        parent = self._parent(body, context.client)
        items, offered, chat = await runtime.run_aside(lambda: _chat_of(body, references, parent))
        plan = await plan_answer(served, chat)
        limits = limits_of(runtime, served)
        row = row_request(body, context.id, plan, limits, client=context.client)
        generation = runtime.generations.start(context.id, [row])
        context.closing.push_async_callback(generation.aclose)
        explain_departure(
            context, generation, served.tokenizers, chat.messages, chat.render_options
        )

        def keep(response: dict[str, Any]) -> None:
            if body.store is not False:
                self._store.put(context.client, response, items, parent)

        run = ResponseRun(
            response_head(context.id, model, body, row.sampling),
            ItemWriter(offered, seals=SEALED_REASONING in (body.include or ())),
            client=context.client,
            keep=keep,
        )
        self._open(run, context)
        parts = answer_parts(generation, plan)
        if is_prompt_only(body):
            parts = prompt_only(parts, "stop")
        if not body.stream:
            return json_response(await collect_response(parts, run))
        await generation.peek()
        events = ended_properly(
            response_events(parts, run),
            context,
            functools.partial(failure_events, run),
            write_defect=functools.partial(defect_events, run),
        )
        return sse.event_stream(events)

    async def retrieve(self, response_id: str) -> Response:
        """Return a stored response, or one that is being answered as it is by now."""
        for name in ("stream", "starting_after"):
            if request.args.get(name, "false") != "false":
                raise InvalidRequestError(
                    f"{name} is not supported in this build: a response that is stored is whole",
                    param=name,
                )
        run = self._run_of(response_id)
        if run is not None:
            return json_response(run.response)
        return _raw_json(self._stored(response_id).response)

    async def delete(self, response_id: str) -> Response:
        """Forget a stored response; what was built on it goes on."""
        self._store.delete(current_context().client, response_id)
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, response_id: str) -> Response:
        """End a response that is being answered; one that has ended is returned as it is."""
        run = self._run_of(response_id)
        if run is None:
            return _raw_json(self._stored(response_id).response)
        self._runtime.generations.cancel(response_id)
        # Whoever reads it may be slow: it is then returned as it is by now.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CANCEL_WAIT_S):
                await run.over.wait()
        return json_response(run.response)

    async def list_input_items(self, response_id: str) -> Response:
        """List the input items of a stored response, without those of the turns before it."""
        stored = self._stored(response_id)
        items: list[dict[str, Any]] = msgspec.json.decode(stored.input_items)
        order = request.args.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequestError("order must be 'asc' or 'desc'", param="order")
        if order == "desc":
            items.reverse()
        after = request.args.get("after")
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise InvalidRequestError("after names no item of the list", param="after")
            items = items[ids.index(after) + 1 :]
        limit = _limit(request.args.get("limit"))
        page = items[:limit]
        ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {}
        return json_response(
            {
                "object": "list",
                "data": page,
                "first_id": None,
                "last_id": None,
                **ends,
                "has_more": len(items) > len(page),
            }
        )

    def _note_left_out(self, body: ResponsesBody, context: RequestContext) -> None:
        """Name what the model does not see, as fields are named that are not known."""
        names = left_out(body.tools or ())
        if has_unseen(body.input):
            names.append("input[].output[].input_image")
        if names:
            noted = self._runtime.unknown_fields.record(names)
            context.ignored_fields = (*context.ignored_fields, *noted)

    def _parent(self, body: ResponsesBody, client: str) -> History | None:
        """Return the conversation that a body goes on with."""
        if body.previous_response_id is None:
            return None
        previous = self._store.get(client, body.previous_response_id, param="previous_response_id")
        return previous.history

    def _references(self, body: ResponsesBody, client: str) -> dict[str, dict[str, Any]]:
        """Return the stored items that a body's input refers to, by their ids."""
        items = body.input if isinstance(body.input, list) else ()
        ids = {item.id for item in items if is_reference(item) and item.id is not None}
        return {item_id: self._store.item(client, item_id) for item_id in ids}

    def _open(self, run: ResponseRun, context: RequestContext) -> None:
        """Have a run found by its id until its request is over."""
        self._runs[run.id] = run

        def close() -> None:
            run.over.set()
            del self._runs[run.id]

        context.closing.callback(close)

    def _run_of(self, response_id: str) -> ResponseRun | None:
        """Return the run of a response of the client at hand, if it is one that has not ended."""
        run = self._runs.get(response_id)
        is_own = run is not None and run.client == current_context().client
        return run if is_own else None

    def _stored(self, response_id: str) -> StoredResponse:
        return self._store.get(current_context().client, response_id)


def row_request(
    body: ResponsesBody, request_id: str, plan: AnswerPlan, limits: Limits, *, client: str
) -> GenerationRequest:
    """Resolve a request by the same rules as those of the chat route."""
    most = limits.max_request_tokens
    if body.max_output_tokens is not None and body.max_output_tokens > most:
        raise InvalidRequestError(
            f"max_output_tokens is {body.max_output_tokens}, over this server's limit of {most} "
            "(--max-request-tokens)",
            param="max_output_tokens",
        )
    is_warm = is_prompt_only(body)
    fields = {name: getattr(body, name) for name in _SAMPLING}
    fields["max_tokens"] = 1 if is_warm else body.max_output_tokens
    if is_warm:
        fields["min_tokens"] = None
    asked = GenerationBody.model_validate(fields)
    row = generation_request(
        asked, request_id, plan.prompt, "input", limits, client=client, plan=plan
    )
    return msgspec.structs.replace(row, is_warm=is_warm)


def _chat_of(
    body: ResponsesBody, references: Mapping[str, dict[str, Any]], parent: History | None
) -> tuple[list[dict[str, Any]], OfferedTools, ChatInput]:
    """Return the items, the tools and the chat that a body asks for; pure, for any thread."""
    items = input_items(body.input, references.__getitem__)
    offered = offered_tools(body.tools or (), body.tool_choice)
    earlier = parent.all_items() if parent is not None else []
    return items, offered, chat_input(body, [*earlier, *items], offered)


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_PAGE
    if not text.isascii() or not text.isdigit() or not 1 <= int(text[:9]) <= _MAX_PAGE:
        raise InvalidRequestError(f"limit must be in 1..{_MAX_PAGE}", param="limit")
    return int(text)


def _raw_json(body: bytes) -> Response:
    return Response(body, content_type="application/json")
