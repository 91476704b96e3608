"""Chooses how many tokens of the vocabulary a head drafts, by the tokens that the target generates.

In a small model the rows of the logits are most of a pass, so a head has only those of the first ids, which are
the commonest tokens if the tokenizer's merges are in order. How many rows pay depends on the text: of a vocabulary
of 151,936 the first 16,384 tokens are 89 % of English answers and 72 % of German prose, the first 65,536 are 98
and 93 %. The other tokens are never drafted, so the choice changes no answer.

    ids        0 .... sizes[0] .... sizes[1] .... sizes[2] .... V
    bucket     |  0   |      1      |      2      |      3      |
    seen         tokens that the target generated
    tried        first tokens of drafts, by the token that the target generated, where the size had that token
    hit          those of them that were right

A smaller size keeps the hits of its own buckets: the best of all tokens is the best of some of them too. What a
larger one would hit is unknown until it is tried; its further buckets count as the last bucket of the present
size.
"""

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger("faser")

CHOOSE_EVERY = 4_096  # tokens of the target
_KEPT = 0.5  # of the counts, from one choice to the next
_GAIN = 1.01  # that another size has to promise
_RATE, _DOUBT = 0.7, 32.0  # the share of hits before any draft, and as many drafts as it counts for
_LONGEST = 4  # draft tokens that a choice is made for
_FURTHER = 0.85  # the chance of a later draft token, over that of the first one: published are .74, .65, .60


class WholeVocabulary:
    """Stands in where a head always drafts all the tokens that it has."""

    sizes: tuple[int, ...] = ()
    chosen = 0

    @property
    def is_whole(self) -> bool:
        """Return whether no smaller size is chosen."""
        return True

    def drafted(self, slots: Sequence[int], first_token_ids: Sequence[int]) -> None:
        """Note nothing. See DraftVocabulary."""

    def commit(self, _slots: Sequence[int], _counts: Sequence[int], _token_ids: Sequence[int]) -> bool:
        """Return whether the size has changed, which it never does. See DraftVocabulary."""
        return False


WHOLE = WholeVocabulary()


class DraftVocabulary(WholeVocabulary):
    """Counts generated tokens, and chooses one of the sizes every CHOOSE_EVERY of them.

    sizes: ascending. pass_prices: time of a pass with each size, as a share of a step without drafts. vocab_size:
    of the target. ends: ids that every size has beyond the first ones. start: the first choice, one of the sizes.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        *,
        pass_prices: Sequence[float],
        vocab_size: int,
        ends: Sequence[int] = (),
        start: int,
    ) -> None:
        assert len(sizes) == len(pass_prices), (sizes, pass_prices)
        self.sizes = tuple(sizes)
        self.chosen = self.sizes.index(start)
        self._pass_prices = np.array(pass_prices)
        buckets = np.searchsorted(sizes, np.arange(vocab_size), side="right")
        buckets[[each for each in ends if each < vocab_size]] = 0
        self._bucket_of = buckets.astype(np.uint8)
        self._seen, self._tried, self._hit = (np.zeros(len(sizes) + 1) for _ in range(3))
        self._num_seen = 0
        self._drafted: dict[int, int] = {}

    @property
    def size(self) -> int:
        return self.sizes[self.chosen]

    @property
    def is_whole(self) -> bool:
        return self.chosen == len(self.sizes) - 1

    def drafted(self, slots: Sequence[int], first_token_ids: Sequence[int]) -> None:
        """Note the first tokens of the drafts of these slots."""
        self._drafted = dict(zip(slots, first_token_ids, strict=True))

    def commit(self, slots: Sequence[int], counts: Sequence[int], token_ids: Sequence[int]) -> bool:
        """Count the tokens of a step, given as to Drafter.commit. Returns whether the size has changed."""
        if not len(token_ids):
            return False
        said = np.asarray(token_ids)
        buckets = self._bucket_of[said]
        self._seen += self._count(buckets)
        if self._drafted:
            drafts = np.array([self._drafted.get(slot, -1) for slot in slots])
            firsts = np.cumsum(counts) - counts
            possible = (drafts >= 0) & (buckets[firsts] <= self.chosen)
            self._tried += self._count(buckets[firsts[possible]])
            self._hit += self._count(buckets[firsts[possible & (drafts == said[firsts])]])
            self._drafted = {}
        self._num_seen += len(said)
        return self._num_seen >= CHOOSE_EVERY and self._choose()

    def _count(self, buckets: NDArray[np.uint8]) -> NDArray[np.int64]:
        return np.bincount(buckets, minlength=len(self._seen))

    def _choose(self) -> bool:
        before, survival = self.chosen, self._survival()
        lengths = np.arange(1, _LONGEST + 1)
        tokens = 1 + np.cumsum(survival[:, None] ** lengths * _FURTHER ** (lengths - 1), axis=1)
        rates = (tokens / (1 + self._pass_prices[:, None] * lengths)).max(axis=1)
        best = int(rates.argmax())
        if rates[best] > _GAIN * rates[before]:
            self.chosen = best
            _log.info(
                "the MTP layer drafts from the first %s tokens now, which are %.1f %% of the latest text; "
                "expected are %.1f %% more tokens a second than with the first %s",
                f"{self.size:,}",
                100 * self._seen[: best + 1].sum() / self._seen.sum(),
                100 * (rates[best] / rates[before] - 1),
                f"{self.sizes[before]:,}",
            )
        for counts in (self._seen, self._tried, self._hit):
            counts *= _KEPT
        self._num_seen = 0
        return self.chosen != before

    def _survival(self) -> NDArray[np.float64]:
        """Return [sizes] the share of first draft tokens that would be accepted with each size."""
        tried, hit = self._tried[:-1], self._hit[:-1]
        rate = (hit.sum() + _RATE * _DOUBT) / (tried.sum() + _DOUBT)
        rates = (hit + rate * _DOUBT) / (tried + _DOUBT)
        beyond = slice(self.chosen + 1, None)
        rates[beyond] = (hit[beyond] + rates[self.chosen] * _DOUBT) / (tried[beyond] + _DOUBT)
        return np.cumsum(self._seen[:-1] / self._seen.sum() * rates)
