"""The engine of an encoder: take waiting texts, compute their vectors, report them.

An encoder has no KV cache, samples nothing, and its steps do not depend on each other, so it needs neither the
scheduler nor the executor of a model that generates. It serves the same messages (worker.py), and hence the same
front-end.
"""

import time
from dataclasses import replace
from typing import Protocol

from faser.engine.adapter_loads import AdapterEngine
from faser.engine.contract.latency_model import Pace
from faser.engine.contract.plan import EncodingBatch, StepDeltas
from faser.engine.control.encoding import EncoderScheduler
from faser.engine.structure.trials import COSTLY, Budget
from faser.errors import RequestError
from faser.types.adapter import Adapter
from faser.types.request import Request
from faser.types.statistics import EngineStats


class StepLoop(AdapterEngine, Protocol):
    """An engine as its process drives it: Engine or EncoderEngine, whose methods say more."""

    def step(self) -> StepDeltas: ...

    def prepare(self, request: Request, budget: Budget = COSTLY) -> None: ...

    def add(self, request: Request) -> None: ...

    def reclassify(self, request: Request) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def has_work(self) -> bool: ...

    def idle_wait_s(self) -> float | None: ...

    def pace(self) -> Pace | None: ...

    def uncomputed_prompts(self) -> dict[str, int]: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...


class VectorExecutor(Protocol):
    """The data plane of an encoder."""

    def run(self, batch: EncodingBatch) -> list[bytes]:
        """Return the vector [D] float32 of each text."""
        ...


class EncoderEngine:
    """One scheduler, one executor, one thread, as Engine."""

    def __init__(self, scheduler: EncoderScheduler, executor: VectorExecutor) -> None:
        self._scheduler, self._executor = scheduler, executor
        self._num_steps = self._last_step_rows = 0
        self._last_step_s = 0.0

    def step(self) -> StepDeltas:
        """Compute the vectors of some texts; without work, nothing."""
        began_s = time.perf_counter()
        if (batch := self._scheduler.plan()) is None:
            return StepDeltas()
        deltas = self._scheduler.commit(self._executor.run(batch))
        self._num_steps += 1
        self._last_step_rows = len(batch.token_ids)
        self._last_step_s = time.perf_counter() - began_s
        return deltas

    def prepare(self, request: Request, _budget: Budget = COSTLY) -> None:
        """Refuse structure: there are no answers that could have one."""
        structure = request.sampling.structured_output
        raise RequestError("an encoder generates no text", param=None if structure is None else structure.param)

    def add(self, request: Request) -> None:
        """Accept a request. Raises RequestError if the engine can never serve it."""
        self._scheduler.add(request)

    def reclassify(self, request: Request) -> None:
        """Serve a request that still waits with other targets."""
        self._scheduler.reclassify(request)

    def abort(self, request_id: str, _index: int | None = None) -> None:
        """Drop a request. Unknown ones have just ended and are ignored."""
        self._scheduler.abort(request_id)

    def has_work(self) -> bool:
        return self._scheduler.has_work()

    def idle_wait_s(self) -> None:
        """Return None: an idle engine has nothing to do."""

    def pace(self) -> None:
        """Return None: latencies of vectors are not predicted."""

    def uncomputed_prompts(self) -> dict[str, int]:
        """Return no request: none is half computed between two steps."""
        return {}

    def stats(self) -> EngineStats:
        """The scheduler's snapshot and the engine's steps with their time."""
        return replace(
            self._scheduler.stats(),
            num_steps=self._num_steps,
            last_step_rows=self._last_step_rows,
            last_step_s=self._last_step_s,
        )

    def load_adapter(self, _adapter: Adapter) -> None:
        """Refuse an adapter: no product of an encoder is adapted."""
        raise RequestError("an encoder takes no adapters", param="model")

    def drop_adapter(self, _digest: str) -> None:
        """Do nothing: none was loaded."""

    def adapters_in_use(self) -> set[str]:
        """Return none."""
        return set()

    def close(self) -> None:
        """Do nothing: no file is open."""
