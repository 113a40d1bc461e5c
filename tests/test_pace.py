"""pace.py: costs are found again from steps that were made of them."""

import random

import pytest

from pace import Pace


def test_the_pace_is_learnt_from_steps_that_are_disturbed_now_and_then():
    rng, pace = random.Random(5), Pace()
    for _ in range(300):
        num_decoding, num_read = rng.randint(0, 20), rng.choice([0, 0, 20, 100, 512])
        ms = (3 + 0.5 * num_decoding + 0.25 * num_read) * rng.uniform(0.95, 1.05) * (rng.random() < 0.05 and 10 or 1)
        pace.observe(num_decoding, num_read, 0, ms)
    for num_decoding in (1, 4, 16, 20):
        assert pace.tokens_beside(num_decoding) == pytest.approx((3 + 0.5 * num_decoding) / 0.25, rel=0.15)


def test_the_pace_follows_a_machine_that_slows_down_however_long_nothing_was_read():
    pace = Pace()
    for num_decoding, num_read, ms in [(0, 512, 50)] * 5 + [(16, 0, 10)] * 5000 + [(16, 75, 25)] * 50:
        pace.observe(num_decoding, num_read, 0, ms)
    assert pace.tokens_beside(16) == pytest.approx(10 / (15 / 75), rel=0.1)
