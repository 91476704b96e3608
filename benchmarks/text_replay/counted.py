"""What drafts bring in the real engine, in counted time: drafts and decisions are real, steps are from a table.

Other work on the machine so does not matter. A step takes what the table of step times says for its rows, a
look-up what the engine expects of it. Reading prompts is not counted.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.progress import track

from benchmarks.text_replay.recording import Answer
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.step_times import CostTable, Role, StepTimes
from faser.engine.engine import Engine
from faser.types import Request, SamplingParams

TEXT_S = 3e-5


class CountedEngine:
    """drafting: keys of --speculative-config; None: no drafts. seconds: of a step, by its rows."""

    def __init__(
        self, model: str | None, drafting: Mapping[str, Any] | None, seconds: Mapping[int, float], requests: int
    ) -> None:
        self._step = CostTable(rows=tuple(seconds), seconds=tuple(seconds.values()))
        self._requests = requests
        self._seconds, self._tokens, self._rows, self._steps = 0.0, 0, 0, 0
        text = CostTable(rows=(1, 2), seconds=(TEXT_S, 2 * TEXT_S))
        options: dict[str, Any] = (
            {"speculative_policy": "off"} if drafting is None else {"speculative_config": dict(drafting)}
        )
        built = build(
            EngineConfig(model=model, max_num_seqs=requests, max_model_len=2048, **options),
            resolve(model, cache_dir(), progress=lambda _stage, _done, _total: None),
            lambda _stage, _done, _total: None,
            step_times=StepTimes(tables={Role.STEP: self._step, Role.TEXT: text}, measured_at="", busy_share=0.0),
        )
        costs: Any = built.costs
        if costs is not None:
            for observer in (costs, costs.host_gaps):
                observer.observe = _ignore
            costs.observe_verification = _ignore
        self._engine: Engine = built.engine
        executor: Any = built.engine._executor
        run = executor.run

        def counted_run(plan: Any) -> Any:
            self._count([len(each.token_ids) for each in plan.rows])
            return run(plan)

        executor.run = counted_run

    def answer(self, asked: Sequence[Answer], most: int) -> dict[str, float]:
        """Answer the prompts of these answers anew. most: tokens of an answer."""
        self._seconds, self._tokens, self._rows, self._steps = 0.0, 0, 0, 0
        waiting = iter(enumerate(track(asked, "counted")))
        open_ones = 0
        while True:
            while open_ones < self._requests and (following := next(waiting, None)) is not None:
                number, answer = following
                name = f"{number} {answer.temperature}"
                sampling = SamplingParams(temperature=answer.temperature, max_tokens=most, seed=number)
                self._engine.add(
                    Request(request_id=name, prompt_token_ids=answer.prompt, sampling=sampling, cache_salt=name)
                )
                open_ones += 1
            if not self._engine.has_work():
                break
            for delta in self._engine.step():
                self._tokens += len(delta.token_ids)
                open_ones -= delta.finish_reason is not None
        return {
            "tokens_per_s": self._tokens / self._seconds,
            "rows_per_step": self._rows / self._steps,
            "tokens": self._tokens,
        }

    def _count(self, rows: Sequence[int]) -> None:
        """A row of a prompt counts like one that decodes: prompts so are nearly free."""
        decoding = [each for each in rows if each <= 17]
        if decoding:
            self._seconds += self._step.seconds_at(sum(decoding)) + len(decoding) * TEXT_S
            self._rows += sum(decoding)
            self._steps += 1


def _ignore(*_args: object, **_named: object) -> None:
    """In place of what would learn from measured times."""
