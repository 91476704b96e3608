"""Closed forms: what plain steps, drafting before them and drafting beside them bring, at a constant acceptance.

Mean field: every one of B sequences drafts m tokens, each right with probability a, and steps have their mean
number of rows. A step takes V(rows), a pass of the drafter D. Knows no estimates, no policy, no ends of answers.

    plain    B over V(B)
    before   (1 - a^(m+1)) / (1 - a) tokens a sequence, over V(B (m + 1)) + m D
    beside   1 - p + p (1 - a^m) / (1 - a), over both lanes' time with V(B (1 - p + p m)) and m D

p = a / (1 + a - a^m) is the share of cycles that begin with a chunk: one that has none gets one if the first
drafted token is right, a; one that has one keeps one if all of it and the border are, a^m. PEARL's scheme (arXiv
2408.11850) with a row that judges the first new token beside its drafting. acceptance below is a, 0 … below 1.
"""

from dataclasses import dataclass

from faser.engine.contract.step_times import InterferenceTable
from faser.engine.control.step_cost import CostModel

PLAIN, BEFORE, BESIDE = "plain", "before", "beside"


def ready_share(acceptance: float, length: int) -> float:
    """Share of the cycles in which a sequence has a chunk to verify."""
    return acceptance / (1 + acceptance - acceptance**length)


def tokens_before(acceptance: float, length: int) -> float:
    """Of a step that verifies `length` drafted tokens, its own one included."""
    return float((1 - acceptance ** (length + 1)) / (1 - acceptance))


def tokens_beside(acceptance: float, length: int) -> float:
    """Of a cycle whose draft lane drafts `length` tokens, averaged over cycles with and without a chunk."""
    ready = ready_share(acceptance, length)
    return float(1 - ready + ready * (1 - acceptance**length) / (1 - acceptance))


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """Tokens a second of `load` sequences together."""

    costs: CostModel
    load: int
    acceptance: float

    def plain(self) -> float:
        return self.load / self._step_s(self.load)

    def before(self, length: int) -> float:
        seconds = self._step_s(self.load * (length + 1)) + self._draft_s(length)
        return self.load * tokens_before(self.acceptance, length) / seconds

    def beside(self, length: int, lanes: InterferenceTable) -> float:
        ready = ready_share(self.acceptance, length)
        rows = self.load * (1 - ready + ready * length)
        seconds = lanes.one(self._step_s(rows), self._draft_s(length), rows=round(rows), context=1)
        return self.load * tokens_beside(self.acceptance, length) / seconds

    def best(self, cap: int, lanes: InterferenceTable) -> dict[str, float]:
        """Each way at the best of the lengths 1 … cap."""
        lengths = range(1, cap + 1)
        return {
            PLAIN: self.plain(),
            BEFORE: max(map(self.before, lengths)),
            BESIDE: max(self.beside(length, lanes) for length in lengths),
        }

    def _step_s(self, rows: float) -> float:
        """Between two whole numbers of rows time is linear."""
        whole = int(rows)
        low_s = self.costs.step_s(whole)
        return low_s + (rows - whole) * (self.costs.step_s(whole + 1) - low_s)

    def _draft_s(self, length: int) -> float:
        return length * self.costs.pass_s(self.load)
