"""Log probabilities as reported to the caller: those of the model, before logits processors and temperature.

They are numbers on the device first, whose way to the host need not be waited for, and reports afterwards.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.distribution import leading
from faser.engine.execution.sampling.edits import to_device
from faser.types.answer import PositionLogprobs

ELEMENTS_AT_ONCE = 2**26  # 256 MiB of float32: the log probabilities take as much again
_FEWEST = 64  # entries taken at least, so that a tie at the edge of the reported ones rarely reaches the last one
_FIRST = 3  # columns before the alternatives: log probability, rank, how many alternatives are certain


@torch.inference_mode()
def position_logprobs(logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]) -> list[PositionLogprobs]:
    """One report per row. logits: [R, V] float32, not written to. token_ids, num_top: one per row.

    rank counts the tokens with a larger logit, plus 1: equal logits share a rank. top is in the order of
    `distribution`, and shorter than num_top only where the vocabulary is. Rows are processed in parts, to bound
    memory.
    """
    ids, reports = np.array(token_ids, dtype=np.int64), list[PositionLogprobs]()
    for part in parts(logits):
        tops = num_top[part]
        numbers = numbers_of(logits[part], to_device(ids[part], logits.device), max(tops))
        reports += reports_of(numbers.numpy(force=True), logits[part], ids[part], tops)
    return reports


def parts(logits: Tensor) -> list[slice]:
    """Divide the rows so that the log probabilities of each part take a bounded memory."""
    step = max(1, ELEMENTS_AT_ONCE // logits.shape[-1])
    return [slice(at, at + step) for at in range(0, len(logits), step)]


@torch.inference_mode()
def numbers_of(logits: Tensor, chosen: Tensor, width: int, among: int = 0) -> Tensor:
    """Return what a report says of each row, [R, 3 + 2 * width] float64, which holds every float32, rank and id.

    chosen: [R] token ids, on the device of the logits. among: entries from which the alternatives are taken; 0:
    as many as are enough but for ties. Does not wait for the device.
    """
    logprobs = logits.log_softmax(-1)  # not logsumexp: its bits may depend on the number of rows
    at = chosen[:, None]
    ranks = (logits > logits.gather(-1, at)).sum(-1, keepdim=True) + 1
    found = leading(logits, among or max(_FEWEST, 2 * width))
    top_ids = found.token_ids[:, :width]
    columns = (logprobs.gather(-1, at), ranks, found.num_sure[:, None], logprobs.gather(-1, top_ids), top_ids)
    return torch.cat([each.double() for each in columns], -1)


def reports_of(
    numbers: NDArray[Any], logits: Tensor, token_ids: NDArray[np.int64], num_top: Sequence[int]
) -> list[PositionLogprobs]:
    """Return the reports of rows from their numbers. logits: for alternatives tied with too many others."""
    width = (numbers.shape[1] - _FIRST) // 2
    unsure = np.flatnonzero(numbers[:, _FIRST - 1] < width)
    if len(unsure):
        at, chosen = to_device(unsure, logits.device), to_device(token_ids[unsure], logits.device)
        whole = numbers_of(logits.index_select(0, at), chosen, width, logits.shape[-1])
        numbers[unsure] = whole.numpy(force=True)
    return [
        PositionLogprobs(
            token_id=token_id,
            logprob=logprob,
            rank=int(rank),
            top=tuple(zip(map(int, found[width : width + num]), found[: min(num, width)], strict=True)),
        )
        for token_id, (logprob, rank, _, *found), num in zip(
            token_ids.tolist(), numbers.tolist(), num_top, strict=True
        )
    ]
