"""Log probabilities as reported to the caller: of the model itself, before bias, penalties and temperature."""

from collections.abc import Sequence

import torch
from torch import Tensor

from faser.engine.ranking import first
from faser.types import PositionLogprobs


def position_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> tuple[PositionLogprobs, ...]:
    """One report per row. logits: [R, V] float32, not written to. token_ids, num_top: one per row.

    rank counts the tokens with a larger logit, plus 1: equal logits share a rank. top is in the order of
    `ranking`, and shorter than num_top only where the vocabulary is.
    """
    chosen = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)[:, None]
    logprobs = logits.log_softmax(-1)  # not logsumexp: its bits may depend on the number of rows
    ranks = (logits > logits.gather(-1, chosen)).sum(-1) + 1
    top_ids = first(logits, max(num_top, default=0))
    columns = zip(
        token_ids,
        logprobs.gather(-1, chosen)[:, 0].tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        logprobs.gather(-1, top_ids).tolist(),
        num_top,
        strict=True,
    )
    return tuple(
        PositionLogprobs(
            token_id=token_id, logprob=logprob, rank=rank, top=tuple(zip(ids[:num], values[:num], strict=True))
        )
        for token_id, logprob, rank, ids, values, num in columns
    )
