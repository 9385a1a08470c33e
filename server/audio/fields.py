"""What each field of the audio forms does here, and in words."""

from __future__ import annotations

from collections.abc import Mapping

from vllm_mlx.server.audio.schemas import TranscriptionForm, TranslationForm
from vllm_mlx.server.openai.fields import FieldPolicy, FieldUse
from vllm_mlx.server.openai.schemas import Body

_E = FieldPolicy(FieldUse.ENFORCED)


def _refused(*no_ops: object) -> FieldPolicy:
    return FieldPolicy(FieldUse.REFUSED, no_ops)


def _all(names: str) -> dict[str, FieldPolicy]:
    return dict.fromkeys(names.split(), _E)


POLICIES: Mapping[type[Body], Mapping[str, FieldPolicy]] = {
    TranscriptionForm: {
        **_all("file model prompt response_format temperature language keywords stream"),
        **_all("timestamp_granularities"),
        # The windows that the model itself hears in.
        "chunking_strategy": _refused("auto"),
        "include": _refused([]),
        "known_speaker_names": _refused([]),
        "known_speaker_references": _refused([]),
        "languages": _refused([]),
    },
    TranslationForm: _all(
        "file model prompt response_format temperature stream timestamp_granularities"
    ),
}

_SHARED = {
    "file": "The sound: wav, mp3 or flac; with ffmpeg on the server also mp4, m4a, webm, ogg, aac, "
    "aiff and caf. What it is its bytes say, not its name. At most `--max-audio-mb` and "
    "`--max-audio-minutes`.",
    "model": "The served name, the model as it was given to `--stt-model`, its folder, or "
    "`default`; may be left out.",
    "prompt": "Text that comes before, or words that are likely to come: the model goes on in its "
    "style and spelling.",
    "response_format": "`json`, `text`, `srt`, `verbose_json` or `vtt`. Default: `json`.",
    "temperature": "0 to 1. 0, the default, takes the likeliest words, and draws a window again, "
    "ever more freely, that came out badly; any other is taken as it is.",
    "timestamp_granularities": "`segment` (the default), `word` or both, with `verbose_json`.",
    "stream": "True sends the text as events, with each window of 30 s what is new; with `json` or "
    "`text`.",
}

EFFECTS: Mapping[type[Body], Mapping[str, str]] = {
    TranscriptionForm: {
        **_SHARED,
        "language": "What is spoken, as `de` or `german`; found out where nobody says it.",
        "keywords": "Words that are likely to come, put before the `prompt`.",
    },
    TranslationForm: {**_SHARED},
}
