"""A request as the engine gets it, with its latency targets. It never changes after it is accepted."""

import math
from dataclasses import dataclass

from faser.errors import RequestError
from faser.types.adapter import Adapter
from faser.types.sampling import PRIORITY_LIMITS, SamplingParams

DEFAULT_CLASS = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Latency targets of one request, in milliseconds; None: no target. Raises RequestError unless above 0."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            if value is not None and not 0 < value < math.inf:
                param = f"speculative.slo.{name}"
                raise RequestError(f"{param} is {value}; it must be a number of milliseconds above 0", param=param)


NO_TARGETS = Slo()


WAIT, REFUSE = "wait", "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """Speculation and targets of one request. max_tokens: draft tokens per step, at most; None: the server's cap;
    0: off.

    trace: its outputs say where each token comes from. admission: what becomes of it if a target cannot be met:
    WAIT, REFUSE, or the name of the class as which it runs instead.
    """

    enabled: bool = True
    max_tokens: int | None = None
    class_name: str = DEFAULT_CLASS
    slo: Slo = NO_TARGETS
    trace: bool = False
    admission: str = WAIT


DEFAULT_SPECULATION = SpeculationParams()


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One accepted request, tokenised. arrival_s: its arrival, by time.monotonic().

    adapter: changes the model's answers; None: the model as it is. Requests with different ones share as little as
    those with different salts.
    cache_salt: requests with different salts share neither prefix blocks nor past answers to draft from.
    shares_cache: clients that know nothing of each other share those of this request. So its outputs must say
    nothing about them: they come token by token, however many a step accepted, and drafts and cached tokens are
    not reported.
    predicted_token_ids: a text that the answer may repeat; only drafts are copied from it.
    tenant: who shares the engine fairly with others: an API key, or a connection; opaque to the engine.
    deadline_s: by time.monotonic(); an unfinished request is aborted then. None: never.
    due_s: by the same clock, when its first token is due. None: it has no target, or none that can be met.
    is_patient: its targets are out of reach, so the engine serves it as one without.
    expected_tokens: that the client expects of the answer; None: it does not say.
    may_record: its tokens may be kept after its end, in a record of the traffic.
    prompt_tail: tokens at the end of the prompt which later turns of a conversation lack; None: it is not known.

    Raises RequestError for a priority that does not fit 64 bits.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    adapter: Adapter | None = None
    cache_salt: str | None = None
    shares_cache: bool = False
    speculation: SpeculationParams = DEFAULT_SPECULATION
    predicted_token_ids: tuple[int, ...] = ()
    tenant: str = ""
    deadline_s: float | None = None
    due_s: float | None = None
    is_patient: bool = False
    expected_tokens: int | None = None
    may_record: bool = True
    prompt_tail: int | None = None

    def __post_init__(self) -> None:
        PRIORITY_LIMITS.check("priority", self.priority)

    @property
    def token_target_ms(self) -> float | None:
        """Per token after the first, that the engine is to keep; None: there is none."""
        return None if self.is_patient else self.speculation.slo.tpot_ms
