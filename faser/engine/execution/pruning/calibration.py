"""How poorly a drafted token must rank after a few layers before it is as good as refused. No torch.

Owns counts of what was seen: at a layer, for a band of temperatures, so many likely tokens beat the drafted one,
and it was accepted or not. Only tokens that came to be judged are counted. Knows neither rows nor seconds.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BAND_EDGES = (0.0, 0.5)  # temperatures: 0, up to .5, above
MOST_FALSE = 0.02  # of flagged tokens would have been accepted
_Z = 2.326  # 99 %, one-sided: of many counts the smallest is taken, after every step anew
_KEPT = 0.5 ** (1 / 20_000)  # of what is known of a layer after one more token


class PruneCalibration:
    """Thresholds for num_layers layers, learnt from counts of 0 … most beating tokens.

    A threshold is the smallest count of at least 1 from which on no more than MOST_FALSE of the tokens were
    accepted, by an upper confidence bound (Wilson's), which takes 266 refused ones at the least.

    usable: [L], whether there is a threshold for any temperature. false_shares: [L] bound on the share of flagged
    tokens that would be accepted, of the worst band with a threshold; 1 where there is none. Both to be read.
    """

    def __init__(self, num_layers: int, most: int) -> None:
        self.never = most + 1  # a threshold that no count reaches
        self._seen = np.zeros((num_layers, len(BAND_EDGES) + 1, most + 1, 2))  # [layer, band, count, accepted]
        self._thresholds = np.full(self._seen.shape[:2], self.never)
        self.usable = np.zeros(num_layers, dtype=np.bool_)
        self.false_shares = np.ones(num_layers)

    def add(self, layer: int, temperatures: Floats, counts: Ints, accepted: NDArray[np.bool_]) -> None:
        """Judged tokens, [T] each: what beat them at a layer, and whether they were accepted."""
        seen = self._seen[layer]
        seen *= _KEPT ** len(counts)
        np.add.at(seen, (bands(temperatures), counts, accepted.astype(np.int64)), 1.0)
        flagged = seen[:, ::-1].cumsum(1)[:, ::-1]  # [band, count, accepted]: so many beat it, or more
        bounds = upper_share(flagged[..., 1], flagged.sum(-1))
        bounds[:, 0] = 1.0  # beaten by nothing is no reason
        low = bounds <= MOST_FALSE
        found = low.any(1)
        self._thresholds[layer] = np.where(found, low.argmax(1), self.never)
        shares = bounds[np.arange(len(bounds)), low.argmax(1)]
        self.usable[layer] = found.any()
        self.false_shares[layer] = shares[found].max() if found.any() else 1.0

    def thresholds(self, layer: int, temperatures: Floats) -> Ints:
        """[T] counts from which on a token is flagged, `never` where too little is known."""
        found: Ints = self._thresholds[layer, bands(temperatures)]
        return found


def bands(temperatures: Floats) -> Ints:
    """[T] index of the band of each temperature; an edge belongs to the band below it."""
    return np.searchsorted(BAND_EDGES, temperatures, side="left")


def upper_share(good: Floats, total: Floats) -> Floats:
    """Upper end of Wilson's interval for a share, 1 where nothing was seen. Any shape."""
    number = np.maximum(total, 1e-9)
    share = np.clip(good / number, 0.0, 1.0)
    spread = _Z * np.sqrt(share * (1 - share) / number + (_Z / (2 * number)) ** 2)
    upper = (share + _Z**2 / (2 * number) + spread) / (1 + _Z**2 / number)
    return np.where(total > 0, np.minimum(upper, 1.0), 1.0)
