"""Where the host's time of a step goes, by part: with drafts from text under default flags, and without drafts.

    python -m benchmarks.speculation.host_parts OUT.json [--sequences 1,4,16] [--steps 300] [--model MODEL]

The real engine answers questions of its own in this process. Every part of a step is timed where the engine calls
it; the model's own part, the forward and the look-up, is taken out of it. The step loop's remaining time, the
statistics that leave ten times a second and the message to the front-end are parts as well. Medians over steps
without prompts, in microseconds. Drafts are asked for in every step: the guard is left out.
"""

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.engines import opened
from benchmarks.runner import about, command_line, numbers, write_json
from faser.config.engine import EngineConfig
from faser.engine.contract.messages import Deltas, frame
from faser.engine.contract.plan import StepPlan
from faser.engine.engine import Engine
from faser.types import Request, SamplingParams

ARMS: dict[str, dict[str, Any]] = {"off": {"policy": "off"}, "drafts": {}}
PARTS = ("propose", "draft", "drafted", "plan", "run", "commit", "loop", "message", "statistics")


class _Parts:
    """Microseconds by part of the step that runs, and of all steps that were kept."""

    def __init__(self) -> None:
        self.step: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        self.is_plain = True

    def wrap(self, owner: Any, name: str, part: str, own: Callable[[Any], float] = lambda _found: 0.0) -> None:
        """Time owner.name as this part, less what `own` says of its result."""
        inner = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            found = inner(*args, **kwargs)
            took_s = time.perf_counter() - began_s
            self.step[part] = self.step.get(part, 0.0) + 1e6 * (took_s - own(found))
            self.step["inside"] = self.step.get("inside", 0.0) + 1e6 * took_s
            if isinstance(found, StepPlan):
                self.is_plain = found.num_rows == len(found.rows) + found.num_drafts and not found.started
            return found

        setattr(owner, name, timed)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=numbers, default=[1, 4, 16])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--model", help="default: the default model")
    options = parser.parse_args()
    found: dict[str, dict[str, dict[str, float]]] = {}
    for arm, speculation in ARMS.items():
        found[arm] = {}
        for count in options.sequences:
            found[arm][str(count)] = _measured(options.model, speculation, count, options.steps)
            print(arm, count, found[arm][str(count)], flush=True)
    write_json(options.out, {**about("benchmarks.speculation.host_parts"), "unit": "µs a step", "arms": found})


def _measured(model: str | None, speculation: dict[str, Any], count: int, steps: int) -> dict[str, float]:
    config = EngineConfig(model=model, speculative_config=speculation, max_num_seqs=max(count, 1))
    engine = opened(config).engine
    scheduler, parts = engine._scheduler, _Parts()
    executor: Any = engine._executor
    if scheduler._speculation is not None:
        scheduler._speculation._guard = None
    parts.wrap(scheduler, "propose", "propose")
    parts.wrap(scheduler, "drafted", "drafted")
    parts.wrap(scheduler, "plan", "plan")
    parts.wrap(scheduler, "commit", "commit")
    parts.wrap(executor, "draft", "draft")
    model_s = _model_of(executor._runner)
    parts.wrap(executor, "run", "run", lambda _found: model_s())
    _serve(engine, count, steps, parts)
    return {
        "sum": 0.0,
        **{part: round(median(each.get(part, 0.0) for each in parts.steps), 1) for part in PARTS},
    } | {"sum": round(median(sum(each.get(part, 0.0) for part in PARTS) for each in parts.steps), 1)}


def _model_of(runner: Any) -> Callable[[], float]:
    """Seconds that the model itself has computed since it was asked last: the forward, and logits to tokens."""
    taken = [0.0]
    for name in ("forward", "logits", "greedy_tokens"):
        if (inner := getattr(runner, name, None)) is None:
            continue

        def timed(*args: Any, inner: Callable[..., Any] = inner, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            found = inner(*args, **kwargs)
            taken[0] += time.perf_counter() - began_s
            return found

        setattr(runner, name, timed)

    def since() -> float:
        found, taken[0] = taken[0], 0.0
        return found

    return since


def _serve(engine: Engine, count: int, steps: int, parts: _Parts) -> None:
    for number in range(count):
        words = tuple((17 * number + 31 * at * at + 5 * at) % 40000 + 100 for at in range(40))
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        engine.add(Request(request_id=str(number), prompt_token_ids=words, sampling=sampling, arrival_s=number))
    for number in range(steps):
        parts.step = {}
        began_s = time.perf_counter()
        deltas = engine.step()
        ended_s = time.perf_counter()
        frame(Deltas(deltas, None))
        framed_s = time.perf_counter()
        engine.stats()
        parts.step |= {
            "loop": 1e6 * (ended_s - began_s) - parts.step.pop("inside"),
            "message": 1e6 * (framed_s - ended_s),
            "statistics": 1e5 * (time.perf_counter() - framed_s) * (ended_s - began_s) * 100,
        }
        if parts.is_plain and number > 40:
            parts.steps.append(parts.step)


if __name__ == "__main__":
    main()
