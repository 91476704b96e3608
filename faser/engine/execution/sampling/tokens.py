"""Tokens of rows from their logits, as they are sampled where the model runs.

On a CPU a token is known at once. On a device it stays there: the next forward reads it where it is, and a copy
travels to the host while the device goes on; only `wait` waits for that copy.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.sampling.parameters import Purpose, noise_words
from faser.kernels.interface.graph_capture import GraphCapture, Readback, StagingBuffer
from faser.kernels.interface.sampling import (
    DeviceSamplingKernels,
    DeviceSamplingMetadata,
    SamplingKernels,
    SamplingMetadata,
    TruncationFlags,
)
from faser.types.arrays import NO_TOKEN, Floats, Ints, Words


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """token_ids: [N]; NO_TOKEN where logits are not numbers.

    margins: [N], of draft tokens: over the best other.
    """

    token_ids: Ints
    margins: Floats | None = None


class PendingTokens(Protocol):
    """Tokens that may still be on their way to the host."""

    @property
    def tokens(self) -> Tensor:
        """Return the tokens [N] int64 on the model's device, for later work; the next sampling overwrites them."""
        ...

    def wait(self) -> SampledTokens:
        """May be called again."""
        ...


class TokenSampler(Protocol):
    """Samples from the logits of one runner, [N, V] float32, one call after the other."""

    def take(self, logits: Tensor, metadata: SamplingMetadata) -> PendingTokens:
        """Each row's token. May overwrite the logits."""
        ...

    def draft(self, logits: Tensor, metadata: SamplingMetadata) -> PendingTokens:
        """Each row's draft token and its margin; see DeviceSamplingKernels.draft."""
        ...


class _LogitsOnly:
    """Token sampler of a runner that is asked for logits alone."""

    def take(self, _logits: Tensor, _metadata: SamplingMetadata) -> PendingTokens:
        raise AssertionError("this runner only gives logits")

    draft = take


LOGITS_ONLY: TokenSampler = _LogitsOnly()


def sample_on_host(kernels: SamplingKernels, logits: Tensor, metadata: SamplingMetadata) -> Ints:
    """Sample each row's token [N], NO_TOKEN where it has none. May overwrite the logits."""
    random = metadata.is_random
    if not random.any():
        return kernels.best(logits)
    at = np.flatnonzero(random)
    words = np.zeros(len(random), dtype=np.uint64)
    words[at] = _token_noise(kernels, metadata, at)
    return kernels.take(logits, metadata, words)


def draft_on_host(
    kernels: SamplingKernels, logits: Tensor, metadata: SamplingMetadata | None, ids: Ints | None = None
) -> tuple[Ints, Floats]:
    """Return each row's draft token [N], NO_TOKEN where it has none, and its margin [N].

    metadata: None: all are greedy. ids: as token_ids of SamplingKernels.predict.
    """
    token_ids, margins = kernels.best_and_margin(logits)
    if metadata is None:
        return token_ids, margins
    at = np.flatnonzero(metadata.is_random & (token_ids != NO_TOKEN))
    if len(at):
        token_ids[at], margins[at] = kernels.predict(
            logits, at, token_ids[at], metadata.among(at), _token_noise(kernels, metadata, at), ids
        )
    return token_ids, margins


def _token_noise(kernels: SamplingKernels, metadata: SamplingMetadata, at: Ints) -> Words:
    return noise_words(metadata.seeds[at], metadata.positions[at], Purpose.TOKEN, generate=kernels.philox)


@dataclass(frozen=True, slots=True)
class ReadyTokens:
    """PendingTokens that the host has already."""

    tokens: Tensor
    sampled: SampledTokens

    def wait(self) -> SampledTokens:
        return self.sampled


class HostTokenSampler:
    """Token sampler whose results come to the host; the logits may be anywhere."""

    def __init__(self, kernels: SamplingKernels) -> None:
        self._kernels = kernels

    @torch.inference_mode()
    def take(self, logits: Tensor, metadata: SamplingMetadata) -> ReadyTokens:
        token_ids = sample_on_host(self._kernels, logits, metadata)
        return ReadyTokens(torch.from_numpy(token_ids).to(logits.device), SampledTokens(token_ids=token_ids))

    @torch.inference_mode()
    def draft(self, logits: Tensor, metadata: SamplingMetadata) -> ReadyTokens:
        token_ids, margins = draft_on_host(self._kernels, logits, metadata)
        tokens = torch.from_numpy(token_ids).to(logits.device)
        return ReadyTokens(tokens, SampledTokens(token_ids=token_ids, margins=margins))


_WORDS_A_ROW = 5  # of 64 bits: top_k, seed, position, top_p, and one for temperature and log_min_p
_LINE = 4  # rows; parts begin at multiples of 16 bytes, so that kernels are compiled for such addresses only


