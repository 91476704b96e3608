"""What every step did and when, as a file that trace viewers open: --trace-steps.

One line for the host, one for each lane, one for the number of sequences. Chrome's trace-event format, a JSON
array of events with times in microseconds; Perfetto and chrome://tracing read it, also while its last bracket is
missing. Knows plans and results, and no more of the engine.
"""

import json
import logging
import os
from pathlib import Path
from typing import Any

from faser.engine.contract.plan import DraftPlan, Drafts, StepPlan, StepResult
from faser.errors import ConfigError

_HOST, _VERIFY, _DRAFT = 1, 2, 3  # numbers of the lines
_LINES = {_HOST: "host", _VERIFY: "verify lane", _DRAFT: "draft lane"}
_MOST_BYTES = 256 << 20  # viewers load no more
_log = logging.getLogger(__name__)


class StepTrace:
    """Writes path as the steps come; closed, it is valid JSON. Times are of time.perf_counter.

    Raises ConfigError if the file cannot be opened. A disk that fills later ends the trace, not the engine.
    """

    def __init__(self, path: Path, *, most_bytes: int = _MOST_BYTES) -> None:
        try:
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"trace_steps is {path}; it cannot be written: {error.strerror}") from error
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
        before: Drafts | None = None,
        ahead: DraftPlan | None = None,
        beside: Drafts | None = None,
    ) -> None:
        """A step from began_s to ended_s. before: drafted before it. ahead, beside: wished and made beside it."""
        planned_s = began_s
        if before is not None:
            planned_s = before.began_s + before.run_s
            self._span(_HOST, "propose", began_s, before.began_s)
            self._draft("draft", before, plan.step)
        self._span(_HOST, "plan", planned_s, result.began_s)
        self._span(_VERIFY, "verify", result.began_s, result.began_s + result.run_s, _verified(plan, result))
        if ahead is not None and beside is not None:
            self._draft("draft ahead", beside, plan.step, **_border(ahead, beside, result))
        self._span(_HOST, "commit", _end(result, beside), ended_s)
        self._emit("C", _HOST, name="sequences", ts=_micros(began_s), args={"running": len(plan.rows)})
        self._emit("C", _HOST, name="rows", ts=_micros(began_s), args={"rows": plan.num_rows})
        if not self._file.closed:
            self._file.flush()  # an engine that is killed leaves whole events

    def close(self) -> None:
        """Write the end; idempotent."""
        if not self._file.closed:
            try:
                self._file.write("\n]\n")
                self._file.close()
            except OSError as error:
                _log.warning("the step trace %s has no end: %s", self._path, error)

    def _draft(self, name: str, drafts: Drafts, step: int, **more: list[int] | list[bool]) -> None:
        about = {
            "step": step,
            "passes": drafts.passes,
            "refilled": drafts.catchup_tokens,
            "slots": [each.slot for each in drafts.drafts],
            "drafted": [len(each.token_ids) for each in drafts.drafts],
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
            _log.warning("the step trace %s ends here: %s", self._path, error)
            self._file.close()
            return
        if self._left <= 0:
            _log.warning("the step trace %s has reached its most bytes and ends here", self._path)
            self.close()


def _verified(plan: StepPlan, result: StepResult) -> dict[str, Any]:
    """Rows, chunk borders and verdicts; of the sequences that got tokens, in the plan's order."""
    judged = [
        (rows, outcome)
        for rows, outcome in zip(plan.rows, result.sequences, strict=True)
        if rows.samples and outcome.token_ids
    ]
    return {
        "step": plan.step,
        "rows": plan.num_rows,
        "slots": [rows.slot for rows, _ in judged],
        "drafted": [rows.num_drafts for rows, _ in judged],
        "accepted": [len(outcome.token_ids) - 1 for _, outcome in judged],
        "prompt_rows": sum(len(rows.token_ids) for rows in plan.rows if not rows.samples),
    }


def _border(ahead: DraftPlan, beside: Drafts, result: StepResult) -> dict[str, list[int] | list[bool]]:
    """behind: length of the chunk that each draft continues. stands: the step brought it and the draft's first."""
    brought = {each.slot: each.token_ids for each in result.sequences}
    pairs = list(zip(ahead.requests, beside.drafts, strict=True))
    return {
        "behind": [len(request.unverified) for request, _ in pairs],
        "stands": [
            brought.get(draft.slot) == request.unverified + draft.token_ids[:1] for request, draft in pairs
        ],
    }


def _end(result: StepResult, beside: Drafts | None) -> float:
    ended_s = result.began_s + result.run_s
    return ended_s if beside is None else max(ended_s, beside.began_s + beside.run_s)


def _micros(seconds: float) -> float:
    return round(1e6 * seconds, 1)
