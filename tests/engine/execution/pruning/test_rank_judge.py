"""How many likely tokens beat a drafted one in the middle of a forward. Oracle: a loop over all logits."""

import numpy as np
import pytest
import torch

from faser.engine.execution.drafting.drafter import NO_TOP
from faser.engine.execution.pruning.rank_judge import UNKNOWN, RankJudge, drafted_tokens
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.pruning.pruning_world import ForwardedStep, four_sequences, write_pair


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> ForwardedStep:
    return four_sequences(write_pair(tmp_path_factory.mktemp("pair")))


def test_counts_are_those_of_a_loop_over_all_logits(step: ForwardedStep) -> None:
    runner, batch, rows = step
    top_ids = torch.from_numpy(np.random.default_rng(3).integers(0, VOCAB_SIZE, (5, 30)))
    top_ids[1] = NO_TOP
    top_ids[2, 10:] = NO_TOP
    drafted = drafted_tokens(rows, batch, top_ids)
    assert drafted.judged_by.tolist() == [0, 1, 9, 10, 11]
    own = [rows[0].token_ids[1], rows[0].token_ids[2], *rows[3].token_ids[1:]]
    assert drafted.token_ids.tolist() == own
    assert drafted.slots.tolist() == [0, 0, 3, 3, 3]
    top_ids[3, :4] = own[3]  # a token does not beat itself
    runner.begin(batch)
    runner.advance(2)
    logits = runner.logits([0, 1, 9, 10, 11]).clone()
    expected = [
        sum(
            float(logits[t, i]) > float(logits[t, token_id])
            for i in top_ids[t].tolist()
            if i not in (-1, token_id)
        )
        for t, token_id in enumerate(own)
    ]
    expected[1] = UNKNOWN
    assert RankJudge().counts(runner, drafted).tolist() == expected
    assert max(expected) > 3


def test_a_count_over_some_tokens_is_never_above_the_rank_in_all(step: ForwardedStep) -> None:
    runner, batch, rows = step
    runner.begin(batch)
    runner.advance(3)
    everything = torch.arange(VOCAB_SIZE).expand(5, -1)
    some = everything[:, torch.from_numpy(np.random.default_rng(0).permutation(VOCAB_SIZE)[:40].copy())]
    ranks = RankJudge().counts(runner, drafted_tokens(rows, batch, everything))
    counts = RankJudge().counts(runner, drafted_tokens(rows, batch, some))
    assert (counts <= ranks).all()
    assert counts.max() > 0
