"""What drafts bring in the real engine, in counted time: drafts and decisions are real, steps are from a table.

Other work on the machine so does not matter. A step takes what the table of step times says for its rows, a
look-up what the engine expects of it. Reading prompts is not counted.
"""

import json
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
OFF = "off"
ARMS: dict[str, dict[str, Any] | None] = {
    OFF: None,
    "look-up from 2 tokens": {"ngram_model": "none", "prompt_lookup_min": 2},
    "look-up": {"ngram_model": "none"},
    "default": {},
    "default, no past answers": {"suffix_decoding_max_cached_requests": 0},
}
_MOST_DRAFTED = 16


def count_arms(
    model: str | None,
    asked: Sequence[Answer],
    seconds: Mapping[int, float],
    *,
    arms: Sequence[str],
    requests: Sequence[int],
    most: int,
    one_salt: bool,
) -> list[dict[str, Any]]:
    """A row for each number of requests at once, temperature and arm. gain: over the first arm."""
    rows: list[dict[str, Any]] = []
    for at_once in requests:
        first: dict[float, float] = {}
        for arm in arms:
            engine = CountedEngine(model, ARMS[arm], seconds, at_once)
            for temperature in sorted({each.temperature for each in asked}):
                some = [each for each in asked if each.temperature == temperature]
                found = engine.answer(some, most, one_salt=one_salt)
                rate = first.setdefault(temperature, found["tokens_per_s"])
                rows.append(
                    {
                        "requests": at_once,
                        "temperature": temperature,
                        "arm": arm,
                        "gain": round(found["tokens_per_s"] / rate, 3),
                        "rows_per_step": round(found["rows_per_step"], 2),
                        "tokens": found["tokens"],
                    }
                )
                print(json.dumps(rows[-1]), flush=True)
    return rows


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

    def answer(self, asked: Sequence[Answer], most: int, *, one_salt: bool) -> dict[str, float]:
        """Answer the prompts of these answers anew. most: tokens of an answer.

        one_salt: all have one cache_salt; else each conversation has one.
        """
        self._seconds, self._tokens, self._rows, self._steps = 0.0, 0, 0, 0
        waiting = iter(enumerate(track(asked, "counted")))
        open_ones = 0
        while True:
            while open_ones < self._requests and (following := next(waiting, None)) is not None:
                number, answer = following
                name = f"{number} {answer.temperature}"
                sampling = SamplingParams(temperature=answer.temperature, max_tokens=most, seed=number)
                self._engine.add(
                    Request(
                        request_id=name,
                        prompt_token_ids=answer.prompt,
                        sampling=sampling,
                        cache_salt="one" if one_salt else f"{answer.conversation} {answer.temperature}",
                    )
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
        """Sequences with more rows than a draft can have are reading their prompts."""
        decoding = [each for each in rows if each <= 1 + _MOST_DRAFTED]
        if decoding:
            self._seconds += self._step.seconds_at(sum(decoding)) + len(decoding) * TEXT_S
            self._rows += sum(decoding)
            self._steps += 1


def _ignore(*_args: object, **_named: object) -> None:
    """In place of what would learn from measured times."""
