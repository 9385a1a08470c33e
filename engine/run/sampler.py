"""Draw one token for every row of a batch, each with its own settings and its own noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mlx.core as mx
import msgspec
import numpy as np

#: Candidates that filters look at before they resort to sorting the vocabulary.
NUM_CANDIDATES = 256

#: Below this a temperature is greedy: dividing logits by less would overflow float32.
MIN_TEMPERATURE = 1e-5

_MASK64 = 2**64 - 1


class RowSampling(msgspec.Struct, frozen=True, kw_only=True):
    """Say how one row's next token is drawn; one is made for each row at every step."""

    #: 0 is greedy.
    temperature: float = 1.0
    #: Keeps the likeliest tokens that together reach this probability; 1 keeps all.
    top_p: float = 1.0
    #: Keeps this many of the likeliest tokens; 0 keeps all.
    top_k: int = 0
    #: Keeps tokens of at least this share of the likeliest one's probability; 0 keeps all.
    min_p: float = 0.0
    seed: int = 0
    #: Index of the drawn token in its sequence; with the seed, all that the noise depends on.
    position: int = 0
    #: Token ids that may not be drawn.
    banned: tuple[int, ...] = ()
    #: The only token that may be drawn, whatever the logits say; None for a free draw.
    forced: int | None = None

    @property
    def is_greedy(self) -> bool:
        """Say whether the likeliest token is the only one that can be drawn."""
        return (
            self.temperature < MIN_TEMPERATURE
            or self.top_k == 1
            or self.top_p <= 0.0
            or self.min_p >= 1.0
        )

    @property
    def has_ranks(self) -> bool:
        """Say whether the tokens must be ranked to know which are kept."""
        return self.top_k > 0 or self.top_p < 1.0


class Draw:
    """Hold one step's draw: lazy arrays until `read`.

    Whether the candidates hold a row's whole nucleus is known on the device only. `read` learns
    it together with the tokens and redraws the rare row where they do not, so that neither a
    full sort nor a wait stands in the way of the others. Evaluated on the thread that made it.
    """

    def __init__(
        self,
        tokens: mx.array,
        settled: mx.array | None,
        ranked: Sequence[int],
        logits: mx.array,
        rows: Sequence[RowSampling | None],
    ) -> None:
        #: `[R]` uint32, final for every row but those that `settled` says are not.
        self._tokens = tokens
        #: `[len(ranked)]` bool, None where every row is final.
        self._settled = settled
        self._ranked = ranked
        self._logits = logits
        self._rows = rows

    @property
    def tokens(self) -> mx.array:
        """Return the tokens `[R]` before any row is drawn again."""
        return self._tokens

    @property
    def arrays(self) -> list[mx.array]:
        """Return what to hand to `mx.async_eval` so that `read` finds it computed."""
        return [self._tokens] if self._settled is None else [self._tokens, self._settled]

    def read(self) -> list[int]:
        """Wait for the tokens and return one for each row; a dead row's is any."""
        mx.eval(self.arrays)
        tokens: list[int] = self._tokens.tolist()  # type: ignore[assignment]
        if self._settled is not None:
            settled = np.array(self._settled)
            again = [row for row, done in zip(self._ranked, settled, strict=True) if not done]
            if again:
                for row, token in zip(again, self._redraw(again), strict=True):
                    tokens[row] = token
        return tokens

    def _redraw(self, indices: list[int]) -> list[int]:
        rows = [row for index in indices if (row := self._rows[index]) is not None]
        redrawn: list[int] = _draw_sorted(_take_rows(self._logits, indices), rows).tolist()  # type: ignore[assignment]
        return redrawn


