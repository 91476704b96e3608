"""Tokens of rows from their logits, left where they are chosen until somebody asks for them.

On a CPU they are chosen at once, by a SamplingKernels. On a device they are chosen there and brought to the host while
it goes on: whoever waits gets them, and who feeds them to the next forward need not wait.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.metadata import SamplingMetadata, TruncationFlags
from faser.engine.execution.sampling.noise import Purpose, uniforms
from faser.kernels.interface.device_sampling_kernels import DeviceSamplingKernels, DeviceSamplingMetadata
from faser.kernels.interface.graph_capture import GraphCapture, Readback, StagingBuffer
from faser.kernels.interface.sampling_kernels import NO_TOKEN, Ints, SamplingKernels, TruncationParams


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """token_ids: [N]; NO_TOKEN where logits are no numbers. leads: [N] over the best other token, of guesses."""

    token_ids: Ints
    leads: NDArray[np.float64] | None = None


class PendingTokens(Protocol):
    """Tokens that are being chosen."""

    @property
    def tokens(self) -> Tensor:
        """[N] int64 where the model runs, for work given to it after the choice; the next choice overwrites it."""
        ...

    def wait(self) -> SampledTokens:
        """May be asked again."""
        ...


class TokenSampler(Protocol):
    """Chooses from logits of one runner, [N, V] float32, one choice after the other."""

    def take(self, logits: Tensor, requests: SamplingMetadata) -> PendingTokens:
        """Each row's token: what its request gets. May overwrite the logits."""
        ...

    def guess(self, logits: Tensor, requests: SamplingMetadata, window: float) -> PendingTokens:
        """Each row's drafted token and its lead; see SamplingKernels.best_and_lead and nearest."""
        ...


@dataclass(frozen=True, slots=True)
class ReadyTokens:
    """A Pending that waits for nothing."""

    tokens: Tensor
    choices: SampledTokens

    def wait(self) -> SampledTokens:
        return self.choices


class HostTokenSampler:
    """See TokenSampler. choice: for the logits wherever they are; its answers come to the host."""

    def __init__(self, choice: SamplingKernels) -> None:
        self._choice = choice

    @torch.inference_mode()
    def take(self, logits: Tensor, requests: SamplingMetadata) -> ReadyTokens:
        token_ids = self._choice.best(logits)
        at = np.flatnonzero(requests.is_random & (token_ids != NO_TOKEN))
        if len(at):
            token_ids[at] = self._choice.draw(
                logits, at, token_ids[at], _shaping(requests, at), self._noise(requests, at)
            )
        return ReadyTokens(torch.from_numpy(token_ids).to(logits.device), SampledTokens(token_ids=token_ids))

    @torch.inference_mode()
    def guess(self, logits: Tensor, requests: SamplingMetadata, window: float) -> ReadyTokens:
        token_ids, leads = self._choice.best_and_lead(logits)
        at = np.flatnonzero(requests.is_random & (token_ids != NO_TOKEN))
        if len(at):
            token_ids[at], leads[at] = self._choice.nearest(
                logits, at, token_ids[at], _shaping(requests, at), self._noise(requests, at), window
            )
        tokens = torch.from_numpy(token_ids).to(logits.device)
        return ReadyTokens(tokens, SampledTokens(token_ids=token_ids, leads=leads))

    def _noise(self, requests: SamplingMetadata, at: Ints) -> NDArray[np.float64]:
        return uniforms(requests.seeds[at], requests.positions[at], Purpose.TOKEN, generate=self._choice.philox)


def _shaping(requests: SamplingMetadata, at: Ints) -> TruncationParams:
    return TruncationParams(
        temperature=requests.temperature[at],
        min_p=requests.min_p[at],
        top_k=requests.top_k[at],
        top_p=requests.top_p[at],
    )


_WORDS_A_ROW = 5  # of 64 bits: top_k, seed, position, top_p, and temperature beside log_min_p
_LINE = 4  # rows; parts begin at multiples of 16 bytes, so that kernels are compiled for such addresses only


