"""The pace of prefill beside running rows: what is learnt of simulated devices, and kept to."""

from __future__ import annotations

import pytest

from vllm_mlx.engine.core.prefill_pace import MIN_PACED_TOKENS, PrefillPace


class Device:
    """Take time for rows and prompt tokens; `is_late` computes a piece after the tokens are read.

    Drives a pace step by step and notes the time between two tokens of the rows.
    """

    def __init__(
        self, pace: PrefillPace, *, decode_s: float, token_s: float, is_late: bool
    ) -> None:
        self.pace = pace
        self.decode_s = decode_s
        self.token_s = token_s
        self.now_s = 0.0
        self.gaps: list[float] = []
        self.sizes: list[int] = []
        self._is_late = is_late
        self._owed_s = 0.0

    def step(self, num_rows: int, *, has_prompt: bool) -> None:
        """Do one step."""
        self.pace.collected(self.now_s)
        size = self.pace.tokens if has_prompt else 0
        self.pace.planned(num_rows, size)
        piece_s = size * self.token_s
        before, self._owed_s = self._owed_s, piece_s if self._is_late else 0.0
        gap = self.decode_s + before + (0.0 if self._is_late else piece_s)
        self.now_s += gap
        self.gaps.append(gap)
        self.sizes.append(size)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("token_s", [0.0002, 0.001, 0.002])
def test_gaps_come_to_the_target(token_s: float, is_late: bool) -> None:
    """Whatever a token costs, and whenever it shows, gaps soon lie near the target."""
    device = Device(PrefillPace(0.1, 512), decode_s=0.01, token_s=token_s, is_late=is_late)
    for _ in range(5):
        device.step(4, has_prompt=False)
    for _ in range(40):
        device.step(4, has_prompt=True)
    most = 0.01 + 512 * token_s
    expected = min(0.1, most)
    assert all(0.8 * expected < gap < 1.1 * expected for gap in device.gaps[-15:])


def test_it_follows_a_device_that_becomes_slower() -> None:
    """When tokens take five times as long, as far into a long prompt, pieces become smaller."""
    device = Device(PrefillPace(0.1, 512), decode_s=0.01, token_s=0.0004, is_late=False)
    for _ in range(20):
        device.step(4, has_prompt=True)
    device.token_s *= 5
    for _ in range(20):
        device.step(4, has_prompt=True)
    assert device.gaps[-1] == pytest.approx(0.1, rel=0.1)


def test_prompts_advance_whatever_the_target() -> None:
    """Where rows alone take longer than the target, the smallest piece is still computed."""
    device = Device(PrefillPace(0.05, 512), decode_s=0.2, token_s=0.001, is_late=False)
    for index in range(30):
        device.step(4, has_prompt=index > 5)
    assert device.sizes[-1] == MIN_PACED_TOKENS
    small = PrefillPace(0.05, 8)
    assert small.tokens == 8


def test_without_a_target_nothing_is_cut() -> None:
    """No target leaves the largest piece, however slow the device is."""
    device = Device(PrefillPace(None, 512), decode_s=1.0, token_s=1.0, is_late=False)
    for _ in range(5):
        device.step(4, has_prompt=True)
    assert device.sizes == [512] * 5


def test_one_long_pause_does_not_set_the_pace() -> None:
    """A step that something else held up counts a little only."""
    device = Device(PrefillPace(0.1, 512), decode_s=0.01, token_s=0.0004, is_late=False)
    for _ in range(20):
        device.step(4, has_prompt=True)
    before = device.sizes[-1]
    device.now_s += 60.0
    device.step(4, has_prompt=True)
    assert device.sizes[-1] > before / 3
