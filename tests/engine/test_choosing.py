"""Tokens that are chosen for the host, and stay where the model runs."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.choosing import HostChooser
from faser.engine.requests import Requests
from faser.engine.torch_choice import TorchChoice
from faser.kernels.token_choice import Ints


class Told(TorchChoice):
    """Says the same tokens of any logits, which may be on a device that has no memory."""

    def best(self, logits: Tensor) -> Ints:
        return np.arange(len(logits))

    def best_and_lead(self, logits: Tensor) -> tuple[Ints, NDArray[np.float64]]:
        return np.arange(len(logits)), np.ones(len(logits))


def greedy(count: int) -> Requests:
    return Requests(
        temperature=np.zeros(count, dtype=np.float32),
        min_p=np.zeros(count),
        top_k=np.zeros(count, dtype=np.int64),
        top_p=np.ones(count),
        seeds=np.zeros(count, dtype=np.uint64),
        positions=np.arange(count),
    )


def test_tokens_that_are_fed_to_the_next_step_lie_on_the_device_of_the_logits() -> None:
    """A device other than the host: nothing of a model there can be indexed with what it has not got."""
    logits, chooser = torch.empty((3, 8), device="meta"), HostChooser(Told())
    for pending in (chooser.take(logits, greedy(3)), chooser.guess(logits, greedy(3), 0.05)):
        assert pending.tokens.device == logits.device
        assert pending.wait().token_ids.tolist() == [0, 1, 2]
