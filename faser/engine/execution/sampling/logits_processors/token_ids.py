"""Token ids of a request as an array."""

from collections.abc import Iterable

import numpy as np

from faser.kernels.interface.sampling.sampling_kernels import Ints


def distinct(token_ids: Iterable[int], vocab_size: int) -> Ints:
    """[N] int64, ascending. Ids outside the vocabulary are refused before a request gets here."""
    found = np.unique(np.array(tuple(token_ids), dtype=np.int64))
    assert not len(found) or 0 <= found[0] <= found[-1] < vocab_size, "token id outside the vocabulary"
    return found
