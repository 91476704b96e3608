"""HeadRunner: runs a head over rows. Owns the head's KV cache and the hidden states of its last pass.

A pass over rows of committed tokens takes the target's states; a pass over draft tokens takes, in their place, the
head's own hidden states of the rows that drafted them (arXiv 2503.01840, section 3.1).
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from faser.engine.execution.heads.head import Head
from faser.engine.execution.runner.batch import RowBatch
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.head_drafting import DraftedTokens, DraftRules, HeadRows
from faser.kernels.interface.sampling import SamplingKernels
from faser.kernels.interface.shapes import KvCache, KvShape, RowLayout


class HeadRunner:
    """To be called in inference mode. vocab_size: the target's: token ids of inputs are below it.

    kv: size of the head's cache, which the runner allocates. states: the target's buffer, [max_rows, K * H].
    shares_cache_of: a runner of another version of the head; None: the cache is this one's own.
    """

    def __init__(
        self,
        head: Head,
        backend: Backend,
        kv: KvShape,
        *,
        states: Tensor,
        vocab_size: int,
        shares_cache_of: "HeadRunner | None" = None,
    ) -> None:
        self.head = head
        self.vocab_size = vocab_size
        self._backend = backend
        self._block_size = kv.block_size
        self._cache: KvCache = backend.allocate_kv(kv) if shares_cache_of is None else shares_cache_of._cache
        self._hidden: Tensor | None = None  # [R, Hh]
        drafting, stack = backend.head_drafting, head.drafting_stack
        takes = drafting is not None and stack is not None and drafting.takes(stack)
        self._drafting = drafting if takes else None
        self._dummy_states = states.zero_()  # for passes that are only timed

    @property
    def sampling_kernels(self) -> SamplingKernels | None:
        return self._backend.sampling_kernels

    def read(self, batch: RowBatch, states: Tensor) -> Tensor:
        """A pass over committed tokens. states: [R, K * H] of the positions before them.

        Returns hidden [R, Hh], valid until the next pass.
        """
        return self._run(batch.token_ids, batch.layout, self.head.features(states))

    def draft(self, token_ids: Tensor, layout: RowLayout, hidden: Tensor) -> Tensor:
        """A pass over draft tokens, [R] int64 on the CPU.

        hidden: [R, Hh] of the rows that drafted them; may be what `draft` returned.
        """
        return self._run(token_ids, layout, hidden)

    def logits_of(self, hidden: Tensor) -> Tensor:
        """[N, Vd] float32 of the head's vocabulary; valid until the next call. hidden: [N, Hh]."""
        return self.head.logits(hidden)

    @property
    def drafts_in_one_call(self) -> bool:
        return self._drafting is not None

    def draft_all(self, batch: RowBatch, states: Tensor, rules: DraftRules) -> DraftedTokens:
        """All tokens of the drafts that follow committed tokens, as `read`, `logits_of` and `draft` give them.

        batch, states: as for `read`; every sequence is there with its last token.
        """
        stack = self.head.drafting_stack
        assert self._drafting is not None, "see drafts_in_one_call"
        assert stack is not None
        rows = HeadRows(token_ids=batch.token_ids, states=states, layout=batch.layout)
        return self._drafting.draft(stack, self._cache, rows, rules, self.head.draft_room(batch.num_rows))

    @torch.inference_mode()
    def forward(self, batch: RowBatch, _num_layers: int | None = None) -> None:
        """A pass as `read` runs it, to be timed."""
        self._hidden = self.read(batch, self._dummy_states[: batch.num_rows])

    @torch.inference_mode()
    def fill_cache(self, layout: RowLayout) -> None:
        """Store some keys and values where a pass over these rows would store its own."""
        num_rows = len(layout.positions)
        token_ids = torch.arange(num_rows, device=self._backend.device) % self.vocab_size
        features = self.head.features(self._dummy_states[:num_rows])
        self.head.run(token_ids, features, self._cache, self._backend.plan(layout, self._block_size))

    @torch.inference_mode()
    def logits(self, rows: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Of rows of the last `forward`."""
        assert self._hidden is not None, "logits before forward"
        numbers = torch.from_numpy(np.asarray(rows, dtype=np.int64)).to(self._hidden.device)
        return self.logits_of(self._hidden.index_select(0, numbers))

    def _run(self, token_ids: Tensor, layout: RowLayout, features: Tensor) -> Tensor:
        plan = self._backend.plan(layout, self._block_size)
        return self.head.run(token_ids.to(self._backend.device), features, self._cache, plan)
