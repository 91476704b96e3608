"""How poorly a drafted token must rank after a few layers before early pruning flags it. No torch.

Owns a histogram of verified tokens: by layer, by band of temperatures, by how many likely tokens beat the drafted
one there, and by whether it was accepted. Knows neither rows nor seconds.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BAND_EDGES = (0.0, 0.5)  # temperatures: 0, up to .5, above
MOST_FALSE = 0.02  # share of the flagged tokens that may have been right
_Z = 2.326  # 99 %, one-sided: the smallest of many counts is taken, after every step anew
_KEPT = 0.5 ** (1 / 20_000)  # weight that a layer's counts keep when one more token is counted


class PruneCalibration:
    """Thresholds for L = num_layers layers, learned from counts of 0 … num_top beating tokens.

    A threshold is the smallest count of at least 1 from which on no more than MOST_FALSE of the tokens were
    accepted, by Wilson's upper confidence bound. That takes at least 266 refused tokens.

    usable: [L], whether there is a threshold for any temperature. false_shares: [L] bound on the share of flagged
    tokens that would be accepted, in the worst band with a threshold; 1 without one. Both are only to be read.
    """

    def __init__(self, num_layers: int, num_top: int) -> None:
        self.never = num_top + 1  # a threshold that no count reaches
        self._seen = np.zeros((num_layers, len(BAND_EDGES) + 1, num_top + 1, 2))  # [layer, band, count, accepted]
        self._thresholds = np.full(self._seen.shape[:2], self.never)
        self.usable = np.zeros(num_layers, dtype=np.bool_)
        self.false_shares = np.ones(num_layers)

    def add(self, layer: int, temperatures: Floats, counts: Ints, accepted: NDArray[np.bool_]) -> None:
        """[T] each: how many likely tokens beat verified ones at a layer, and whether these were right."""
        seen = self._seen[layer]
        seen *= _KEPT ** len(counts)
        np.add.at(seen, (bands(temperatures), counts, accepted.astype(np.int64)), 1.0)
        flagged = seen[:, ::-1].cumsum(1)[:, ::-1]  # [band, count, accepted]: at least this count
        bounds = upper_share(flagged[..., 1], flagged.sum(-1))
        bounds[:, 0] = 1.0  # a token that nothing beats is never flagged
        low = bounds <= MOST_FALSE
        found = low.any(1)
        self._thresholds[layer] = np.where(found, low.argmax(1), self.never)
        shares = bounds[np.arange(len(bounds)), low.argmax(1)]
        self.usable[layer] = found.any()
        self.false_shares[layer] = shares[found].max() if found.any() else 1.0

    def thresholds(self, layer: int, temperatures: Floats) -> Ints:
        """[T] counts from which on a token is flagged; `never` while too few tokens were seen."""
        found: Ints = self._thresholds[layer, bands(temperatures)]
        return found


def bands(temperatures: Floats) -> Ints:
    """[T] index of each temperature's band; an edge belongs to the band below it."""
    return np.searchsorted(BAND_EDGES, temperatures, side="left")


def upper_share(good: Floats, total: Floats) -> Floats:
    """Upper end of Wilson's interval for the share good / total; 1 where total is 0. Any shape."""
    number = np.maximum(total, 1e-9)
    share = np.clip(good / number, 0.0, 1.0)
    spread = _Z * np.sqrt(share * (1 - share) / number + (_Z / (2 * number)) ** 2)
    upper = (share + _Z**2 / (2 * number) + spread) / (1 + _Z**2 / number)
    return np.where(total > 0, np.minimum(upper, 1.0), 1.0)
