"""Rotary angles against double precision and against the properties that the papers state.

The families' tests hold every kind of scaling against transformers; here are the table and its edges.
"""

import math

import pytest
import torch

from faser.engine.checkpoints.families.architecture import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)
from faser.engine.execution.models.rope import frequencies, rotary_angles

YARN = YarnScaling(
    factor=4.0, beta_fast=32.0, beta_slow=1.0, attention_factor=1.25, original_positions=4096, truncate=True
)


def test_the_table_holds_cosines_then_sines_of_position_times_frequency() -> None:
    """Oracle: the formula in double precision."""
    table = rotary_angles(RopeSpec(theta=10_000.0), head_dim=8, num_positions=100)
    exact = torch.tensor(
        [[position / 10_000.0 ** (2 * pair / 8) for pair in range(4)] for position in range(100)],
        dtype=torch.float64,
    )
    assert table.shape == (100, 8)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table.double(), torch.cat((exact.cos(), exact.sin()), 1), atol=1e-5, rtol=0)


def test_linear_scaling_stretches_positions() -> None:
    unscaled = rotary_angles(RopeSpec(theta=100.0), head_dim=8, num_positions=25)
    scaled = rotary_angles(RopeSpec(theta=100.0, scaling=LinearScaling(factor=4.0)), head_dim=8, num_positions=100)
    torch.testing.assert_close(scaled[::4], unscaled, atol=1e-5, rtol=0)


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    rope = RopeSpec(
        theta=500_000.0,
        scaling=Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_positions=8192),
    )
    ratio = frequencies(RopeSpec(theta=500_000.0), 128) / frequencies(rope, 128)
    wavelengths = 2 * math.pi / frequencies(RopeSpec(theta=500_000.0), 128)
    assert torch.equal(ratio[wavelengths < 8192 / 4], torch.ones(int((wavelengths < 8192 / 4).sum())))
    torch.testing.assert_close(ratio[wavelengths > 8192], torch.full_like(ratio[wavelengths > 8192], 8.0))
    assert bool((ratio.diff() >= -1e-6).all())


def test_yarn_blends_between_kept_and_divided_frequencies() -> None:
    ratio = frequencies(RopeSpec(theta=10_000.0), 128) / frequencies(RopeSpec(theta=10_000.0, scaling=YARN), 128)
    assert ratio[0] == 1.0
    assert ratio[-1] == pytest.approx(4.0)
    assert bool((ratio.diff() >= -1e-6).all())
    assert bool(((ratio > 1.01) & (ratio < 3.99)).any())


@pytest.mark.parametrize(("num_positions", "factors"), [(64, (1.0, 2.0)), (65, (3.0, 5.0))])
def test_longrope_has_its_long_factors_beyond_the_original_positions(
    num_positions: int, factors: tuple[float, ...]
) -> None:
    scaling = LongRopeScaling(short=(1.0, 2.0), long=(3.0, 5.0), attention_factor=1.0, original_positions=64)
    found = frequencies(RopeSpec(theta=100.0, scaling=scaling), 4, num_positions=num_positions)
    torch.testing.assert_close(frequencies(RopeSpec(theta=100.0), 4) / found, torch.tensor(factors))


def test_the_attention_factor_of_yarn_multiplies_cosines_and_sines() -> None:
    table = rotary_angles(RopeSpec(theta=10_000.0, scaling=YARN), head_dim=16, num_positions=50)
    lengths = table[:, :8].square() + table[:, 8:].square()
    torch.testing.assert_close(lengths, torch.full_like(lengths, 1.25**2))


def test_a_ramp_of_no_width_is_a_step() -> None:
    one_pair = YarnScaling(
        factor=2.0, beta_fast=1.0, beta_slow=1.0, attention_factor=1.0, original_positions=4096, truncate=False
    )
    ratio = frequencies(RopeSpec(theta=1e4), 64) / frequencies(RopeSpec(theta=1e4, scaling=one_pair), 64)
    assert bool(torch.isfinite(ratio).all())
    assert set(ratio.round(decimals=3).tolist()) == {1.0, 2.0}
