"""The choice of tokens by Triton for callers on the host: arrays in, arrays out, one copy each way.

For what must see each step's tokens before it goes on: penalties, log probabilities, verifiers that draw. Steps
that are recorded use device_choice. Kernels are compiled, or read from Triton's cache, when they are first called.
"""

import numpy as np
import torch
from torch import Tensor

from faser.kernels.philox import philox
from faser.kernels.token_choice import Ints, Reals, Shaping, Words
from faser.kernels.triton.tensors import next_power_of_2
from faser.kernels.triton.token_choice import TokenKernels
from faser.kernels.triton.workspace import BLOCK, NumberedRows, ShapedLogits, Workspace


class TritonTokenChoice:
    """See TokenChoice, for logits on a GPU. One lane. block: columns of a program, a power of 2.

    Workspaces are made when a vocabulary is first seen, and again when more rows come. Every method that returns
    something waits for the device.
    """

    def __init__(self, *, block: int = BLOCK) -> None:
        self._block = block
        self._kernels: dict[tuple[torch.device, int], TokenKernels] = {}

    def best(self, logits: Tensor) -> Ints:
        return self.best_and_lead(logits)[0]

    @torch.inference_mode()
    def best_and_lead(self, logits: Tensor) -> tuple[Ints, Reals]:
        results = _Results(len(logits), logits.device)
        self._for(logits).best(logits, results.token_ids, results.leads)
        return results.fetch()

    @torch.inference_mode()
    def draw(self, logits: Tensor, rows: Ints, _best: Ints, shaping: Shaping, uniforms: Reals) -> Ints:
        asked = _Asked(logits, rows, shaping, uniforms)
        results = _Results(len(rows), logits.device)
        self._for(asked.shaped.logits).choose(
            asked.shaped, results.token_ids, top_k=asked.top_k, top_p=asked.top_p
        )
        return results.fetch()[0]

    @torch.inference_mode()
    def nearest(
        self, logits: Tensor, rows: Ints, _best: Ints, shaping: Shaping, uniforms: Reals, window: float
    ) -> tuple[Ints, Reals]:
        asked = _Asked(logits, rows, shaping, uniforms)
        results = _Results(len(rows), logits.device)
        self._for(asked.shaped.logits).guess(
            asked.shaped, window, results.token_ids, results.leads, top_k=asked.top_k, top_p=asked.top_p
        )
        return results.fetch()

    @torch.inference_mode()
    def masses(self, logits: Tensor, rows: Ints, _best: Ints, shaping: Shaping) -> None:
        asked = _Asked(logits, rows, shaping, np.zeros(len(rows)))
        picked = asked.shaped.logits
        self._for(picked).masses(asked.shaped, top_k=asked.top_k, top_p=asked.top_p)
        if picked is not logits:
            logits.index_copy_(0, asked.rows, picked)

    def philox(self, counters: Words, keys: Words) -> Words:
        return philox(counters, keys)

    def _for(self, logits: Tensor) -> TokenKernels:
        num_rows, width = logits.shape
        kernels = self._kernels.get((logits.device, width))
        if kernels is None or kernels.space.max_rows < num_rows:
            room = next_power_of_2(max(num_rows, 1))
            kernels = TokenKernels(Workspace(room, width, logits.device, block=self._block))
            self._kernels[logits.device, width] = kernels
        return kernels


class _Asked:
    """Rows and what is asked of them, sent in one copy. rows: [N] int64, on the device.

    64-bit words, `room` of them each; room is a multiple of 4, so that every part begins at a multiple of 16 bytes
    and kernels need be compiled for such addresses only:

        | top_k | rows | top_p | uniforms | temperature, log_min_p |
    """

    __slots__ = ("rows", "shaped", "top_k", "top_p")

    def __init__(self, logits: Tensor, rows: Ints, shaping: Shaping, uniforms: Reals) -> None:
        count = len(rows)
        room = max(4, -(-count // 4) * 4)
        words = np.zeros((5, room), dtype=np.int64)
        reals, narrow = words.view(np.float64), words[4].view(np.float32)
        words[0, :count], words[1, :count] = shaping.top_k, rows
        reals[2, :count], reals[3, :count] = shaping.top_p, uniforms
        narrow[:count] = shaping.temperature
        # Rounded as engine/sampling.py does.
        narrow[room : room + count] = torch.from_numpy(shaping.min_p).log().float().numpy()
        sent = torch.from_numpy(words).to(logits.device)
        sent_reals, sent_narrow = sent.view(torch.float64), sent[4].view(torch.float32)
        self.rows = sent[1, :count]
        is_all = count == len(logits) and bool((rows == np.arange(count)).all())
        self.shaped = ShapedLogits(
            logits=logits if is_all else logits.index_select(0, self.rows),
            rows=NumberedRows(
                temperature=sent_narrow[:count],
                log_min_p=sent_narrow[room : room + count],
                top_k=sent[0, :count],
                top_p=sent_reals[2, :count],
                uniforms=sent_reals[3, :count],
            ),
        )
        self.top_k, self.top_p = bool((shaping.top_k > 0).any()), bool((shaping.top_p < 1).any())


class _Results:
    """token_ids: [N] int64, leads: [N] float32, both in one piece of the device's memory."""

    __slots__ = ("_count", "_room", "_words", "leads", "token_ids")

    def __init__(self, count: int, device: torch.device) -> None:
        self._count, self._room = count, count + count % 2
        self._words = torch.zeros(2 * self._room, dtype=torch.int64, device=device)
        self.token_ids = self._words[:count]
        self.leads = self._words[self._room :].view(torch.float32)[:count]

    def fetch(self) -> tuple[Ints, Reals]:
        """Waits until they are there."""
        words = self._words.numpy(force=True)
        leads: Reals = words[self._room :].view(np.float32)[: self._count].astype(np.float64)
        return words[: self._count], leads
