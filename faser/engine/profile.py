"""Measures what a step takes on this machine, before the first request comes: the tables of the cost model.

Runs real forwards through the runners, with made-up tokens in the KV cache while it is still empty, laid out as in
verification: a few sequences with several rows each. What is measured is kept on disk, by a fingerprint of all
that it depends on. Decides nothing.
"""

import hashlib
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from faser import __version__
from faser.engine.batch import RowBatch
from faser.engine.co_run import CoRun
from faser.engine.co_run_profile import Cell, measure_slowdown
from faser.engine.cost_model import CostModel, CostTable, Role
from faser.engine.partition import Lane, Partition
from faser.engine.runner import Runner
from faser.errors import ConfigError
from faser.kernels.backend import Backend, RowLayout

_log = logging.getLogger("faser.engine")

Progress = Callable[[str, int, int], None]

STAGE, LANES_STAGE = "measuring step times", "measuring lanes"
BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_REPEATS, _LEAST_REPEATS, _MOST_REPEATS = 7, 5, 31
_LONG_ENOUGH_S = 0.25  # of one row count: short steps are timed more often, for they need it and cost little
_ROWS_EACH = 4  # of a sequence in a step with several
_SHORT_CONTEXT, _LONG_CONTEXT = 64, 1024
_TEXT_S = 30e-6  # a look-up in text, per sequence; a first guess, the engine follows the real one
_DRAFT_SHARE = 0.35  # of the time there is, for the passes of the draft model


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What dummy sequences may use: blocks 0 … num_blocks - 1 of block_size tokens, max_len positions each.

    max_rows: most rows of a step. max_logit_rows: most rows whose logits are taken at once.
    """

    num_blocks: int
    block_size: int
    max_len: int
    max_rows: int
    max_logit_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What may run at the same time: the target's backend and the draft model's, on the lanes of a partition.

    rows: of the steps to be measured, those first that matter most. contexts: tokens in the cache of each of their
    sequences, ascending. num_sequences: most of a step. budget_s: for all of it, about.
    """

    partition: Partition
    target: Backend
    draft: Backend
    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    num_sequences: int
    budget_s: float


