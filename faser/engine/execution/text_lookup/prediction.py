"""A prediction of the answer, as text to draft from: it is put before the tokens of its sequence.

    text     end of the prompt, prediction | prompt | answer so far
    context                                  … and its end occurs here as well, right before the prediction

So the first tokens of the answer already find their context in the text, and the prompt, which comes after the
prediction, counts as more recent.
"""

from faser.engine.contract.plan import SequenceStart

_CONTEXT = 24  # tokens of the prompt repeated before a prediction; look-ups compare no more


def prediction_prefix(start: SequenceStart) -> tuple[int, ...]:
    """The tokens to put before those of a sequence; empty without a prediction."""
    if not start.predicted_token_ids:
        return ()
    context = start.token_ids[max(0, start.prompt_len - _CONTEXT) : start.prompt_len]
    return (*context, *start.predicted_token_ids)
