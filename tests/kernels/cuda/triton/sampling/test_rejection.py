"""Verdicts on sampled drafts are those of the rejection verifier, token by token.

Bugs these tests have been seen to catch: the start of the draft left out of the noise, draft_probs of another
line, a replacement with the noise of the token, a replacement from the target, no way on where nothing is left.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.verifiers.judged_rows import lay_out
from faser.engine.execution.verifiers.rejection import Rejection
from faser.engine.execution.verifiers.verifier import DraftedRows
from faser.errors import EngineError
from faser.kernels.cuda.triton.sampling.rejection import SampledDrafts, judge_sampled
from faser.types import SamplingParams
from tests.kernels.cuda.triton.rows import DEVICE, NO_CUT, Case, make_case, on_device, zeros

WIDTH = 20


def drafts_of(case: Case, num_drafts: list[int], seed: int, *, alike: float) -> tuple[list[DraftedRows], Tensor]:
    """Drafts of these lengths, drawn from draft_probs [T, V]: in part the target's own, in part others.

    alike: the share of the target's probabilities in them.
    """
    rng = np.random.default_rng(seed)
    target_probs = (case.logits.double() / 0.8).softmax(-1).numpy()
    sequences, probs, row = [], [], 0
    for slot, num in enumerate(num_drafts):
        draft: list[int] = []
        for _ in range(num):
            other = rng.dirichlet(np.ones(WIDTH))
            line = alike * target_probs[row + len(draft)] + (1 - alike) * other
            probs.append(line / line.sum())
            draft.append(int(rng.choice(WIDTH, p=probs[-1])))
        sequences.append(DraftedRows(slot=slot, position=int(case.positions[row]), draft=tuple(draft)))
        row += num + 1
    return sequences, torch.from_numpy(np.array(probs).reshape(-1, WIDTH))


def laid_out(case: Case, num_drafts: list[int]) -> Case:
    """The case with a seed for each sequence, and consecutive positions in it."""
    owner = np.repeat(np.arange(len(num_drafts)), np.array(num_drafts) + 1)
    depth = np.concatenate([np.arange(num + 1) for num in num_drafts])
    return replace(case, seeds=case.seeds[owner], positions=100 + 50 * owner + depth)


def by_verifier(case: Case, sequences: list[DraftedRows], probs: Tensor) -> list[tuple[int, ...]]:
    """The tokens of the engine's verifier."""
    sampler = Sampler(len(sequences), WIDTH, (), "cpu")
    first = lay_out(sequences).first
    for each, row in zip(sequences, first, strict=True):
        sampling = SamplingParams(temperature=float(case.temperature[row]))
        start = SequenceStart(
            slot=each.slot, sampling=sampling, seed=int(case.seeds[row]), prompt_len=1, token_ids=(1,)
        )
        sampler.start(start)
    return [verdict.token_ids for verdict in Rejection(sampler).judge(case.logits.clone(), sequences, probs)]


def by_kernel(case: Case, sequences: list[DraftedRows], probs: Tensor) -> list[tuple[int, ...]]:
    rows = lay_out(sequences)
    drafts = SampledDrafts(
        drafted=on_device(rows.drafted),
        draft_probs=probs.to(DEVICE),
        first_row=on_device(np.append(rows.first, len(rows.drafted)).astype(np.int32)),
        max_draft=int(rows.num_drafts.max()),
    )
    kernels, shaped = case.kernels(), case.shaped()
    kernels.fixed_point_probs(shaped, top_k=False, top_p=False)
    num_accepted, final_ids = zeros(len(sequences), torch.int32), zeros(len(sequences), torch.int64)
    judge_sampled(shaped.logits, case.rows, drafts, kernels.space, num_accepted, final_ids)
    return [
        (*each.draft[:num], token_id)
        for each, num, token_id in zip(sequences, num_accepted.tolist(), final_ids.tolist(), strict=True)
    ]


@pytest.mark.parametrize("alike", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_verdicts_are_those_of_the_verifier_whatever_the_lengths(seed: int, alike: float) -> None:
    num_drafts = [2, 0, 3, 1, 1]
    case = laid_out(make_case(seed, WIDTH, [NO_CUT] * 12), num_drafts)
    sequences, probs = drafts_of(case, num_drafts, seed, alike=alike)
    assert by_kernel(case, sequences, probs) == by_verifier(case, sequences, probs)


def test_a_greedy_request_accepts_its_most_likely_token_only() -> None:
    case = laid_out(make_case(3, WIDTH, [NO_CUT] * 4, temperature=0.0), [1, 1])
    sequences, probs = drafts_of(case, [1, 1], 3, alike=0.9)
    assert by_kernel(case, sequences, probs) == by_verifier(case, sequences, probs)


def test_where_nothing_is_left_the_replacement_is_from_the_target() -> None:
    """Drafts with too much probability everywhere are refused now and then, and leave no residual."""
    case = laid_out(make_case(4, WIDTH, [NO_CUT] * 16), [1] * 8)
    sequences, probs = drafts_of(case, [1] * 8, 4, alike=1.0)
    found = by_kernel(case, sequences, 4 * probs)
    assert any(len(tokens) == 1 for tokens in found)
    assert found == by_verifier(case, sequences, 4 * probs)


def test_a_row_that_can_choose_nothing_accepts_nothing() -> None:
    case = laid_out(make_case(5, WIDTH, [NO_CUT] * 4), [1, 1])
    sequences, probs = drafts_of(case, [1, 1], 5, alike=1.0)
    case.logits[0] = float("nan")
    assert by_kernel(case, sequences, probs)[0] == (-1,)


def test_probabilities_of_other_drafts_are_refused_by_shape() -> None:
    case = laid_out(make_case(6, WIDTH, [NO_CUT] * 4), [1, 1])
    sequences, probs = drafts_of(case, [1, 1], 6, alike=1.0)
    with pytest.raises(EngineError, match=r"draft_probs has shape \(1, 20\); the kernel needs \(2, 20\)"):
        by_kernel(case, sequences, probs[:1])