class SamplingMetadataBuffer:
    """Requests at a fixed place on a device, for up to max_rows rows."""

    def __init__(self, capture: GraphCapture, max_rows: int) -> None:
        self._max_rows = max_rows
        self._room = -(-max_rows // _LINE) * _LINE
        self._stage: StagingBuffer = capture.staging_buffer(_WORDS_A_ROW * self._room, torch.int64)

    def send(self, requests: SamplingMetadata) -> None:
        """Rows beyond these are greedy ones."""
        count, room = len(requests), self._room
        most = self._max_rows
        assert count <= most, f"tokens of {count} rows are to be chosen; there is room for {most}"
        numbers = self._stage.host()
        top_k, seeds, positions, top_p = (numbers[i * room : (i + 1) * room] for i in range(4))
        narrow = numbers[4 * room :].view(np.float32)
        top_k[:count], positions[:count] = requests.top_k, requests.positions
        seeds[:count] = requests.seeds.view(np.int64)
        top_p.view(np.float64)[:count] = requests.top_p
        narrow[:count], narrow[count:room] = requests.temperature, 0.0
        narrow[room : room + count] = _log(requests.min_p)
        self._stage.send()

    def rows(self, count: int) -> DeviceSamplingMetadata:
        """What was sent last of the first rows, in place."""
        words, room = self._stage.device, self._room
        top_k, seeds, positions, top_p = (words[i * room : i * room + count] for i in range(4))
        narrow = words[4 * room :].view(torch.float32)
        return DeviceSamplingMetadata(
            temperature=narrow[:count],
            log_min_p=narrow[room : room + count],
            top_k=top_k,
            top_p=top_p.view(torch.float64),
            seeds=seeds,
            positions=positions,
        )


def _log(min_p: NDArray[np.float64]) -> NDArray[np.float32] | float:
    """Rounded as engine/execution/sampling/distribution.py does."""
    if not min_p.any():
        return -np.inf
    found: NDArray[np.float32] = torch.from_numpy(min_p).log().float().numpy()
    return found


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """A Pending whose values are on their way. leads_at: words before the leads; None: none were asked for."""

    tokens: Tensor
    count: int
    fetch: Readback
    leads_at: int | None = None

    def wait(self) -> SampledTokens:
        (words,) = self.fetch.wait()
        if self.leads_at is None:
            return SampledTokens(token_ids=words)
        leads: NDArray[np.float32] = words[self.leads_at :].view(np.float32)[: self.count]
        return SampledTokens(token_ids=words[: self.count], leads=leads.astype(np.float64))


class DeviceTokenSampler:
    """See TokenSampler. Where tokens are chosen, for up to max_rows rows: all of it at fixed places, for recordings.

    The methods in between are what a recording of `take` or `guess` consists of.
    """

    def __init__(
        self, choice: DeviceSamplingKernels, capture: GraphCapture, device: torch.device, max_rows: int
    ) -> None:
        self._choice = choice
        self._capture = capture
        self._requests = SamplingMetadataBuffer(capture, max_rows)
        # Tokens, then leads, in one piece of memory: one copy brings both.
        self._leads_at = -(-max_rows // _LINE) * _LINE
        self._words = torch.zeros(self._leads_at + -(-max_rows // 2), dtype=torch.int64, device=device)
        self.tokens = self._words[:max_rows]
        self._leads = self._words[self._leads_at :].view(torch.float32)

    @torch.inference_mode()
    def take(self, logits: Tensor, requests: SamplingMetadata) -> DeviceTokens:
        cuts = requests.cuts
        self.send(requests, cuts)
        self.run_take(logits, cuts)
        return self.taken(len(requests))

    @torch.inference_mode()
    def guess(self, logits: Tensor, requests: SamplingMetadata, window: float) -> DeviceTokens:
        cuts = requests.cuts
        self.send(requests, cuts)
        self.run_guess(logits, window, cuts)
        return self.guessed(len(requests))

    def send(self, requests: SamplingMetadata, cuts: TruncationFlags) -> None:
        """What a choice looks at of its rows: nothing where all are greedy. cuts: of the requests."""
        if cuts.random:
            self._requests.send(requests)

    def run_take(self, logits: Tensor, cuts: TruncationFlags) -> None:
        count = len(logits)
        rows, chosen = self._requests.rows(count), self.tokens[:count]
        self._choice.take(logits, rows, chosen, random=cuts.random, top_k=cuts.top_k, top_p=cuts.top_p)

    def run_guess(self, logits: Tensor, window: float, cuts: TruncationFlags) -> None:
        count = len(logits)
        rows, chosen, leads = self._requests.rows(count), self.tokens[:count], self._leads[:count]
        self._choice.guess(
            logits, rows, window, chosen, leads, random=cuts.random, top_k=cuts.top_k, top_p=cuts.top_p
        )

    def taken(self, count: int) -> DeviceTokens:
        tokens = self.tokens[:count]
        return DeviceTokens(tokens, count, self._capture.readback((tokens,)))

    def guessed(self, count: int) -> DeviceTokens:
        words = self._words[: self._leads_at + -(-count // 2)]
        return DeviceTokens(self.tokens[:count], count, self._capture.readback((words,)), self._leads_at)
