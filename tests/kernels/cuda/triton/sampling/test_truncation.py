"""The tokens that top_k and top_p keep are those of a sorted vocabulary, ties included.

Oracle: Python's sort by (likelihood, id), and sums of Python's whole numbers.

Bugs these tests have been seen to catch: tokens counted whose range begins with other bits, a place too far for
every gathered token, the counter of gathered tokens not reset, ids compared one off or not at all, sums of ties
cut off when divided, the key's own weight counted before it, ranges of two widths that overlap, none near the top.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.kernels.cuda.triton.common import jit
from faser.kernels.cuda.triton.sampling.token_kernels import TokenKernels
from faser.kernels.cuda.triton.sampling.truncation import _ranges
from faser.kernels.cuda.triton.sampling.workspace import SamplingWorkspace
from tests.kernels.cuda.triton.rows import DEVICE, NO_CUT, Case, Cut

REFERENCE = TorchSamplingKernels()
BLOCK = 16
# At which tokens lie, in nats below the most likely one: where ranges begin or change their width, and between.
LEVELS = [
    0.0,
    1e-6,
    1 / 1024,
    0.1,
    np.nextafter(np.float32(0.25), np.float32(0)),
    0.25,
    0.2501,
    1.0,
    1.5,
    3.0,
    7.9,
]
LEVELS += [31.0, 32.0, 59.0, 61.0, 70.0, np.inf]


def probs(case: Case, most_gathered: int) -> NDArray[np.int64]:
    """Fixed-point probabilities by the kernels, [R, V]."""
    num_rows, width = case.logits.shape
    space = SamplingWorkspace(num_rows, width, DEVICE, block=BLOCK, most_gathered=most_gathered)
    shaped = case.shaped()
    TokenKernels(space).fixed_point_probs(shaped, **case.asks)
    return shaped.logits.cpu().numpy().astype(np.int64)


def kept(whole: list[int], scaled: list[float], cut: Cut) -> list[int]:
    """The probabilities of a row that stay. whole: of all its tokens. scaled: in their order of likelihood."""
    min_p, top_k, top_p = cut
    assert min_p == 0
    order = sorted(range(len(whole)), key=lambda token: (-scaled[token], token))
    if top_k:
        order = order[:top_k]
    if top_p < 1:
        wanted = int(np.ceil(np.float64(top_p) * np.float64(sum(whole[token] for token in order))))
        found = 0
        for count, token in enumerate(order, 1):
            found += whole[token]
            if found >= wanted:
                order = order[:count]
                break
    stays = set(order)
    return [prob if token in stays else 0 for token, prob in enumerate(whole)]


def check(case: Case, most_gathered: int = 4096) -> None:
    everything = replace(case, cuts=[NO_CUT] * len(case.cuts))
    logits = case.logits.clone()
    REFERENCE.fixed_point_probs(logits, np.arange(len(logits)), REFERENCE.best(logits), everything.metadata)
    whole = logits.long().tolist()
    found = probs(case, most_gathered).tolist()
    for row, cut in enumerate(case.cuts):
        assert found[row] == kept(whole[row], case.logits[row].tolist(), cut), (row, cut)


def case_of(logits: NDArray[np.float32], cuts: list[Cut], temperature: float = 1.0) -> Case:
    return Case(
        logits=torch.from_numpy(logits),
        temperature=np.full(len(cuts), temperature, dtype=np.float32),
        cuts=cuts,
        seeds=np.zeros(len(cuts), dtype=np.uint64),
        positions=np.zeros(len(cuts), dtype=np.int64),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Two rows of tokens at few levels, so that there are ties, or at levels of their own."""
    width = draw(st.integers(17, 32))
    cuts = [
        (
            0.0,
            draw(st.sampled_from([0, 1, 2, 7, 16, 31, 100])),
            draw(st.sampled_from([1e-9, 0.3, 0.9, 1 - 1e-12, 1.0])),
        )
        for _ in range(2)
    ]
    levels = st.sampled_from(LEVELS) if draw(st.booleans()) else st.floats(0, 12, width=32)
    below = np.array([draw(st.lists(levels, min_size=width, max_size=width)) for _ in cuts], dtype=np.float32)
    below[:, draw(st.integers(0, width - 1))] = 0
    return case_of(-below, cuts, draw(st.sampled_from([1.0, 0.7])))


@pytest.mark.full
@settings(max_examples=10)
@given(case=cases(), most_gathered=st.sampled_from([2, 4096]))
def test_what_is_kept_is_what_a_sorted_vocabulary_keeps(case: Case, most_gathered: int) -> None:
    check(case, most_gathered)


@pytest.mark.parametrize("most_gathered", [4, 32])
@pytest.mark.full(but=("32",))
def test_of_equal_tokens_the_lower_ids_are_kept(most_gathered: int) -> None:
    """Also where there are more of them than a program keeps in registers."""
    cuts: list[Cut] = [(0.0, 20, 1.0), (0.0, 18, 0.6)]
    logits = np.zeros((len(cuts), 30), dtype=np.float32)
    logits[:, 3:] = -0.5
    check(case_of(logits, cuts), most_gathered)


@pytest.mark.parametrize("most_gathered", [4, 32])
@pytest.mark.parametrize("nats", [0.0, 5.0])
@pytest.mark.full(but=("5.0-4",))
def test_tokens_of_one_range_are_told_apart(nats: float, most_gathered: int) -> None:
    """min_p and top_k end in that range, too."""
    cuts: list[Cut] = [(0.0, 9, 1.0), (0.0, 9, 0.5), (0.0, 0, 0.6)]
    logits = np.zeros((len(cuts), 20), dtype=np.float32)
    logits[:, 1:] = -nats - np.random.default_rng(0).permutation(19) * 5e-6
    check(case_of(logits, cuts), most_gathered)


@jit
def _number_ranges(scaled, found, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(found + place, _ranges(tl.load(scaled + place)))


def test_ranges_are_in_the_order_of_likelihood() -> None:
    """Oracle: the keys in their order, of which every range has at least four here."""
    keys = (torch.arange(0, 0x7F800, dtype=torch.int64) << 12).clamp(max=0x7F800000)
    keys = keys[: len(keys) // 4096 * 4096].to(torch.int32).to(DEVICE)
    found = torch.empty_like(keys)
    _number_ranges[(len(keys) // 4096,)](-keys.view(torch.float32), found, BLOCK=4096)
    assert torch.equal(found.sort().values, found)
    assert (int(found[0]), int(found[-1])) == (0, 4095)
    assert len(set(found.tolist())) == 4096