def fingerprint(described: Mapping[str, object]) -> str:
    """Of all that step times depend on: model, type, backend, threads, machine, draft model; and this version."""
    text = json.dumps({"faser": __version__, "cpu": _cpu_name(), **described}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def cached_profile(path: Path, measure: Callable[[], CostModel]) -> CostModel:
    """The cost model kept at path, or a new one that is then kept there. What cannot be read is measured again."""
    if path.exists():
        try:
            return CostModel.load(path)
        except ConfigError as error:
            _log.warning("step times are measured again: %s", error)
    costs = measure()
    try:
        costs.save(path)
    except ConfigError as error:
        _log.warning("step times will be measured at every start: %s", error)
    return costs


def profile(
    runner: Runner,
    draft_runner: Runner | None,
    room: Room,
    *,
    progress: Progress,
    draft_layers: int | None = None,
    pair: Pair | None = None,
    budget_s: float = 30.0,
) -> CostModel:
    """Time steps of the target and passes of the drafter, within about budget_s seconds.

    pair: measure as well how the two of them disturb each other at the same time, in its own time.
    draft_runner: of a draft model, or the target's own when its first draft_layers layers draft; None: no passes.
    The keys and values of the dummy sequences stay in the cache, in blocks that nobody holds.
    """
    share = 0.0 if draft_runner is None else _DRAFT_SHARE
    num_roles = 1 if draft_runner is None else 2
    report = _Report(progress, num_roles * len(BUCKETS))
    step = _Stopwatch(runner, room).table(budget_s * (1 - share), report)
    tables = {Role.STEP: step, Role.TEXT: CostTable(rows=(1, 2), seconds=(_TEXT_S, 2 * _TEXT_S))}
    if draft_runner is not None:
        passes = _Stopwatch(draft_runner, room, num_layers=draft_layers, rows_each=1)
        tables[Role.PASS] = passes.table(budget_s * share, report)
    report.finish()
    lanes: tuple[CoRun, ...] = ()
    if pair is not None and draft_runner is not None:
        progress(LANES_STAGE, 0, 0)
        lanes = measure_slowdown(
            pair.partition,
            _cells(pair, runner, draft_runner, room, CostModel(tables)),
            budget_s=pair.budget_s,
            progress=lambda done, total: progress(LANES_STAGE, done, total),
        )
    return CostModel(tables, lanes)


def largest_step(runner: Runner, room: Room) -> None:
    """Run a step of max_rows rows and take all the logits that a step may take, for what they need in memory."""
    _Stopwatch(runner, room).largest()


def _cells(pair: Pair, runner: Runner, draft_runner: Runner, room: Room, costs: CostModel) -> list[Cell]:
    """Steps of several sequences, each beside a pass of the drafter for as many, as far as there is room."""
    cells = []
    counts = dict.fromkeys(min(rows, room.max_rows) for rows in pair.rows)
    most = min(-(-max(counts) // _ROWS_EACH), pair.num_sequences)
    drafter = _Stopwatch(draft_runner, room, rows_each=1)
    for context in _contexts(pair.contexts, room, most):
        for rows in counts:
            num_sequences = min(-(-rows // _ROWS_EACH), pair.num_sequences)
            target = _Stopwatch(runner, room, rows_each=-(-rows // num_sequences))
            batch, passes = target.laid_out(rows, context), drafter.laid_out(num_sequences, context)
            cells.append(
                Cell(
                    rows=rows,
                    context=context,
                    verify=_timed(target, pair.target, batch),
                    draft=_timed(drafter, pair.draft, passes),
                    whole_s=costs.step_s(rows, num_sequences * context) + costs.pass_s(num_sequences),
                )
            )
    return cells


def _timed(stopwatch: "_Stopwatch", backend: Backend, batch: RowBatch) -> Callable[[Lane], object]:
    """A call ends with tokens on the host, so the time that it takes is the device's too, of its lane alone."""

    def call(lane: Lane) -> None:
        backend.use(lane.processors)
        try:
            stopwatch.once_s(batch)
        finally:
            backend.use(None)

    return call


def _contexts(wanted: tuple[int, ...], room: Room, num_sequences: int) -> list[int]:
    """As long as so many sequences of them fit into the cache; of those that come out alike, one.

    The first one is kept even if they do not fit: they share blocks then.
    """
    cached = room.num_blocks * room.block_size
    found = [max(1, min(wanted[0], room.max_len, cached))]
    for context in wanted[1:]:
        fitting = min(context, room.max_len, cached // num_sequences)
        if fitting >= 2 * found[-1]:
            found.append(fitting)
    return found


@dataclass(slots=True)
class _Report:
    """Progress over all buckets of all roles."""

    progress: Progress
    total: int
    done: int = field(default=0)

    def advance(self) -> None:
        self.done = min(self.done + 1, self.total)
        self.progress(STAGE, self.done, self.total)

    def finish(self) -> None:
        self.progress(STAGE, self.total, self.total)


class _Stopwatch:
    """Times forwards of one runner. rows_each: rows of a sequence: several in verification, one in a pass."""

    def __init__(
        self, runner: Runner, room: Room, *, num_layers: int | None = None, rows_each: int = _ROWS_EACH
    ) -> None:
        self._runner = runner
        self._room = room
        self._num_layers = num_layers
        self._rows_each = rows_each

    def table(self, budget_s: float, report: _Report) -> CostTable:
        """Small row counts first: they are the most frequent ones, and the large ones can be extrapolated.

        Then round after round over all of them: whatever else the machine does for a while slows every count.
        """
        ends_s = time.perf_counter() + budget_s
        short, long = min(_SHORT_CONTEXT, self._longest()), min(_LONG_CONTEXT, self._longest())
        batches = [self.laid_out(1, long)] if long >= 2 * short else []  # the slope's, beside the first bucket
        num_slopes = len(batches)
        times: list[list[float]] = [[self._warm_s(batch)] for batch in batches]
        buckets = [each for each in BUCKETS if each <= self._room.max_rows]
        for rows in buckets:
            round_s = sum(each for (each,) in times)
            if len(times) > num_slopes and time.perf_counter() + _LEAST_REPEATS * round_s > ends_s:
                measured = buckets[len(times) - num_slopes - 1]
                _log.info(
                    "step times: measured up to %d rows within %.0f s, extrapolated above", measured, budget_s
                )
                break
            batches.append(self.laid_out(rows, short))
            times.append([self._warm_s(batches[-1])])
            report.advance()
        wanted = [min(max(int(_LONG_ENOUGH_S / each[0]), _REPEATS), _MOST_REPEATS) for each in times]
        for done in range(1, max(wanted)):
            if done >= _LEAST_REPEATS and time.perf_counter() > ends_s:
                break
            for batch, each, often in zip(batches, times, wanted, strict=True):
                if done < often:
                    each.append(self.once_s(batch))
        medians = [statistics.median(each) for each in times]
        kv_token_s = max(medians[0] - medians[1], 0.0) / (long - short) if num_slopes else 0.0
        read = [kv_token_s * int(batch.layout.seq_len.sum()) for batch in batches]
        net = [max(median - kv_s, 1e-9) for median, kv_s in zip(medians, read, strict=True)]
        return CostTable.measured(dict(zip(buckets, net[num_slopes:], strict=False)), kv_token_s=kv_token_s)

    def largest(self) -> None:
        self.once_s(self.laid_out(self._room.max_rows, min(_SHORT_CONTEXT, self._longest())))

    def _longest(self) -> int:
        """Tokens that one dummy sequence may have."""
        return max(1, min(self._room.max_len, self._room.num_blocks * self._room.block_size))

    def laid_out(self, rows: int, context: int) -> RowBatch:
        """rows rows, rows_each a sequence, with context tokens in the cache, the rows among them.

        All sequences write the same blocks, one after the other's rows: what is in there makes no difference.
        """
        each = min(self._rows_each, context)
        counts = np.full(-(-rows // each), each, dtype=np.int32)
        counts[-1] = rows - each * (len(counts) - 1)
        starts = context - counts
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        positions = np.arange(rows, dtype=np.int32) + np.repeat(starts - query_start[:-1], counts)
        return RowBatch(
            token_ids=torch.from_numpy(np.arange(rows, dtype=np.int64) % self._runner.vocab_size),
            layout=RowLayout(
                query_start=torch.from_numpy(query_start),
                seq_len=torch.full((len(counts),), context, dtype=torch.int32),
                positions=torch.from_numpy(positions.astype(np.int32)),
                block_table=torch.from_numpy(self._blocks(len(counts), context)),
            ),
            last_rows=query_start[1:].astype(np.int64) - 1,
        )

    def _blocks(self, num_sequences: int, context: int) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
        """[num_sequences, blocks of a context]; as far as there are enough, no block is in two sequences."""
        width = -(-context // self._room.block_size)
        numbers = np.arange(num_sequences * width, dtype=np.int32) % self._room.num_blocks
        return numbers.reshape(num_sequences, width)

    def _warm_s(self, batch: RowBatch) -> float:
        """The second time: the first one meets cold memory."""
        self.once_s(batch)
        return self.once_s(batch)

    def once_s(self, batch: RowBatch) -> float:
        """A forward, the logits of all its rows and the greedy choice, as verification needs them."""
        began_s = time.perf_counter()
        self._runner.forward(batch, self._num_layers)
        num_rows = len(batch.token_ids)
        for first in range(0, num_rows, self._room.max_logit_rows):
            rows = np.arange(first, min(first + self._room.max_logit_rows, num_rows))
            self._runner.logits(rows).argmax(dim=-1).tolist()
        return time.perf_counter() - began_s


def _cpu_name() -> str:
    """As the machine calls its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
