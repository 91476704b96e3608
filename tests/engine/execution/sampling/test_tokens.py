"""Tokens that are chosen for the host, and stay where the model runs.

Planted bugs that these tests have caught: requests of random rows not sent; those of greedy rows sent; leads read
where the last ones of another number of rows were; min_p lost.
"""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.tokens import DeviceTokenSampler, HostTokenSampler
from faser.kernels.interface.sampling import GREEDY, SamplingMetadata
from faser.types.arrays import Ints
from tests.engine.execution.runner.test_graph_runner import asked
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend

MAX_ROWS, VOCABULARY = 9, 50


class Told(TorchSamplingKernels):
    """Says the same tokens of any logits, which may be on a device that has no memory."""

    def best(self, logits: Tensor) -> Ints:
        return np.arange(len(logits))

    def best_and_margin(self, logits: Tensor) -> tuple[Ints, NDArray[np.float64]]:
        return np.arange(len(logits)), np.ones(len(logits))


def greedy(count: int) -> SamplingMetadata:
    return SamplingMetadata(
        temperature=np.zeros(count, dtype=np.float32),
        min_p=np.zeros(count),
        top_k=np.zeros(count, dtype=np.int64),
        top_p=np.ones(count),
        seeds=np.zeros(count, dtype=np.uint64),
        positions=np.arange(count),
    )


def test_tokens_that_are_fed_to_the_next_step_lie_on_the_device_of_the_logits() -> None:
    """A device other than the host: nothing of a model there can be indexed with what it has not got."""
    logits, chooser = torch.empty((3, 8), device="meta"), HostTokenSampler(Told())
    for pending in (chooser.take(logits, greedy(3)), chooser.draft(logits, greedy(3))):
        assert pending.tokens.device == logits.device
        assert pending.wait().token_ids.tolist() == [0, 1, 2]


def device_chooser(accelerator: FakeAccelerator) -> DeviceTokenSampler:
    backend = fake_backend(accelerator)
    choice = backend.device_sampling_kernels(MAX_ROWS, VOCABULARY)
    return DeviceTokenSampler(choice, backend.graph_capture, backend.device, MAX_ROWS)


def test_a_device_chooses_what_the_host_would_whoever_asked_before() -> None:
    """Oracle: HostTokenSampler. Greedy rows, of which nothing is sent, come between random ones, of any number."""
    chooser, host = device_chooser(FakeAccelerator()), HostTokenSampler(TorchSamplingKernels())
    rng, generator = np.random.default_rng(2), torch.Generator().manual_seed(3)
    for number in range(60):
        count = int(rng.integers(1, MAX_ROWS + 1))
        requests = asked(count, number, random_share=(0.0, 1.0, 0.5)[number % 3])
        logits = 3 * torch.randn(count, VOCABULARY, generator=generator)
        taken, guessed = host.take(logits.clone(), requests), host.draft(logits.clone(), requests)
        assert chooser.take(logits.clone(), requests).wait().token_ids.tolist() == taken.tokens.tolist()
        found = chooser.draft(logits.clone(), requests).wait()
        assert found.token_ids.tolist() == guessed.tokens.tolist()
        assert found.margins is not None
        assert guessed.sampled.margins is not None
        assert np.array_equal(found.margins, guessed.sampled.margins.astype(np.float32))


def test_positions_that_the_device_has_moved_are_sent_again() -> None:
    """Planted: the send skipped, since the host sends what it sent last."""
    chooser, requests = device_chooser(FakeAccelerator()), asked(MAX_ROWS, 1, random_share=1.0)
    logits = torch.randn(MAX_ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3))
    wanted = chooser.draft(logits.clone(), requests).wait().token_ids.tolist()
    moving = chooser.moving_positions()
    assert moving.tolist() == requests.positions.tolist()
    moving += 1
    assert chooser.draft(logits.clone(), requests).wait().token_ids.tolist() == wanted


def test_tokens_that_are_fed_lie_behind_those_that_are_sampled_and_no_others_may_be() -> None:
    chooser, other = device_chooser(FakeAccelerator()), device_chooser(FakeAccelerator())
    at = chooser.place(chooser.fed)
    assert chooser.place(chooser.tokens) == 0
    assert torch.equal(chooser.words[at : at + 2 * MAX_ROWS], chooser.fed)
    with pytest.raises(AssertionError, match="tokens fed back from another runner"):
        chooser.place(other.tokens)


def test_nothing_is_sent_of_greedy_rows() -> None:
    accelerator = FakeAccelerator()
    chooser = device_chooser(accelerator)
    for share, sends in ((0.0, 0), (1.0, 1)):
        requests, given = asked(4, 0, random_share=share), accelerator.given
        chooser.send(requests, requests.truncation_flags)
        assert accelerator.given - given == sends


def test_guesses_and_their_leads_come_in_one_copy() -> None:
    accelerator = FakeAccelerator()
    chooser = device_chooser(accelerator)
    given = accelerator.given
    chooser.drafted(3)
    assert accelerator.given - given == 1


def test_what_greedy_rows_ask_for_beside_a_temperature_counts_for_nothing() -> None:
    assert asked(30, 1, random_share=0.0).truncation_flags == GREEDY
