"""Sampling by Triton for callers on the host: arrays in, arrays out, one copy each way.

For callers that need each step's tokens before they go on: logits processors, log probabilities, verifiers that
draw. Steps in CUDA graphs use device_sampling. Kernels are compiled, or read from Triton's cache, when they are
first called; engine/execution/startup/warm_up.py calls them before the first request. Both copies use pinned
memory.
"""

import numpy as np
import torch
from torch import Tensor

from faser.kernels.cuda.device import Accelerator
from faser.kernels.cuda.staging import ReadbackPool
from faser.kernels.cuda.triton.common import next_power_of_2, upload_words
from faser.kernels.cuda.triton.sampling.token_kernels import TokenKernels
from faser.kernels.cuda.triton.sampling.workspace import BLOCK, RowsWithNoise, SamplingInputs, SamplingWorkspace
from faser.kernels.interface.sampling import SamplingMetadata, philox
from faser.types.arrays import Floats, Ints, Words


class TritonSamplingKernels:
    """Sampling kernels for logits on the accelerator's device. One lane.

    block: columns a program, a power of 2. A workspace is made when a vocabulary is first seen, and again for more
    rows. Every method that returns a result waits for the device once.
    """

    def __init__(self, accelerator: Accelerator, *, block: int = BLOCK) -> None:
        self._accelerator = accelerator
        self._readbacks = ReadbackPool(accelerator)
        self._block = block
        self._kernels: dict[int, TokenKernels] = {}  # by width of the vocabulary

    def best(self, logits: Tensor) -> Ints:
        return self.best_and_margin(logits)[0]

    @torch.inference_mode()
    def best_and_margin(self, logits: Tensor) -> tuple[Ints, Floats]:
        results = _Results(len(logits), logits.device)
        self._for(logits).best(logits, results.token_ids, results.margins)
        return results.fetch(self._readbacks)

    def take(self, logits: Tensor, metadata: SamplingMetadata, noise: Words) -> Ints:
        rows = np.arange(len(logits))
        return self.draw(logits, rows, rows, metadata, noise)  # the kernels find `best` themselves

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Ints, _best: Ints, metadata: SamplingMetadata, noise: Words) -> Ints:
        sent = _SentRows(self._accelerator, logits, rows, metadata, noise)
        results = _Results(len(rows), logits.device)
        self._for(sent.shaped.logits).choose(sent.shaped, results.token_ids, top_k=sent.top_k, top_p=sent.top_p)
        return results.fetch(self._readbacks)[0]

    @torch.inference_mode()
    def predict(
        self,
        logits: Tensor,
        rows: Ints,
        best: Ints,
        metadata: SamplingMetadata,
        noise: Words,
        token_ids: Ints | None = None,
    ) -> tuple[Ints, Floats]:
        if token_ids is not None:
            (ids,) = upload_words(self._accelerator, [token_ids])
            whole = logits.new_full((len(logits), int(token_ids[-1]) + 1), -torch.inf).index_copy_(1, ids, logits)
            found, margins = self.predict(whole, rows, best, metadata, noise)
            return np.searchsorted(token_ids, found), margins
        sent = _SentRows(self._accelerator, logits, rows, metadata, noise)
        results = _Results(len(rows), logits.device)
        self._for(sent.shaped.logits).draft(
            sent.shaped, results.token_ids, results.margins, top_k=sent.top_k, top_p=sent.top_p
        )
        return results.fetch(self._readbacks)

    @torch.inference_mode()
    def fixed_point_probs(self, logits: Tensor, rows: Ints, _best: Ints, metadata: SamplingMetadata) -> None:
        sent = _SentRows(self._accelerator, logits, rows, metadata, np.zeros(len(rows), dtype=np.uint64))
        picked = sent.shaped.logits
        self._for(picked).fixed_point_probs(sent.shaped, top_k=sent.top_k, top_p=sent.top_p)
        if picked is not logits:
            logits.index_copy_(0, sent.rows, picked)

    def philox(self, counters: Words, keys: Words) -> Words:
        return philox(counters, keys)

    def _for(self, logits: Tensor) -> TokenKernels:
        num_rows, width = logits.shape
        kernels = self._kernels.get(width)
        if kernels is None or kernels.space.max_rows < num_rows:
            capacity = next_power_of_2(max(num_rows, 1))
            kernels = TokenKernels(SamplingWorkspace(capacity, width, logits.device, block=self._block))
            self._kernels[width] = kernels
        return kernels


class _SentRows:
    """Rows and their metadata, sent in one copy without a wait. rows: [N] int64, on the device.

    All parts begin at multiples of 16 bytes, so that kernels are compiled for such addresses only.
    """

    __slots__ = ("rows", "shaped", "top_k", "top_p")

    def __init__(
        self, accelerator: Accelerator, logits: Tensor, rows: Ints, metadata: SamplingMetadata, noise: Words
    ) -> None:
        count = len(rows)
        capacity = -(-count // 4) * 4  # so that both halves of the last part begin at a multiple of 16 bytes
        narrow = np.zeros(2 * capacity, dtype=np.float32)
        narrow[:count] = metadata.temperature
        # Rounded as engine/execution/sampling/distribution.py does.
        narrow[capacity : capacity + count] = torch.from_numpy(metadata.min_p).log().float().numpy()
        self.rows, top_k, top_p, words, floats = upload_words(
            accelerator, [rows, metadata.top_k, metadata.top_p, noise, narrow.view(np.int64)]
        )
        sent_narrow = floats.view(torch.float32)
        is_all = count == len(logits) and bool((rows == np.arange(count)).all())
        self.shaped = SamplingInputs(
            logits=logits if is_all else logits.index_select(0, self.rows),
            rows=RowsWithNoise(
                temperature=sent_narrow[:count],
                log_min_p=sent_narrow[capacity : capacity + count],
                top_k=top_k,
                top_p=top_p.view(torch.float64),
                noise=words,
            ),
        )
        random = metadata.temperature > 0
        self.top_k = bool((random & (metadata.top_k > 0)).any())
        self.top_p = bool((random & (metadata.top_p < 1)).any())


class _Results:
    """token_ids: [N] int64, margins: [N] float32, both in one piece of the device's memory."""

    __slots__ = ("_capacity", "_count", "_words", "margins", "token_ids")

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._capacity = count, count + count % 2
        self._words = torch.zeros(2 * self._capacity, dtype=torch.int64, device=device)
        self.token_ids = self._words[:count]
        self.margins = self._words[self._capacity :].view(torch.float32)[:count]

    def fetch(self, readbacks: ReadbackPool) -> tuple[Ints, Floats]:
        """Waits until they are on the host."""
        (words,) = readbacks.read_back((self._words,)).wait()
        margins: Floats = words[self._capacity :].view(np.float32)[: self._count].astype(np.float64)
        return words[: self._count], margins
