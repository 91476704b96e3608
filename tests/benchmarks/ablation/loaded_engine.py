"""An engine with a clock of its own: every step takes a tenth of a second and yields a token to every request.

Requests beyond `places` wait. Under policy fixed a step yields two tokens, of which one was drafted.
"""

from dataclasses import dataclass, field

from benchmarks.ablation.drive import Clock
from faser.engine.contract.plan import SequenceDelta
from faser.types.answer import FinishReason, SequenceError
from faser.types.request import Request
from faser.types.statistics import EngineStats, MethodStats, SpeculationStats

STEP_S = 0.1
_PRUNED_A_STEP = 3
_LEAST_SLEEP_S = 1e-9  # less than that may not move the sum at all


@dataclass(slots=True)
class LoadedEngine:
    """wrong_policy: its answers end in another token. fails: every request does."""

    places: int = 4
    wrong_policy: str | None = None
    fails: bool = False
    has_drafter: bool = True
    now_s: float = 0.0
    slept_s: float = 0.0
    policy: str = "off"
    switches: list[tuple[object, ...]] = field(default_factory=list)
    asked: list[tuple[float, Request]] = field(default_factory=list)
    _open: dict[str, list[int]] = field(default_factory=dict)
    _wanted: dict[str, int] = field(default_factory=dict)
    _verified: int = 0
    _turns: list[int] = field(default_factory=lambda: [0, 0])
    _modes: dict[str, int] = field(default_factory=lambda: {"plain": 0, "serial": 0, "cores": 0})
    _mode: str = "plain"

    @property
    def clock(self) -> Clock:
        return Clock(now=lambda: self.now_s, sleep=self._sleep)

    def use_policy(
        self,
        name: str,
        gamma: int | None = None,
        *,
        forget: bool = True,
        overlap: str | None = None,
    ) -> None:
        assert not self._open, "a policy changes between runs"
        self.switches.append((name, gamma, forget, overlap))
        self.policy = name
        self._mode = "cores" if overlap == "auto" else "plain" if name == "off" else "serial"

    def add(self, request: Request) -> None:
        assert request.request_id not in self._wanted, "every run has names of its own"
        self.asked.append((self.now_s, request))
        self._open[request.request_id] = []
        self._wanted[request.request_id] = request.sampling.max_tokens or 0

    def abort(self, request_id: str, index: int | None = None) -> None:
        assert index is None, "requests have one sample"
        self._open.pop(request_id, None)

    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> tuple[SequenceDelta, ...]:
        self.now_s += STEP_S
        self._modes[self._mode] += 1
        return tuple(self._advance(name) for name in list(self._open)[: self.places])

    def stats(self) -> EngineStats:
        methods = (MethodStats(method="draft_model", drafted=self._verified, verified=self._verified),)
        speculation = SpeculationStats(
            policy=self.policy,
            method="draft_model",
            methods=methods,
            gammas=(("default", tuple(self._turns)),),
            mode_steps=tuple(self._modes.items()),
        )
        return EngineStats(speculation=speculation if self.has_drafter else None)

    def _advance(self, name: str) -> SequenceDelta:
        drafts = self.policy == "fixed"
        self._turns[drafts] += 1
        self._verified += drafts
        said, wanted = self._open[name], self._wanted[name]
        new = tuple(range(len(said), min(len(said) + 1 + drafts, wanted)))
        if self.policy == self.wrong_policy and len(said) + len(new) == wanted:
            new = (*new[:-1], -7)
        said += new
        over = len(said) == wanted
        if over:
            del self._open[name]
        return SequenceDelta(
            request_id=name,
            index=0,
            token_ids=new,
            finish_reason=FinishReason.LENGTH if over else None,
            error=SequenceError.NOT_FINITE if self.fails else None,
        )

    def _sleep(self, seconds: float) -> None:
        assert seconds > 0, "who sleeps waits for something"
        self.now_s += max(seconds, _LEAST_SLEEP_S)
        self.slept_s += seconds
