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
from faser.kernels.cuda.green_contexts import GROUP_UNIT, GreenContextError, GreenDriver, Group, open_stream
from faser.kernels.cuda.streams import LaneDevice

D = TypeVar("D")
V = TypeVar("V")

_log = logging.getLogger("faser.engine")

# The verify lane's part of the processors, as a fraction; the draft lane has the others. A pass of a draft model
# moves its weights and computes little, and a few processors already move a large part of what the whole GPU can:
# an eleventh, a seventh and a quarter cover draft models of different sizes. Verification keeps three quarters or
# more: it is bound by arithmetic where overlap pays, and slows down with every processor it loses.
_VERIFY_PARTS = ((10, 11), (6, 7), (3, 4))


class GreenContexts:
    """See Partition. Verification has the group of each split, drafting the processors that the split left over.

    All splits, contexts and streams are made here and live until `close`. Lanes change their groups between two
    calls of `run_both`, when neither lane has work. A CUDA graph captured on a lane must not be replayed after
    `close`.

    verify_counts: processors that a verify lane may have; the driver may round up. A split that the driver refuses
    is left out. Raises GreenContextError where none remains.
    """

    name = "sm"

    def __init__(self, driver: GreenDriver, device: LaneDevice, verify_counts: Sequence[int]) -> None:
        self._driver = driver
        self._device = device
        self._made = ExitStack()
        with ExitStack() as unfinished:
            self._pairs = self._make_pairs(verify_counts, unfinished)
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

    def _make_pairs(self, verify_counts: Sequence[int], made: ExitStack) -> dict[float, LanePair]:
        """By the draft lane's share, ascending. made: receives what destroys the contexts and streams."""
        pairs: dict[float, LanePair] = {}
        refusals: list[GreenContextError] = []
        for count in sorted(verify_counts, reverse=True):
            try:
                group, rest = self._driver.split(count)
                share = rest.count / self._driver.num_processors
                if rest.count and share not in pairs:
                    pairs[share] = self._make_pair(group, rest, share, made)
            except GreenContextError as refusal:
                _log.info("lanes with %d processors for verification are left out: %s", count, refusal)
                refusals.append(refusal)
        if not pairs and refusals:
            raise refusals[0]
        if not pairs:
            total, counts = self._driver.num_processors, tuple(verify_counts)
            raise GreenContextError(f"{total} processors cannot be divided: groups of {counts} leave none")
        return pairs

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
    """Processors of the verify lane in each split that `sm` offers: multiples of 8, descending.

    Of 132: 120, 112, 96, which leave 12, 20, 36 for drafting. Empty for fewer than 9 processors.
    """
    counts = (num_processors * part // whole // GROUP_UNIT * GROUP_UNIT for part, whole in _VERIFY_PARTS)
    return tuple(dict.fromkeys(count for count in counts if count))
