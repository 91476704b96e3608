"""The columns of what a step samples, among sequences that sample nothing."""

from faser.engine.execution.sampling.rows import StepTokens
from faser.types.answer import PositionLogprobs, SequenceError

LOGPROBS = PositionLogprobs(token_id=5, logprob=-1.0, rank=1, top=())


def test_sequences_between_others_keep_their_tokens_errors_and_reports() -> None:
    sampled = StepTokens(
        counts=[1, 0, 2],
        token_ids=[6, 1, 5],
        errors={1: SequenceError.NOT_FINITE},
        logprobs={2: (LOGPROBS, LOGPROBS)},
    )
    assert sampled.among([0, 1, 2], 3) is sampled
    assert sampled.among([0, 2, 3], 5) == StepTokens(
        counts=[1, 0, 0, 2, 0],
        token_ids=[6, 1, 5],
        errors={2: SequenceError.NOT_FINITE},
        logprobs={3: (LOGPROBS, LOGPROBS)},
    )
