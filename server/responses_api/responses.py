"""The response object and its usage, as clients of the Responses API read them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from vllm_mlx.engine.core.outputs import RowOutput
from vllm_mlx.engine.core.request import SamplingParams
from vllm_mlx.server.answers.events import AnswerPart
from vllm_mlx.server.errors import ErrorReply
from vllm_mlx.server.responses_api.schemas import ResponsesBody

#: What the error of a response is called, by the status that it would have had; clients tell from
#: it whether to try again.
_ERROR_CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}


#: Fields of the request that its response says again as they came.
_SAID_BACK = {
    *("text", "reasoning", "tools", "tool_choice", "max_tool_calls", "prompt_cache_key"),
    *("safety_identifier", "user"),
}


@dataclass(frozen=True)
class ResponseHead:
    """Hold what a response says of itself from the beginning to its end."""

    id: str
    fields: dict[str, Any]

    def response(
        self,
        status: str,
        output: list[dict[str, Any]],
        *,
        last: RowOutput | None = None,
        error: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the response as it is by now; `last` is its final output."""
        ended = {"completed_at": int(time.time())} if status == "completed" else {}
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self.fields,
            "status": status,
            **ended,
            "error": error,
            "incomplete_details": reason,
            "output": output,
            "usage": usage(last) if last is not None else None,
        }


def response_head(
    response_id: str, model: str, body: ResponsesBody, sampling: SamplingParams
) -> ResponseHead:
    """Return the head of the response to a body; `sampling` is what it is answered with."""
    said = body.model_dump(include=_SAID_BACK, exclude_none=True)
    text = said.get("text", {})
    reasoning = said.get("reasoning", {})
    fields = {
        "id": response_id,
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": said.get("max_tool_calls"),
        "metadata": body.metadata or {},
        "model": model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": said.get("prompt_cache_key"),
        "reasoning": {"effort": None, "summary": None, **reasoning},
        "safety_identifier": said.get("safety_identifier"),
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": sampling.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": said.get("tool_choice", "auto"),
        "tools": said.get("tools", []),
        "top_logprobs": 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": said.get("user"),
    }
    return ResponseHead(response_id, fields)


def status_of(last: AnswerPart) -> str:
    """Return how a response has ended, from its last part."""
    return {"length": "incomplete", "abort": "cancelled"}.get(last.finish_reason or "", "completed")


def usage(last: RowOutput) -> dict[str, Any]:
    """Return what a request took, from its final output."""
    prompt, completion = last.num_prompt_tokens, last.num_completion_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {
            "cached_tokens": last.num_cached_tokens,
            "cache_write_tokens": last.num_stored_tokens,
        },
        "output_tokens": completion,
        "output_tokens_details": {"reasoning_tokens": last.num_reasoning_tokens},
        "total_tokens": prompt + completion,
    }


def error_of(reply: ErrorReply) -> dict[str, Any]:
    """Return the error of a response that has failed."""
    code = _ERROR_CODES.get(reply.rule.status, "server_error")
    if reply.code == "context_length_exceeded":
        # Agents look for it, to shorten the prompt.
        code = reply.code
    return {"code": code, "message": reply.message}
