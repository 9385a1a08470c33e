"""What each field of embeddings and reranking does here, and in words."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_mlx.server.encoders.schemas import MAX_INPUTS, EmbeddingsBody, RerankBody
from vllm_mlx.server.openai.fields import FieldPolicy, FieldUse
from vllm_mlx.server.openai.schemas import Body

_E = FieldPolicy(FieldUse.ENFORCED)
_A = FieldPolicy(FieldUse.ADVISORY)


def _refused(*no_ops: object) -> FieldPolicy:
    return FieldPolicy(FieldUse.REFUSED, no_ops)


def _all(names: str) -> dict[str, FieldPolicy]:
    return dict.fromkeys(names.split(), _E)


POLICIES: Mapping[type[Body], Mapping[str, FieldPolicy]] = {
    EmbeddingsBody: {
        **_all("input model encoding_format dimensions prompt_name truncate_prompt_tokens"),
        "user": _A,
        "add_special_tokens": _refused(True),
        "normalize": _refused(True),
        "priority": _refused(0),
    },
    RerankBody: {
        **_all("query documents model top_n return_documents max_tokens_per_doc rank_fields"),
        "user": _A,
        "max_chunks_per_doc": _refused(1),
        "return_embeddings": _refused(False),
        "priority": _refused(0),
    },
}

EFFECTS: Mapping[type[Body], Mapping[str, str]] = {
    EmbeddingsBody: {
        "input": f"A text, a list of up to {MAX_INPUTS} texts, token ids of the model's own "
        "vocabulary (special ones included), or a list of those.",
        "model": "The served name, the model as it was given to `--embedding-model`, its folder, "
        "or `default`; may be left out.",
        "encoding_format": "`float` (the default), or `base64` of little-endian float32.",
        "dimensions": "Keep so many numbers of each vector, scaled to length 1 again.",
        "prompt_name": "One of the model's own prompts, put before each text. Default: the "
        "model's.",
        "truncate_prompt_tokens": "Cut each text to so many tokens, -1 to what the model reads. "
        "Default: `--embedding-overflow-policy`.",
    },
    RerankBody: {
        "query": "What the documents are to answer.",
        "documents": f"Up to {MAX_INPUTS} texts, or objects with a `text`.",
        "model": "The served name, the model as it was given to `--rerank-model`, its folder, or "
        "`default`; may be left out.",
        "top_n": "Return so many of the best. Default: all.",
        "return_documents": "`false` leaves the documents out of the answer.",
        "max_tokens_per_doc": "Cut each document to so many tokens. What is still too long for the "
        "model is cut in any case, and counted in `usage`.",
        "rank_fields": "Fields of documents that are objects: their texts, joined by line breaks, "
        "are the document. Default: `text`.",
    },
}
