"""PolicySpec: a policy as the command line spells it, and the control of speculation for it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from faser.config.speculation import MAX_DRAFT_TOKENS, POLICIES, SpeculationConfig
from faser.engine.build import native_acceptance
from faser.engine.control.clock import Clock
from faser.engine.control.speculation.acceptance import Acceptance
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.overlap import AUTO, OFF, ON, OverlapOptions
from faser.engine.control.speculation.policy import Policy
from faser.engine.control.step_cost import CostModel
from faser.engine.execution.drafting.registry import load_index
from faser.errors import ConfigError
from faser.types.request import SpeculationParams

LANES = "lanes"  # the partition of a simulated machine
_OVERLAPS = {"serial": OFF, "overlap": ON, "auto": AUTO}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """gamma: of policy fixed. table: (first, last, gamma) by number of sequences, of policy table.

    overlap: auto, on or off; None: the engine's setting.
    """

    text: str
    name: str
    gamma: int | None = None
    table: tuple[tuple[int, int, int], ...] = ()
    overlap: str | None = None

    def make_control(
        self,
        costs: CostModel,
        clock: Clock,
        *,
        drafter: str,
        cap: int,
        num_slots: int,
        share: float = 0.0,
        guarded: bool = True,
        classes: Sequence[SpeculationParams] = (),
        acceptance: Acceptance | None = None,
        policy: Policy | None = None,
    ) -> SpeculationControl:
        """The control of speculation of a live engine with this drafter, lanes and classes of requests.

        share: of the drafter's lane; 0: there are no lanes. acceptance, policy: in place of its own.
        """
        config = SpeculationConfig(
            method=drafter,
            policy=self.name,
            num_speculative_tokens=cap,
            table=self.table,
            classes={each.class_name: each for each in classes},
        )
        overlap = OverlapOptions(name=LANES, share=share, mode=self.overlap or OFF) if share else None
        control = SpeculationControl(
            config,
            costs,
            num_slots=num_slots,
            clock=clock,
            make_native=native_acceptance(load_index),
            overlap=overlap,
            times_itself=False,
            guarded=guarded,
            acceptance=acceptance,
            policy=policy,
        )
        if self.gamma is not None:
            control.use_policy(self.name, self.gamma)
        return control


def parse_policy(text: str, *, cap: int) -> PolicySpec:
    """off, fixed:3, goodput, survival, faser, or table:4=5/16=2/64=0 (up to 4 sequences 5 tokens, …).

    A suffix +serial, +overlap or +auto says whether drafting overlaps steps. cap: longest draft of the trace.
    Raises ConfigError naming what is wrong.
    """
    bare, _, overlap = text.partition("+")
    if overlap:
        if overlap not in _OVERLAPS:
            raise ConfigError(f"--policies names {text!r}; after the + goes one of {', '.join(_OVERLAPS)}")
        return replace(parse_policy(bare, cap=cap), text=text, overlap=_OVERLAPS[overlap])
    name, _, value = text.partition(":")
    if name not in POLICIES:
        raise ConfigError(f"--policies names {text!r}; it must be one of {', '.join(POLICIES)}")
    if name == "fixed":
        if not value.isdecimal() or not 1 <= int(value) <= min(cap, MAX_DRAFT_TOKENS):
            raise ConfigError(
                f"--policies names {text!r}; fixed:N needs an N of 1 … {cap}, the trace's longest draft"
            )
        return PolicySpec(text=text, name=name, gamma=int(value))
    if name == "table":
        return PolicySpec(text=text, name=name, table=_table(text, value, cap))
    if value:
        raise ConfigError(f"--policies names {text!r}; {name} takes no number")
    return PolicySpec(text=text, name=name)


def _table(text: str, value: str, cap: int) -> tuple[tuple[int, int, int], ...]:
    try:
        bounds = [(int(last), int(gamma)) for last, gamma in (each.split("=") for each in value.split("/"))]
    except ValueError:
        bounds = []
    ascending = all(a < b for (a, _), (b, _) in pairwise([(0, 0), *bounds]))
    if not bounds or not ascending or any(not 0 <= gamma <= cap for _, gamma in bounds):
        raise ConfigError(
            f"--policies names {text!r}; table:LAST=GAMMA/… needs ascending numbers of sequences "
            f"and gammas of 0 … {cap}"
        )
    firsts = [1, *(last + 1 for last, _ in bounds)]
    return tuple((first, last, gamma) for first, (last, gamma) in zip(firsts, bounds, strict=False))
