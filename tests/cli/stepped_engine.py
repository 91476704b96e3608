"""An engine to measure, with a clock of its own: tokens follow from seed and position, drafts from the policy."""

from dataclasses import dataclass, field

from faser.engine.contract.plan import SequenceDelta
from faser.types.answer import FinishReason, SequenceError
from faser.types.request import Request
from faser.types.statistics import EngineStats, MethodStats, RoleStats, SpeculationStats

CAP = 8
STEP_S, ROW_S = 0.010, 0.001


@dataclass(slots=True)
class _Running:
    request: Request
    num_tokens: int = 0
    computed: bool = False


@dataclass(slots=True)
class SteppedEngine:
    """fixed γ drafts γ tokens of which the first `right` are right; faser drafts `right`; others draft none.

    slowness: factor of all times. wrong_policy: changes a token of every answer. Prompts are cached by tokens and
    salt; one that is not in the cache costs rows of its length.
    """

    right: int = 2
    wrong_policy: str | None = None
    has_drafter: bool = True
    fails: bool = False
    slowness: float = 1.0
    now_s: float = 0.0
    policy: str = "off"
    gamma: int = 0
    most_running: int = 0
    times_forgotten: int = 0
    asked: list[Request] = field(default_factory=list)
    policies: list[str] = field(default_factory=list)
    _running: dict[str, _Running] = field(default_factory=dict)
    _cached: set[tuple[tuple[int, ...], str | None]] = field(default_factory=set)
    _counts: list[int] = field(default_factory=lambda: [0, 0, 0])
    _gammas: list[int] = field(default_factory=lambda: [0] * (CAP + 1))
    _depths: list[int] = field(default_factory=lambda: [0] * CAP)
    _step_s: float = 0.0

    def now(self) -> float:
        return self.now_s

    def use_policy(
        self, name: str, gamma: int | None = None, *, forget: bool = True, overlap: str | None = None
    ) -> None:
        assert not self._running, "a policy changes between runs"
        self.times_forgotten += int(forget)
        assert overlap is None, "this engine has no lanes"
        self.policies.append(name if gamma is None else f"{name}:{gamma}")
        self.policy = name
        self.gamma = {"fixed": gamma or 0, "faser": self.right}.get(name, 0)

    def add(self, request: Request) -> None:
        assert request.request_id not in self._running
        self.asked.append(request)
        self._running[request.request_id] = _Running(request)
        self.most_running = max(self.most_running, len(self._running))

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> tuple[SequenceDelta, ...]:
        rows, deltas = 0, []
        for name, each in list(self._running.items()):
            key = each.request.prompt_token_ids, each.request.cache_salt
            if not each.computed:
                rows += 0 if key in self._cached else len(key[0])
                self._cached.add(key)
                each.computed = True
                continue
            rows += 1 + self.gamma
            deltas.append(self._advance(name, each))
        self._step_s += self.slowness * (STEP_S + ROW_S * rows)
        self.now_s += self.slowness * (STEP_S + ROW_S * rows)
        return tuple(deltas)

    def stats(self) -> EngineStats:
        drafted, verified, accepted = self._counts
        speculation = SpeculationStats(
            policy=self.policy,
            method="suffix",
            methods=(MethodStats(method="suffix", drafted=drafted, verified=verified, accepted=accepted),),
            accepted_at=(("default", tuple(self._depths)),),
            gammas=(("default", tuple(self._gammas)), ("other", (0,) * (CAP + 1))),
            roles=(RoleStats(role="step", predicted_s=0.9 * self._step_s, measured_s=self._step_s),),
            decide_s=0.01 * self.now_s,
        )
        return EngineStats(speculation=speculation if self.has_drafter else None)

    def _advance(self, name: str, each: _Running) -> SequenceDelta:
        wanted = each.request.sampling.max_tokens or 0
        accepted = min(self.right, self.gamma)
        self._counts[0] += self.gamma
        self._counts[1] += self.gamma
        self._counts[2] += accepted
        self._gammas[self.gamma] += 1
        for depth in range(accepted):
            self._depths[depth] += 1
        end = min(each.num_tokens + accepted + 1, wanted)
        tokens = tuple(self._token(each.request, position) for position in range(each.num_tokens, end))
        each.num_tokens = end
        reason = FinishReason.LENGTH if end == wanted else None
        if self.fails:
            reason = FinishReason.ERROR
        if reason is not None:
            del self._running[name]
        return SequenceDelta(
            request_id=name,
            index=0,
            token_ids=tokens,
            finish_reason=reason,
            error=SequenceError.NOT_FINITE if self.fails else None,
        )

    def _token(self, request: Request, position: int) -> int:
        token_id = (7 * (request.sampling.seed or 0) + 3 * position + len(request.prompt_token_ids)) % 100
        spoilt = self.policy == self.wrong_policy and position == 5
        return token_id + 1 if spoilt else token_id