def draw(logits: mx.array, rows: Sequence[RowSampling | None]) -> Draw:
    """Draw one token for each row of `logits`.

    `logits` is `[R, V]` in any float type (computed on in float32) and is not changed; a row of
    None is dead and gets any token. Lazy: nothing is evaluated here.

    Which tokens are kept is mlx-lm's definition (`sample_utils.make_sampler`): top_p, min_p and
    top_k all look at the model's own distribution, before temperature, and a token must pass all
    three; so the kept set does not change with the temperature. All three keep the upper end of
    one ranking, so they are one threshold on the logits; tokens equal to it are kept. The token
    is then the argmax of `logits / temperature + noise`, with Gumbel noise: a draw from the
    softmax over the kept tokens.

    The noise of a row depends on its seed and position (and the token it is added to) only: not
    on other rows, their settings, or the path that either takes. Greedy rows are plain argmax.

    Penalties, biases and grammar masks belong before this, as changed logits: what they rule out
    (-inf) is then neither drawn nor counted by a filter. A row without any finite logit, or with
    NaN or +inf, gets some token below V; no other row notices.
    """
    logits = _force(_ban(logits, rows), rows)
    live = [(index, row) for index, row in enumerate(rows) if row is not None]
    if all(row.is_greedy for _, row in live):
        return Draw(mx.argmax(logits, axis=-1), None, (), logits, rows)
    greedy = [index for index, row in live if row.is_greedy]
    hot = [(index, row) for index, row in live if not row.is_greedy]
    plain = [(index, row) for index, row in hot if not row.has_ranks]
    ranked = [(index, row) for index, row in hot if row.has_ranks]
    wide = [(index, row) for index, row in ranked if row.top_k >= NUM_CANDIDATES]
    narrow = [(index, row) for index, row in ranked if row.top_k < NUM_CANDIDATES]
    if logits.shape[-1] <= NUM_CANDIDATES:
        wide, narrow = ranked, []

    parts: list[tuple[list[int], mx.array]] = []
    if greedy:
        parts.append((greedy, mx.argmax(_take_rows(logits, greedy), axis=-1)))
    for pairs, draw_rows in ((plain, _draw_plain), (wide, _draw_sorted)):
        if pairs:
            indices = [index for index, _ in pairs]
            tokens = draw_rows(_take_rows(logits, indices), [row for _, row in pairs])
            parts.append((indices, tokens))
    settled = None
    narrow_indices = [index for index, _ in narrow]
    if narrow:
        tokens, settled = _draw_candidates(
            _take_rows(logits, narrow_indices), [row for _, row in narrow]
        )
        parts.append((narrow_indices, tokens))
    return Draw(_in_row_order(parts, len(rows)), settled, narrow_indices, logits, rows)


def sample(logits: mx.array, rows: Sequence[RowSampling | None]) -> mx.array:
    """Draw one token for each row and return them as `[R]` uint32.

    As `draw`, which the step loop should prefer: this one waits for the logits where a row's
    kept tokens must be ranked, and is lazy otherwise.
    """
    drawn = draw(logits, rows)
    if len(drawn.arrays) == 1:
        return drawn.arrays[0]
    return mx.array(drawn.read(), dtype=mx.uint32)


def noise_key(seed: int, position: int) -> tuple[int, int]:
    """Mix a seed and a position into the two 32-bit words of one random key.

    Twice the finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", 2014), so that neighbouring seeds and positions share nothing. Any integer is a
    seed; equal modulo 2**64 is equal.
    """
    mixed = _mix64(_mix64(seed & _MASK64) ^ (position & _MASK64))
    return mixed >> 32, mixed & 0xFFFFFFFF


