"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from quart import Response

from vllm_mlx.engine.errors import InvalidRequestError
from vllm_mlx.server.openai.chat_input import chat_input
from vllm_mlx.server.openai.intake import read_body
from vllm_mlx.server.openai.schemas import DetokenizeBody, TokenizeBody
from vllm_mlx.server.replies import json_response
from vllm_mlx.server.runtime import ServerRuntime
from vllm_mlx.server.tokenizer_pool import TokenizerPool

#: Fields that go with messages only.
_OF_CHATS = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools")


class TokenizationRoutes:
    """Show how the model's tokenizer sees a text."""

    def __init__(self, runtime: ServerRuntime) -> None:
        self._runtime = runtime

    async def tokenize(self) -> Response:
        """Return the tokens of a prompt, or of a chat as its template renders it."""
        served = self._runtime.require_ready()
        body = await read_body(self._runtime, TokenizeBody)
        self._runtime.names.check(body.model)
        tokens = await _tokens_of(body, served.tokenizers)
        return json_response(
            {
                "count": len(tokens),
                "max_model_len": served.max_model_len,
                "tokens": tokens,
                "token_strs": None,
            }
        )

    async def detokenize(self) -> Response:
        """Return the text of a list of tokens, special tokens included."""
        served = self._runtime.require_ready()
        body = await read_body(self._runtime, DetokenizeBody)
        self._runtime.names.check(body.model)
        if body.tokens and max(body.tokens) >= served.tokenizers.vocab_size:
            raise InvalidRequestError(
                f"tokens has {max(body.tokens)}, but the vocabulary ends at "
                f"{served.tokenizers.vocab_size - 1}",
                param="tokens",
            )
        text = await served.tokenizers.decode(body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})


async def _tokens_of(body: TokenizeBody, tokenizers: TokenizerPool) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        for name in _OF_CHATS:
            if getattr(body, name) is not None:
                raise InvalidRequestError(f"{name} belongs to messages, not to prompt", param=name)
        return await tokenizers.encode(
            body.prompt, add_special_tokens=body.add_special_tokens is not False
        )
    if body.add_special_tokens:
        raise InvalidRequestError(
            "add_special_tokens is not for messages: the template writes them itself",
            param="add_special_tokens",
        )
    chat = chat_input(body)
    return await tokenizers.encode_chat(chat.messages, **chat.render_options)
