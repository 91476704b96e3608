"""What a campaign writes: all figures as JSON, and one table a reader can take in."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.generators.agreement import Check, Verdict
from benchmarks.generators.figures import Figures

_HEAD = (
    "| load generator and run | requests | input tokens | output tokens | draft tokens, accepted "
    "| mean TTFT: tool, server | mean TPOT: tool, server | counts | latencies |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run. version: of the tool. figures: None: the tool failed, and `failure` is the end of its output."""

    tool: str
    version: str
    run: str
    command: str
    figures: Figures | None
    checks: Sequence[Check]
    failure: str = ""

    @property
    def agrees(self) -> bool:
        return self.figures is not None and all(each.verdict is not Verdict.DIFFERS for each in self.checks)


def document(about: dict[str, Any], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {**about, "runs": [{**asdict(each), "agrees": each.agrees} for each in outcomes]}


def page(outcomes: Sequence[Outcome]) -> str:
    """The table, and below it every difference with its reason."""
    lines = [_HEAD, *(_row(each) for each in outcomes)]
    differences = [
        f"- {each.tool}, {each.run}: {check.what}, tool {_number(check.tool)}, server {_number(check.server)}: "
        f"{check.verdict}{': ' if check.reason else ''}{check.reason}"
        for each in outcomes
        for check in each.checks
        if check.verdict in (Verdict.DIFFERS, Verdict.EXPLAINED)
    ]
    return "\n".join([*lines, "", *differences, ""])


def _row(outcome: Outcome) -> str:
    figures = outcome.figures
    name = f"{outcome.tool} {outcome.version}: {outcome.run}"
    if figures is None:
        return f"| {name} | failed | | | | | | | |"
    drafts = figures.drafts
    cells = [
        str(figures.completed) + (f", {figures.cancelled} cancelled" if figures.cancelled else ""),
        _first(figures.input_tokens, figures.own_input_tokens),
        _first(figures.output_tokens, figures.own_output_tokens),
        "" if drafts is None else f"{drafts.draft_tokens:,}, {drafts.accepted_tokens:,}",
        _means(outcome.checks, "TTFT, mean"),
        _means(outcome.checks, "TPOT, mean"),
        _worst(outcome.checks, latencies=False),
        _worst(outcome.checks, latencies=True),
    ]
    return f"| {name} | {' | '.join(cells)} |"


def _first(*counts: int | None) -> str:
    return next((f"{count:,}" for count in counts if count is not None), "")


def _means(checks: Sequence[Check], what: str) -> str:
    return next(
        (f"{1000 * each.tool:.0f}, {1000 * each.server:.0f} ms" for each in checks if each.what == what), ""
    )


def _worst(checks: Sequence[Check], *, latencies: bool) -> str:
    """The verdict furthest from equal. Latencies are never equal, counts never within bounds."""
    order = list(Verdict)
    found = [each.verdict for each in checks if _is_latency(each) == latencies]
    return str(max(found, key=order.index)) if found else ""


def _is_latency(check: Check) -> bool:
    return isinstance(check.tool, float)


def _number(value: float) -> str:
    return f"{1000 * value:.1f} ms" if isinstance(value, float) else f"{value:,}"
