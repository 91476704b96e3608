"""Log probabilities as reported to the caller: those of the model, before logits processors and temperature."""

from collections.abc import Sequence

import torch
from torch import Tensor

from faser.engine.execution.sampling.distribution import first
from faser.types import PositionLogprobs

_ELEMENTS_AT_ONCE = 2**26  # 256 MiB of float32: the log probabilities take as much again


@torch.inference_mode()
def position_logprobs(
    logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> tuple[PositionLogprobs, ...]:
    """One report per row. logits: [R, V] float32, not written to. token_ids, num_top: one per row.

    rank counts the tokens with a larger logit, plus 1: equal logits share a rank. top is in the order of
    `distribution`, and shorter than num_top only where the vocabulary is. Rows are processed in parts, to bound
    memory.
    """
    step = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    return tuple(
        report
        for at in range(0, len(token_ids), step)
        for report in _of(logits[at : at + step], token_ids[at : at + step], num_top[at : at + step])
    )


def _of(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[PositionLogprobs]:
    """Waits for the device twice: for whether leading tokens are tied, and for one copy of all numbers."""
    on_gpu = logits.device.type == "cuda"
    host = torch.tensor(token_ids, dtype=torch.int64, pin_memory=on_gpu)
    chosen = host.to(logits.device, non_blocking=True)[:, None]
    logprobs = logits.log_softmax(-1)  # not logsumexp: its bits may depend on the number of rows
    ranks = (logits > logits.gather(-1, chosen)).sum(-1, keepdim=True) + 1
    top_ids = first(logits, max(num_top, default=0))
    # float64 holds every float32, rank and token id.
    parts = (logprobs.gather(-1, chosen), ranks, logprobs.gather(-1, top_ids), top_ids)
    numbers = torch.cat([each.double() for each in parts], -1).tolist()
    width = top_ids.shape[-1]
    return [
        PositionLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=int(rank),
            top=tuple(zip(map(int, found[width : width + num]), found[: min(num, width)], strict=True)),
        )
        for token_id, (logprob, rank, *found), num in zip(token_ids, numbers, num_top, strict=True)
    ]