def _mix64(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def _noise(rows: Sequence[RowSampling], vocab_size: int) -> mx.array:
    """Return Gumbel noise `[len(rows), vocab_size]`, each row from its own key."""
    keys = mx.array(np.array([noise_key(row.seed, row.position) for row in rows], dtype=np.uint32))
    noise: mx.array = mx.vmap(lambda key: mx.random.gumbel((vocab_size,), key=key))(keys)
    return noise


def _draw_plain(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Draw rows that keep every token, or those over a share of the best one's probability."""
    scores = logits * _column([1.0 / row.temperature for row in rows])
    scores = scores + _noise(rows, logits.shape[-1])
    if any(row.min_p > 0.0 for row in rows):
        scores = mx.where(logits < _min_p_threshold(logits, rows), -mx.inf, scores)
    return mx.argmax(scores, axis=-1)


def _draw_candidates(logits: mx.array, rows: Sequence[RowSampling]) -> tuple[mx.array, mx.array]:
    """Draw from the best `NUM_CANDIDATES` tokens of each row.

    Returns the tokens and, for each row, whether they are final: whether no token outside the
    candidates can be kept.
    """
    ids = mx.argpartition(logits, -NUM_CANDIDATES, axis=-1)[:, -NUM_CANDIDATES:]
    values = mx.take_along_axis(logits, ids, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids = mx.take_along_axis(ids, order, axis=-1)
    values = mx.take_along_axis(values, order, axis=-1)
    threshold = _rank_threshold(values, logits, rows)
    last = values[:, -1:]
    settled = (threshold > last) | (last == -mx.inf)
    noise = mx.take_along_axis(_noise(rows, logits.shape[-1]), ids, axis=-1)
    scores = values * _column([1.0 / row.temperature for row in rows]) + noise
    best = mx.argmax(mx.where(values < threshold, -mx.inf, scores), axis=-1, keepdims=True)
    return mx.take_along_axis(ids, best, axis=-1)[:, 0], settled[:, 0]


def _draw_sorted(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Draw rows that may keep any number of tokens, by sorting as many as the widest can keep."""
    count = min(max(row.top_k or logits.shape[-1] for row in rows), logits.shape[-1])
    best = logits if count == logits.shape[-1] else mx.topk(logits, count, axis=-1)
    threshold = _rank_threshold(-mx.sort(-best, axis=-1), logits, rows)
    scores = logits * _column([1.0 / row.temperature for row in rows])
    scores = scores + _noise(rows, logits.shape[-1])
    return mx.argmax(mx.where(logits < threshold, -mx.inf, scores), axis=-1)


def _rank_threshold(values: mx.array, logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Return the least logit that each row keeps, `[R, 1]`.

    `values` are the row's best logits in descending order, all of them or the candidates only;
    where the answer lies beyond the candidates, it is the last of them.
    """
    count = values.shape[-1]
    ranks = [min(row.top_k or count, count) - 1 for row in rows]
    threshold = mx.take_along_axis(values, mx.array(ranks)[:, None], axis=-1)
    if any(row.top_p < 1.0 for row in rows):
        log_total = mx.logsumexp(logits, axis=-1, keepdims=True)
        mass = mx.cumsum(mx.exp(values - log_total), axis=-1)
        # A token stays while those above it have not reached top_p; the first always does.
        limit = _column([row.top_p if row.top_p < 1.0 else math.inf for row in rows])
        kept = mx.sum(mass < limit, axis=-1, keepdims=True)
        nucleus = mx.take_along_axis(values, mx.minimum(kept, count - 1), axis=-1)
        threshold = mx.maximum(threshold, nucleus)
    if any(row.min_p > 0.0 for row in rows):
        threshold = mx.maximum(threshold, _min_p_threshold(logits, rows))
    return threshold


def _min_p_threshold(logits: mx.array, rows: Sequence[RowSampling]) -> mx.array:
    """Return the least logit that min_p keeps, `[R, 1]`; -inf for rows without one."""
    offsets = [math.log(row.min_p) if row.min_p > 0.0 else -math.inf for row in rows]
    return mx.max(logits, axis=-1, keepdims=True) + _column(offsets)


def _ban(logits: mx.array, rows: Sequence[RowSampling | None]) -> mx.array:
    """Return `logits` with every row's banned ids at -inf; ids outside the vocabulary are none."""
    vocab_size = logits.shape[-1]
    banned = [
        (index, token)
        for index, row in enumerate(rows)
        if row is not None
        for token in row.banned
        if 0 <= token < vocab_size
    ]
    if not banned:
        return logits
    where = np.array(banned, dtype=np.uint32)
    return logits.at[mx.array(where[:, 0]), mx.array(where[:, 1])].minimum(-mx.inf)


def _force(logits: mx.array, rows: Sequence[RowSampling | None]) -> mx.array:
    """Return `logits` with nothing but the forced token in the rows that have one."""
    forced = [
        (index, row.forced)
        for index, row in enumerate(rows)
        if row is not None and row.forced is not None
    ]
    if not forced:
        return logits
    where = np.array(forced, dtype=np.int32)
    alone = mx.arange(logits.shape[-1]) == mx.array(where[:, 1])[:, None]
    changed = logits + mx.zeros((), dtype=logits.dtype)
    changed[mx.array(where[:, 0])] = mx.where(alone, 0.0, -mx.inf).astype(logits.dtype)
    return changed


def _take_rows(logits: mx.array, indices: Sequence[int]) -> mx.array:
    """Return the given rows in float32."""
    if len(indices) == logits.shape[0]:
        return logits.astype(mx.float32)
    return logits[mx.array(list(indices))].astype(mx.float32)


def _in_row_order(parts: Sequence[tuple[Sequence[int], mx.array]], num_rows: int) -> mx.array:
    """Put the tokens of the parts back in the order of the rows; rows in no part get the first."""
    place = [0] * num_rows
    drawn = [index for indices, _ in parts for index in indices]
    for position, index in enumerate(drawn):
        place[index] = position
    return mx.concatenate([tokens for _, tokens in parts])[mx.array(place)]


def _column(values: Sequence[float]) -> mx.array:
    """Return per-row values as `[R, 1]` float32."""
    return mx.array(np.array(values, dtype=np.float32))[:, None]
