"""Weights rounded while they are loaded. Oracles: float64, and scales and minimums searched by brute force."""

import numpy as np
import numpy.typing as npt
import pytest
import torch

from faser.kernels.interface.low_bit.rows import INT4, INT8, FloatRows, quantise

Wide = npt.NDArray[np.float64]


def weights(rows: int, depth: int, seed: int = 0) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((rows, depth)) * rng.uniform(0.01, 0.1, (rows, 1))).astype(np.float32)


def misses(weight: npt.NDArray[np.float32], found: npt.NDArray[np.float32], size: int) -> Wide:
    """[N, groups]: sums of squares."""
    squares: Wide = (weight.astype(np.float64) - found) ** 2
    sums: Wide = squares.reshape(len(weight), -1, size).sum(2)
    return sums


def of_a_line(group: Wide, scale: float, minimum: float) -> float:
    codes = np.clip(np.rint((group - minimum) / scale), 0, 15)
    return float(((codes * scale + minimum - group) ** 2).sum())


def test_int8_is_off_by_half_a_step_of_its_group() -> None:
    """A step is the largest of 32 values over 127, and its rounding to a half float moves it by 2 ** -11."""
    weight = weights(9, 160)
    found = quantise(weight, INT8)
    assert (found.scales.astype(np.float16) == found.scales).all()
    largest = np.abs(weight).reshape(9, -1, 32).max(2)
    off = np.abs(found.decode().dequantised() - weight).reshape(9, -1, 32).max(2)
    assert (off <= largest / 127 * (0.5 + 127 * 2.0**-11 + 1e-6)).all()
    assert (off >= largest / 127 * 0.3).all()
    codes = found.codes.astype(int) - 128
    assert abs(codes).max() == 127


def test_int4_misses_less_than_plain_rounding_and_hardly_more_than_the_best_line() -> None:
    """Oracle: 60 x 60 scales and minimums for each group. Bug seen to be caught: the last line tried is kept."""
    weight = weights(4, 96)
    found = misses(weight, quantise(weight, INT4).decode().dequantised(), 32)
    plain, best = np.zeros_like(found), np.zeros_like(found)
    for row in range(4):
        for number in range(3):
            group = weight[row, 32 * number : 32 * number + 32].astype(np.float64)
            low, span = group.min(), group.max() - group.min()
            plain[row, number] = of_a_line(group, span / 15, low)
            best[row, number] = min(
                of_a_line(group, span / 15 * a, low + span / 15 * b)
                for a in np.linspace(0.75, 1.15, 60)
                for b in np.linspace(-0.5, 2.0, 60)
            )
    assert (found <= plain * 1.001).all()
    assert found.sum() < 0.93 * plain.sum()
    assert found.sum() < 1.1 * best.sum()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0, 1e-6])
def test_a_group_of_one_value_is_that_value(value: float) -> None:
    weight = np.full((1, 32), value, np.float32)
    assert np.allclose(quantise(weight, INT4).decode().dequantised(), weight, rtol=2.0**-11, atol=2.0**-25)
    assert np.allclose(quantise(weight, INT8).decode().dequantised(), weight, rtol=2.0**-8, atol=2.0**-18)


def test_values_on_a_line_of_half_floats_are_kept() -> None:
    codes = np.random.default_rng(1).integers(0, 16, (5, 64))
    codes[:, ::32], codes[:, 1::32] = 0, 15
    weight = (codes * 0.125 - 0.75).astype(np.float32)
    found = quantise(weight, INT4)
    assert np.array_equal(found.decode().dequantised(), weight)
    assert np.array_equal(found.codes, codes)


def test_sizes_are_those_of_the_packed_rows() -> None:
    rows = FloatRows(weight=torch.from_numpy(weights(3, 96)), scheme=INT4)
    assert (rows.num_rows, rows.depth) == (3, 96)
    assert rows.num_bytes == quantise(weights(3, 96), INT4).num_bytes
    assert np.array_equal(rows.decode().codes, quantise(weights(3, 96), INT4).codes)
