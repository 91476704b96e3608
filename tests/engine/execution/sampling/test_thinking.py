"""Thinking budgets. Oracle: the whole output, searched for its marks anew at every token."""

import random

import pytest
import torch

from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.sampling.edits import ProcessedRows
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.thinking import Thinking
from faser.engine.execution.sampling.verify import SampleAndMatch
from faser.types.sampling import SamplingParams, ThinkingBudget
from tests.engine.execution.sampling.sampled import Drafted, layout, outcomes

VOCAB, END = 6, 5
BEGIN = (3, 4)


def budget(max_tokens: int, *, is_open: bool, repeats: bool = False) -> ThinkingBudget:
    return ThinkingBudget(max_tokens=max_tokens, begin=BEGIN, end=END, is_open=is_open, repeats=repeats)


def start(asked: ThinkingBudget, output: tuple[int, ...] = (), slot: int = 0) -> SequenceStart:
    sampling = SamplingParams(temperature=0.0, thinking_budget=asked)
    return SequenceStart(slot=slot, sampling=sampling, seed=0, prompt_len=1, token_ids=(0, *output))


def allowed(asked: ThinkingBudget, output: tuple[int, ...]) -> set[int]:
    """The tokens that may follow an output."""
    thinking, spent, since = asked.is_open, 0, 0  # since: where the text outside of the thinking begins
    opened = asked.is_open
    for at, token_id in enumerate(output):
        if thinking:
            thinking = token_id != END
            spent, since = spent + thinking, at + 1
        elif (asked.repeats or (not opened and at < 4)) and output[since : at + 1][-2:] == BEGIN:
            thinking = opened = True
    if thinking and spent >= asked.max_tokens:
        return {END}
    again = asked.repeats and not thinking and spent >= asked.max_tokens and output[since:][-1:] == BEGIN[:1]
    return {*range(VOCAB)} - ({BEGIN[1]} if again else set())


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_every_row_allows_what_the_budget_leaves(seed: int, is_open: bool, repeats: bool) -> None:
    """Also behind drafts that no answer has: their rows must not be wrong, only unreached."""
    rng = random.Random(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(rng.choice((1, 2, 3, 4, 3, 4, END)) for _ in range(rng.randint(0, most)))

    asked = budget(rng.randint(0, 4), is_open=is_open, repeats=repeats)
    output = some(3)
    processor = Thinking()
    processor.start(start(asked, output))
    for _ in range(6):
        draft = some(6)
        rows = [draft[:count] for count in range(len(draft) + 1)]
        edit = processor.edit(ProcessedRows([0] * len(rows), [9] * len(rows), rows))
        logits = torch.randn(len(rows), VOCAB)
        if edit is not None:
            edit(logits)
        found = [{*row.nonzero()[:, 0].tolist()} for row in logits.softmax(-1)]
        assert found == [allowed(asked, output + each) for each in rows]
        said = some(3)
        processor.accept([0] * len(said), said)
        output += said


def test_a_draft_past_the_budget_ends_with_the_closing_mark() -> None:
    sampler = Sampler(1, VOCAB, ())
    sampler.start(start(budget(2, is_open=True)))
    logits = torch.zeros(4, VOCAB)
    logits[:, 1] = 1.0
    verifier = SampleAndMatch(sampler)
    (found,) = outcomes(verifier.verify(logits.clone(), layout([Drafted(0, 1, (1, 1, 1))]), None))
    assert found.token_ids == (1, 1, END)
    (found,) = outcomes(verifier.verify(logits.clone(), layout([Drafted(0, 1, (1, 1, END))]), None))
    assert found.token_ids == (1, 1, END, 1)


def test_the_closing_mark_is_forced_whatever_else_the_request_asks() -> None:
    sampling = SamplingParams(
        temperature=0.9,
        thinking_budget=budget(0, is_open=True),
        allowed_token_ids=(1,),
        bad_words=((END,),),
        logit_bias=((END, -100.0),),
    )
    sampler = Sampler(1, VOCAB, ())
    sampler.start(SequenceStart(slot=0, sampling=sampling, seed=0, prompt_len=1, token_ids=(0,)))
    (found,) = outcomes(SampleAndMatch(sampler).verify(torch.randn(1, VOCAB), layout([Drafted(0, 1)]), None))
    assert found.token_ids == (END,)


def test_an_answer_that_has_thought_is_edited_no_longer() -> None:
    processor = Thinking()
    processor.start(start(budget(9, is_open=True)))
    processor.start(start(budget(9, is_open=False), slot=1))
    processor.start(start(budget(9, is_open=True, repeats=True), slot=2))
    processor.accept([0, 1, 1, 1, 1, 2], [END, 1, 1, 1, 1, END])
    assert [*processor.slots] == [2]
    processor.release(2)
    assert not processor.slots
