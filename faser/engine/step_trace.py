"""Step trace: what every step did and when, as a file for trace viewers (--trace-steps).

A line for the host, a line for each lane and a counter of sequences, in Chrome's trace-event format: a JSON array
of events with times in microseconds. Perfetto and chrome://tracing read it even without its last bracket. Knows
plans and results, nothing else of the engine.
"""

import contextlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from faser.engine.contract.drafts import Drafts
from faser.engine.contract.plan import DraftPlan, StepPlan, StepResult
from faser.errors import ConfigError

_HOST, _VERIFY, _DRAFT = 1, 2, 3  # numbers of the lines
_LINES = {_HOST: "host", _VERIFY: "verify lane", _DRAFT: "draft lane"}
_MOST_BYTES = 256 << 20  # viewers refuse larger files
_log = logging.getLogger(__name__)


class StepTraceFile:
    """Writes the file step by step; after close it is valid JSON. Times are those of time.perf_counter.

    Raises ConfigError if the file cannot be opened. A disk that fills later ends the trace, not the engine.
    """

    def __init__(self, path: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--trace-steps is {path}; it cannot be written: {error.strerror}") from error
        self._path = path
        self._left = most_bytes
        self._pid = os.getpid()
        self._separator = "[\n"
        for line, name in _LINES.items():
            self._emit("M", line, name="thread_name", args={"name": name})
            self._emit("M", line, name="thread_sort_index", args={"sort_index": line})

    def step(
        self,
        began_s: float,
        ended_s: float,
        plan: StepPlan,
        result: StepResult,
        *,
        drafts: Drafts | None = None,
        overlapped_plan: DraftPlan | None = None,
        overlapped_drafts: Drafts | None = None,
    ) -> None:
        """Write a step from began_s to ended_s.

        drafts: made before the step. overlapped_plan, overlapped_drafts: requested and made while it ran.
        """
        planned_s = began_s
        if drafts is not None:
            planned_s = drafts.began_s + drafts.run_s
            self._span(_HOST, "propose", began_s, drafts.began_s)
            self._draft("draft", drafts, plan.step)
        self._span(_HOST, "plan", planned_s, result.began_s)
        self._span(_VERIFY, "verify", result.began_s, result.began_s + result.run_s, _verified(plan, result))
        if overlapped_plan is not None and overlapped_drafts is not None:
            joint = _joint(overlapped_plan, overlapped_drafts, plan, result)
            self._draft("draft ahead", overlapped_drafts, plan.step, **joint)
        self._span(_HOST, "commit", _end(result, overlapped_drafts), ended_s)
        self._emit("C", _HOST, name="sequences", ts=_micros(began_s), args={"running": len(plan.rows)})
        self._emit("C", _HOST, name="rows", ts=_micros(began_s), args={"rows": plan.num_rows})
        try:
            if not self._file.closed:
                self._file.flush()  # an engine that is killed leaves whole events
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """End the file; a second call does nothing."""
        if not self._file.closed:
            try:
                self._file.write("\n]\n")
                self._file.close()
            except OSError as error:
                self._give_up(error)

    def _draft(self, name: str, drafts: Drafts, step: int, **more: list[int] | list[bool]) -> None:
        about = {
            "step": step,
            "passes": drafts.passes,
            "refilled": drafts.catchup_tokens,
            "slots": drafts.table.slots.tolist(),
            "drafted": drafts.table.lengths.tolist(),
            **more,
        }
        self._span(_DRAFT, name, drafts.began_s, drafts.began_s + drafts.run_s, about)

    def _span(
        self, line: int, name: str, began_s: float, ended_s: float, args: dict[str, Any] | None = None
    ) -> None:
        length = max(_micros(ended_s - began_s), 0.0)
        self._emit("X", line, name=name, ts=_micros(began_s), dur=length, args=args or {})

    def _emit(self, phase: str, line: int, **fields: Any) -> None:
        self._write(json.dumps({"ph": phase, "pid": self._pid, "tid": line, **fields}, separators=(",", ":")))

    def _write(self, event: str) -> None:
        if self._file.closed:
            return
        text = self._separator + event
        self._separator = ",\n"
        self._left -= len(text)
        try:
            self._file.write(text)
        except OSError as error:
            self._give_up(error)
            return
        if self._left <= 0:
            _log.warning("the step trace %s has reached its size limit; tracing stopped", self._path)
            self.close()

    def _give_up(self, error: OSError) -> None:
        """End the file where it is; what could not be written is lost."""
        _log.warning("the step trace %s ends here: %s", self._path, error.strerror)
        with contextlib.suppress(OSError):  # it tries once more to write, and is closed whatever happens
            self._file.close()


def _verified(plan: StepPlan, result: StepResult) -> dict[str, Any]:
    """Rows, drafted and accepted tokens, for the sequences that got tokens, in the plan's order."""
    accepted = [count - (at not in result.errors) for at, count in enumerate(result.counts)]
    verified = [
        (rows, right) for rows, count, right in zip(plan.rows, result.counts, accepted, strict=True) if count
    ]
    return {
        "step": plan.step,
        "rows": plan.num_rows,
        "slots": [rows.slot for rows, _ in verified],
        "drafted": [rows.num_drafts for rows, _ in verified],
        "accepted": [right for _, right in verified],
        "prompt_rows": sum(len(rows.token_ids) for rows in plan.rows if not rows.samples),
    }


def _joint(
    plan: DraftPlan, drafts: Drafts, step: StepPlan, result: StepResult
) -> dict[str, list[int] | list[bool]]:
    """behind: number of unverified tokens that a draft continues. stands: the step sampled these and its first."""
    sampled = dict(zip(step.rows.slots, result.by_sequence(), strict=True))
    unverified = [request.unverified for request in plan.requests]
    firsts = [drafts.table.tokens(at)[:1] for at in range(len(unverified))]
    return {
        "behind": [len(each) for each in unverified],
        "stands": [
            sampled.get(slot) == before + first
            for slot, before, first in zip(drafts.table.slots.tolist(), unverified, firsts, strict=True)
        ],
    }


def _end(result: StepResult, drafts: Drafts | None) -> float:
    ended_s = result.began_s + result.run_s
    return ended_s if drafts is None else max(ended_s, drafts.began_s + drafts.run_s)


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 1)
