"""The partition `sm`: a GPU's processors in two groups that share none, each with a CUDA green context.

Owns the contexts and streams of all splits.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TypeVar

from faser.engine.execution.overlap.partition import Draft, OverlapResult, Verify
from faser.engine.execution.overlap.streams import LanePair, StreamLanes, gpu_lane
from faser.errors import ConfigError
from faser.kernels.cuda.lanes import GROUP_UNIT, GreenContextError, GreenDriver, Group, LaneDevice, open_stream

D = TypeVar("D")
V = TypeVar("V")

_log = logging.getLogger("faser.engine")

# The verify lane's part of the processors, as a fraction, the preferred one first; the draft lane has the others.
# A pass of a draft model moves its weights and computes little, and a few processors already move a large part of
# what the whole GPU can: a seventh, an eleventh and a quarter cover draft models of different sizes. Verification
# keeps three quarters or more: it is bound by arithmetic where overlap pays, and slows down with every processor
# that it loses.
_VERIFY_PARTS = ((6, 7), (10, 11), (3, 4))
# Every split takes a set of CUDA graphs for each lane, and measurements at the start. No split has been measured
# on a GPU, so there is one; more are worth their graphs once figures say which.
MOST_SPLITS = 1


class GreenContexts:
    """See Partition. Verification has the group of each split, drafting the processors that the split left over.

    All splits, contexts and streams are made here and live until `close`. Lanes change their groups between two
    calls of `run_both`, when neither lane has work. A CUDA graph captured on a lane must not be replayed after
    `close`.

    verify_counts: processors that a verify lane may have, in the order of preference; the driver may round up. A
    split that the driver refuses is left out; the first most_splits that it grants are made. Raises
    GreenContextError where it grants none.
    """

    name = "sm"

    def __init__(
        self,
        driver: GreenDriver,
        device: LaneDevice,
        verify_counts: Sequence[int],
        *,
        most_splits: int = MOST_SPLITS,
    ) -> None:
        self._driver = driver
        self._device = device
        self._made = ExitStack()
        self.refused_splits: dict[int, str] = {}  # processors of the verify lane, and the driver's words
        with ExitStack() as unfinished:
            self._pairs = self._make_pairs(verify_counts, most_splits, unfinished)
            self._lanes = StreamLanes(device)
            self._made = unfinished.pop_all()
        self.resize(self.shares()[0])

    @property
    def share(self) -> float:
        return self._share

    def shares(self) -> tuple[float, ...]:
        return tuple(self._pairs)

    def resize(self, share: float) -> None:
        pair = self._pairs.get(share)
        if pair is None:
            raise ConfigError(f"a draft lane's share is {share}; of this GPU it is one of {self.shares()}")
        self._share, self._pair = share, pair

    def run_both(self, draft: Draft[D], verify: Verify[V]) -> OverlapResult[D, V]:
        return self._lanes.run_both(self._pair, draft, verify)

    def close(self) -> None:
        with self._made:
            self._lanes.close()

    def _make_pairs(
        self, verify_counts: Sequence[int], most_splits: int, made: ExitStack
    ) -> dict[float, LanePair]:
        """By the draft lane's share, ascending. made: receives what destroys the contexts and streams."""
        pairs: dict[float, LanePair] = {}
        refusals: list[GreenContextError] = []
        for count in verify_counts:
            if len(pairs) == most_splits:
                break
            try:
                group, rest = self._driver.split(count)
                share = rest.count / self._driver.num_processors
                if rest.count and share not in pairs:
                    pairs[share] = self._make_pair(group, rest, share, made)
            except GreenContextError as refusal:
                _log.info("lanes with %d processors for verification are left out: %s", count, refusal)
                refusals.append(refusal)
                self.refused_splits[count] = str(refusal)
        if not pairs and refusals:
            raise refusals[0]
        if not pairs:
            total, counts = self._driver.num_processors, tuple(verify_counts)
            raise GreenContextError(f"{total} processors cannot be divided: groups of {counts} leave none")
        return dict(sorted(pairs.items()))

    def _make_pair(self, group: Group, rest: Group, share: float, made: ExitStack) -> LanePair:
        with ExitStack() as unfinished:
            pair = LanePair(
                draft=gpu_lane("draft", share, rest.count, self._stream(rest, unfinished)),
                verify=gpu_lane("verify", 1 - share, group.count, self._stream(group, unfinished)),
            )
            made.push(unfinished.pop_all())
        return pair

    def _stream(self, group: Group, made: ExitStack) -> object:
        return self._device.adopt(open_stream(self._driver, group, made))


def default_verify_counts(num_processors: int) -> tuple[int, ...]:
    """Processors of the verify lane in the splits that `sm` tries, in that order: multiples of 8.

    Of 132: 112, 120, 96, which leave 20, 12, 36 for drafting. Empty for fewer than 9 processors.
    """
    counts = (num_processors * part // whole // GROUP_UNIT * GROUP_UNIT for part, whole in _VERIFY_PARTS)
    return tuple(dict.fromkeys(count for count in counts if count))
