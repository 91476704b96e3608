"""Rows and masks of a batch, held against their definition, row by row."""

import pytest
import torch

from faser.distill.batch import make_batch
from tests.distill.small import SAMPLES, STEPS


@pytest.mark.parametrize("every", [1, 2])
def test_each_row_takes_and_predicts_what_its_place_says(every: int) -> None:
    """Seen to catch: a loss on rows of the prompt, distributions shifted by one."""
    batch = make_batch(SAMPLES, STEPS, every=every)
    at = first_row = 0
    for number, one in enumerate(SAMPLES):
        assert int(batch.starts[number]) == at
        for row in range(one.prompt_tokens, len(one.token_ids) - 1, every):
            index = int(batch.drafting[at])
            assert index == first_row + row - 1
            assert batch.positions[index] == row
            assert batch.token_ids[index] == one.token_ids[row]
            torch.testing.assert_close(batch.states[index], one.states[row - 1])
            for step in range(STEPS):
                predicted = row + step + 1
                inside = predicted < len(one.token_ids)
                assert bool(batch.valid[step, at]) == inside
                if not inside:
                    assert batch.said[step, at] == -1
                    assert not batch.wanted_probs[step, at].any()
                    continue
                assert batch.next_ids[step, at] == one.token_ids[row + step]
                assert batch.said[step, at] == one.token_ids[predicted]
                place = row + step - one.prompt_tokens  # the distribution after token row + step
                torch.testing.assert_close(batch.wanted_probs[step, at], one.top_probs[place])
                assert torch.equal(batch.wanted_ids[step, at], one.top_ids[place])
            at += 1
        first_row += len(one.token_ids) - 1
    assert at == len(batch.drafting) == int(batch.starts[-1])


@pytest.mark.parametrize("every", [1, 2])
def test_a_drafting_row_sees_the_rows_up_to_itself(every: int) -> None:
    batch = make_batch(SAMPLES, STEPS, every=every)
    for number, one in enumerate(SAMPLES):
        for index, place in enumerate(range(0, one.drafting_rows, every)):
            seen = batch.mask[number, index] == 0
            assert seen.nonzero().flatten().tolist() == list(range(one.prompt_tokens + place))
