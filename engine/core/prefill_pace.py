"""Choose how many prompt tokens to compute beside running rows, from what they were seen to take.

Pure. A step that computes one token of each row and a piece of a prompt takes the sum of both,
and that sum is the time between two tokens of the rows.
"""

from __future__ import annotations

#: Fewer tokens than this are not worth a forward, whatever the target.
MIN_PACED_TOKENS = 32
#: Weight of the newest observation.
_WEIGHT = 0.3
#: An observation counts as at most so many times what was known: something else was in the way.
_MAX_JUMP = 4.0
#: A step that takes so many times one without a piece is one in which the piece shows.
_SHOWS = 1.2


class PrefillPace:
    """Own what was learnt of a step's time; used by the engine thread.

    `target_s` is the time between two tokens to keep to, None for any; `most` the largest piece.
    """

    def __init__(self, target_s: float | None, most: int) -> None:
        self._target_s = target_s
        self._most = most
        self._last_s: float | None = None
        self._num_rows = 0
        #: Prompt tokens of the last step and the one before: GPUs compute a step's piece after
        #: its rows' tokens were read, so that it shows in the next one's time.
        self._pieces = (0, 0)
        self._decode_s: float | None = None
        self._token_s: float | None = None

    @property
    def tokens(self) -> int:
        """Return the prompt tokens that the next step may compute beside rows that decode."""
        if self._target_s is None:
            return self._most
        least = min(MIN_PACED_TOKENS, self._most)
        if self._token_s is None:
            return max(least, self._most // 4)
        room_s = self._target_s - (self._decode_s or 0.0)
        return max(least, min(self._most, int(room_s / self._token_s)))

    def planned(self, num_rows: int, num_tokens: int) -> None:
        """Note that a step computes a token of so many rows, and so many prompt tokens."""
        self._num_rows = num_rows
        self._pieces = (num_tokens, self._pieces[0])

    def collected(self, now_s: float) -> None:
        """Learn from the time since the last call; call when a step's tokens have been read."""
        last_s, self._last_s = self._last_s, now_s
        if last_s is None or self._num_rows == 0:
            return
        step_s = now_s - last_s
        num_tokens = max(self._pieces)
        if num_tokens == 0:
            # Whatever else the machine does only adds to a time.
            known_s = step_s if self._decode_s is None else min(self._decode_s, step_s)
            self._decode_s = _blend(known_s, step_s)
            return
        decode_s = self._decode_s or 0.0
        if min(self._pieces) == 0 and not 0.0 < _SHOWS * decode_s < step_s:
            # Of a lone piece nobody knows in which of two steps it shows.
            return
        token_s = max(0.0, step_s - decode_s) / num_tokens
        self._token_s = max(_blend(self._token_s, token_s), 1e-9)


def _blend(known: float | None, seen: float) -> float:
    """Return what is known after one more observation."""
    if known is None:
        return seen
    return known + _WEIGHT * (min(seen, _MAX_JUMP * known) - known)