class SamplingMetadataBuffer:
    """The metadata of up to max_rows rows at a fixed address on a device."""

    def __init__(self, capture: GraphCapture, max_rows: int) -> None:
        self._max_rows = max_rows
        self._capacity = -(-max_rows // _LINE) * _LINE
        self._stage: StagingBuffer = capture.staging_buffer(_WORDS_A_ROW * self._capacity, torch.int64)

    def send(self, metadata: SamplingMetadata) -> None:
        """Copy the metadata to the device without a wait. Rows beyond these become greedy ones."""
        count, capacity = len(metadata), self._capacity
        most = self._max_rows
        assert count <= most, f"tokens of {count} rows are to be sampled; the buffer holds {most}"
        words = self._stage.host()
        top_k, seeds, positions, top_p = (words[i * capacity : (i + 1) * capacity] for i in range(4))
        floats = words[4 * capacity :].view(np.float32)
        top_k[:count], positions[:count] = metadata.top_k, metadata.positions
        seeds[:count] = metadata.seeds.view(np.int64)
        top_p.view(np.float64)[:count] = metadata.top_p
        floats[:count], floats[count:capacity] = metadata.temperature, 0.0
        floats[capacity : capacity + count] = _log(metadata.min_p)
        self._stage.send()

    def will_change(self) -> None:
        """Work on the device writes to what was sent last."""
        self._stage.will_change()

    def rows(self, count: int) -> DeviceSamplingMetadata:
        """Views of the first rows of what was sent last."""
        words, capacity = self._stage.device, self._capacity
        top_k, seeds, positions, top_p = (words[i * capacity : i * capacity + count] for i in range(4))
        floats = words[4 * capacity :].view(torch.float32)
        return DeviceSamplingMetadata(
            temperature=floats[:count],
            log_min_p=floats[capacity : capacity + count],
            top_k=top_k,
            top_p=top_p.view(torch.float64),
            seeds=seeds,
            positions=positions,
        )


def _log(min_p: NDArray[np.float64]) -> NDArray[np.float32] | float:
    """log_min_p of DeviceSamplingMetadata, rounded as engine/execution/sampling/distribution.py does."""
    if not min_p.any():
        return -np.inf
    found: NDArray[np.float32] = torch.from_numpy(min_p).log().float().numpy()
    return found


@dataclass(frozen=True, slots=True)
class DeviceTokens:
    """PendingTokens that are being copied to the host.

    margins_at: words before the margins; None: there are none.
    """

    tokens: Tensor
    count: int
    readback: Readback
    margins_at: int | None = None

    def wait(self) -> SampledTokens:
        (words,) = self.readback.wait()
        if self.margins_at is None:
            return SampledTokens(token_ids=words)
        margins: NDArray[np.float32] = words[self.margins_at :].view(np.float32)[: self.count]
        return SampledTokens(token_ids=words[: self.count], margins=margins.astype(np.float64))


class DeviceTokenSampler:
    """Token sampler on the device, up to max_rows rows; all buffers have fixed addresses.

    `take` is send, run_take and taken; `draft` is send, run_draft and drafted. A CUDA graph contains run_take or
    run_draft. words: where the model's next inputs may come from: tokens, and fed, room for tokens that others
    have sampled for them.
    """

    def __init__(
        self, kernels: DeviceSamplingKernels, capture: GraphCapture, device: torch.device, max_rows: int
    ) -> None:
        self._kernels = kernels
        self._capture = capture
        self._metadata = SamplingMetadataBuffer(capture, max_rows)
        # Tokens, then margins, in one piece of memory: one copy brings both. Then tokens from elsewhere.
        self._margins_at = -(-max_rows // _LINE) * _LINE
        fed_at = self._margins_at + -(-max_rows // (2 * _LINE)) * _LINE
        self.words = torch.zeros(fed_at + 2 * max_rows, dtype=torch.int64, device=device)
        self.tokens = self.words[:max_rows]
        self.fed = self.words[fed_at:]
        self._margins = self.words[self._margins_at : fed_at].view(torch.float32)

    @torch.inference_mode()
    def take(self, logits: Tensor, metadata: SamplingMetadata) -> DeviceTokens:
        flags = metadata.truncation_flags
        self.send(metadata, flags)
        self.run_take(logits, flags)
        return self.taken(len(metadata))

    @torch.inference_mode()
    def draft(self, logits: Tensor, metadata: SamplingMetadata) -> DeviceTokens:
        flags = metadata.truncation_flags
        self.send(metadata, flags)
        self.run_draft(logits, flags)
        return self.drafted(len(metadata))

    def place(self, tokens: Tensor) -> int:
        """Return where these tokens begin in words, of which they are a view."""
        found = (tokens.data_ptr() - self.words.data_ptr()) // self.words.itemsize
        assert 0 <= found <= len(self.words) - len(tokens), "tokens fed back from another runner"
        return found

    def moving_positions(self) -> Tensor:
        """Return the positions [max_rows] that were sent last, for work that writes to them."""
        self._metadata.will_change()
        return self._metadata.rows(len(self.tokens)).positions

    def send(self, metadata: SamplingMetadata, flags: TruncationFlags) -> None:
        """Copy what the kernels read of the rows: nothing where all are greedy. flags: of the metadata."""
        if flags.random:
            self._metadata.send(metadata)

    def run_take(self, logits: Tensor, flags: TruncationFlags) -> None:
        """Launch the kernels of `take`."""
        count = len(logits)
        rows, chosen = self._metadata.rows(count), self.tokens[:count]
        self._kernels.take(logits, rows, chosen, random=flags.random, top_k=flags.top_k, top_p=flags.top_p)

    def run_draft(self, logits: Tensor, flags: TruncationFlags) -> None:
        """Launch the kernels of `draft`."""
        count = len(logits)
        rows, chosen, margins = self._metadata.rows(count), self.tokens[:count], self._margins[:count]
        self._kernels.draft(
            logits, rows, chosen, margins, random=flags.random, top_k=flags.top_k, top_p=flags.top_p
        )

    def taken(self, count: int) -> DeviceTokens:
        """The tokens that run_take has launched, of the first rows."""
        tokens = self.tokens[:count]
        return DeviceTokens(tokens, count, self._capture.readback((tokens,)))

    def drafted(self, count: int) -> DeviceTokens:
        """The tokens and margins that run_draft has launched, of the first rows."""
        words = self.words[: self._margins_at + -(-count // 2)]
        return DeviceTokens(self.tokens[:count], count, self._capture.readback((words,)), self._margins_at)
