"""Where the text of a sequence begins that drafts are copied from: a prediction of the answer stands before it.

    text     end of the prompt, prediction | prompt | answer so far
    context                                  … and its end occurs here as well, right before the prediction

So the answer's first tokens already find their context in the text, and what is in the prompt comes after, as more
recent. Knows no drafter.
"""

from faser.engine.contract.plan import SequenceStart

_CONTEXT = 24  # tokens of the prompt repeated before a prediction; no more are compared


def foreword(start: SequenceStart) -> tuple[int, ...]:
    """What to put before the tokens of a sequence; empty without a prediction."""
    if not start.predicted_token_ids:
        return ()
    context = start.token_ids[max(0, start.prompt_len - _CONTEXT) : start.prompt_len]
    return (*context, *start.predicted_token_ids)
