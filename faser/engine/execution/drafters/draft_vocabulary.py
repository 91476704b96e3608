"""Draft tokens of a vocabulary that is a part of the target's, as heads have: a draft sampler around another one.

The other one samples in the small vocabulary, whose tokens are in the order of the target's ids. So what depends
on that order (ties, and where along [0, 1] a token's probability lies) is as in the whole vocabulary, with a
probability of 0 for all other tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from faser.engine.execution.drafters.draft_samplers import DraftRows, DraftSampler, DraftTokens


class DraftVocabularySampler:
    """See DraftSampler. logits of `choose`: [R, Vd]; its tokens, and its probabilities, are of the target's V.

    draft_ids: [Vd] int64, the target's id of each token of the small vocabulary, each once. vocab_size: V.
    """

    def __init__(self, sampler: DraftSampler, draft_ids: Tensor, vocab_size: int) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        ordered, order = draft_ids.cpu().sort()
        self._order = None if torch.equal(ordered, draft_ids.cpu()) else order.to(draft_ids.device)
        self._draft_ids = ordered.to(draft_ids.device)
        self._ids = ordered.numpy()

    @property
    def in_order(self) -> bool:
        """The small vocabulary is in the order of the target's ids as it is."""
        return self._order is None

    @property
    def draws(self) -> bool:
        return self._sampler.draws

    def choose(self, logits: Tensor, rows: DraftRows) -> DraftTokens:
        if self._order is not None:
            logits = logits.index_select(1, self._order)
        found = self._sampler.choose(logits, rows)
        probs = found.probs
        if probs is not None:
            whole = probs.new_zeros(len(probs), self._vocab_size)
            probs = whole.index_copy_(1, self._draft_ids, probs)
        return replace(found, token_ids=self._ids[found.token_ids], probs=probs)
