"""Load a Whisper checkpoint into mlx-audio's model, in the dtype of this machine.

The library's own loader turns every checkpoint into float16, which a CPU computes many times slower
than float32, and goes on without a tokenizer until the first request.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import quantize
from mlx_audio.stt.models.whisper.tokenizer import LANGUAGES, TO_LANGUAGE_CODE
from mlx_audio.stt.models.whisper.whisper import HFTokenizerWrapper, Model, ModelDimensions

from vllm_mlx.engine.config import DtypeName
from vllm_mlx.engine.errors import InvalidRequestError, ModelLoadError, UnsupportedModelError
from vllm_mlx.engine.models.resolve import weight_files
from vllm_mlx.engine.platform import load_dtype

#: From `<|0.00|>` to `<|30.00|>`, the last tokens of every vocabulary.
_NUM_TIMES = 1501

_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


class _Tokens(HFTokenizerWrapper):
    """Know the special tokens, which the library looks up anew for each window: 0.1 s each time."""

    @functools.cached_property
    def no_speech(self) -> int | None:
        """Return the token that says that nothing is said, if there is one."""
        return cast("int | None", HFTokenizerWrapper.no_speech.fget(self))

    @functools.cached_property
    def non_speech_tokens(self) -> tuple[int, ...]:
        """Return the tokens of signs that nobody says."""
        return cast("tuple[int, ...]", HFTokenizerWrapper.non_speech_tokens.fget(self))


class _Model(Model):
    """The library's model, with one tokenizer for each language and task."""

    def get_tokenizer(self, language: str | None = None, task: str = "transcribe") -> _Tokens:
        """Return what decoding asks for the tokens."""
        tokens: _Tokens | None = self._tokens.get((language, task))
        if tokens is None:
            tokens = self._tokens[language, task] = _Tokens(
                self._processor.tokenizer,
                multilingual=self.is_multilingual,
                num_languages=self.num_languages,
                language=language,
                task=task,
            )
        return tokens


class WhisperModel:
    """Own one loaded model and its tokenizer; MLX's thread only."""

    def __init__(self, model: Any, dtype: str, weights_bytes: int) -> None:
        """Take over a model of mlx-audio with its weights and tokenizer in it."""
        self.model = model
        self.dtype = dtype
        self.weights_bytes = weights_bytes

    @property
    def is_multilingual(self) -> bool:
        """Say whether it knows other languages than English."""
        return bool(self.model.is_multilingual)

    def language_code(self, language: str) -> str:
        """Return the code of a language that a request names; raise `InvalidRequestError`."""
        name = language.strip().lower()
        code = TO_LANGUAGE_CODE.get(name, name)
        # Clients also send what they show dates in, as `en-US`.
        code = code if code in LANGUAGES else code.replace("_", "-").partition("-")[0]
        if code not in list(LANGUAGES)[: max(1, self.model.num_languages)]:
            raise InvalidRequestError(
                f"language: this model does not know {language!r}; it takes codes like en, de, ja, "
                "or names like english",
                param="language",
            )
        if not self.is_multilingual and code != "en":
            raise InvalidRequestError(
                f"language: this model knows English only, not {language!r}", param="language"
            )
        return str(code)


def language_name(code: str) -> str:
    """Return the English name of a language in small letters."""
    return str(LANGUAGES.get(code, code))


def load_whisper(folder: Path, dtype: DtypeName) -> WhisperModel:
    """Load the checkpoint in `folder`; raise `ModelLoadError`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    model_type = config.get("model_type")
    if model_type not in ("whisper", None) or not ({"d_model", "n_mels"} & set(config)):
        raise UnsupportedModelError(
            f"{folder} is a {model_type} model; speech is transcribed by whisper models"
        )
    quantization = config.pop("quantization", None)
    weights: dict[str, mx.array] = {}
    for file in weight_files(folder):
        weights.update(cast("dict[str, mx.array]", mx.load(str(file))))
    name = load_dtype(dtype, _stored_dtype(weights))
    model = _Model(ModelDimensions.from_dict(config), _DTYPES[name])
    weights = model.sanitize(weights)
    # Tied to the embedding of the tokens.
    weights.pop("proj_out.weight", None)
    if quantization is not None:
        quantize(
            model,
            group_size=quantization["group_size"],
            bits=quantization["bits"],
            class_predicate=lambda path, module: (
                isinstance(module, Linear | Embedding) and f"{path}.scales" in weights
            ),
        )
    try:
        model.load_weights(list(weights.items()), strict=True)
    except ValueError as error:
        raise ModelLoadError(f"the weights in {folder} do not fit: {error}") from error
    mx.eval(model.parameters())
    model.eval()
    model._tokens = {}
    model._processor = SimpleNamespace(tokenizer=_load_tokenizer(folder, model.dims.n_vocab))
    _set_alignment(model, folder)
    return WhisperModel(model, name, sum(array.nbytes for array in weights.values()))


def _stored_dtype(weights: dict[str, mx.array]) -> str:
    dtypes = {str(array.dtype).removeprefix("mlx.core.") for array in weights.values()}
    return next((name for name in _DTYPES if name in dtypes), "float32")


def _load_tokenizer(folder: Path, vocab_size: int) -> Any:
    """Load the tokenizer, with the times in it; raise `ModelLoadError` where there is none.

    Some files lack the times, and the library would then take them for the end of the text.
    """
    from transformers import AddedToken, WhisperTokenizerFast

    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):
        raise ModelLoadError(
            f"{folder} has no tokenizer (tokenizer.json, or vocab.json and merges.txt); take a "
            "repository in the layout of transformers"
        )
    tokenizer = WhisperTokenizerFast.from_pretrained(str(folder))
    known = tokenizer.get_vocab()
    times = [f"<|{index * 0.02:.2f}|>" for index in range(_NUM_TIMES)]
    if times[0] not in known:
        tokenizer.add_tokens([AddedToken(time, normalized=False) for time in times])
        known = tokenizer.get_vocab()
    if known[times[0]] != vocab_size - _NUM_TIMES or "<|startoftranscript|>" not in known:
        raise ModelLoadError(f"the tokenizer in {folder} is not that of its weights")
    return tokenizer


def _set_alignment(model: Any, folder: Path) -> None:
    """Take the attention heads that follow the sound, where the checkpoint names them."""
    file = folder / "generation_config.json"
    if not file.is_file():
        return
    heads = json.loads(file.read_text(encoding="utf-8")).get("alignment_heads")
    if heads:
        model.set_alignment_heads(heads)
