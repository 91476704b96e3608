"""What structured output costs, and what the grammar gains as a drafter, with the default model.

    python -m benchmarks.speed.structured_cost --out benchmarks/results/structured-cost.json [--rounds 7]
        [--at-once
    1,4,16]

Output tokens per second, prompts included, in one engine whose arms take turns:

    records      96 tokens of an answer that is cut off there: free text, or a list of small objects by a schema
    long keys    a whole answer, an object with six long keys

    free         no structure, no drafts                 constrained     a schema, no drafts
    drafts       a schema, drafts from text              with grammar    the same, and the grammar drafts too

The cost is that of `constrained` against `free` at records, the gain that of `with grammar` against `constrained`.
Every run has a cache_salt and questions of its own, so nothing is known from a run before. Then the time of a
mask: answers of the runs are read again, as many at once.
"""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import ratio
from benchmarks.exactness.schemas import Json, long_keys
from benchmarks.runner import command_line
from faser.api.templates.chat_template import ChatTemplate
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.plan import DraftPlan
from faser.engine.engine import Engine
from faser.engine.execution.drafters.drafter import Drafter, Proposals
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.engine.text.tokenizer import load_tokenizer
from faser.types import Request, SamplingParams, StructuredOutput, StructureKind

RECORD_TOKENS = 96
_SUBJECTS = ("orders", "flights", "books", "parcels", "rooms", "trains", "games", "lamps")


class SwitchedDrafter:
    """A Drafter whose drafts of method grammar can be left out."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.leaves_grammar_out = False
        self.start, self.commit, self.release = drafter.start, drafter.commit, drafter.release

    @property
    def drafts_overlapped(self) -> bool:
        return self._drafter.drafts_overlapped

    def propose(self, plan: DraftPlan, until: Callable[[], bool] | None = None, /) -> Proposals:
        found = self._drafter.propose(plan, until)
        if not self.leaves_grammar_out:
            return found
        return replace(found, drafts=tuple(each for each in found.drafts if each.method != "grammar"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """constrained: the answer follows the schema. policy: of speculation. grammar: drafts too."""

    constrained: bool
    policy: str = "off"
    grammar: bool = False


ARMS = {
    "free": Arm(constrained=False),
    "constrained": Arm(constrained=True),
    "drafts": Arm(constrained=True, policy="faser"),
    "with grammar": Arm(constrained=True, policy="faser", grammar=True),
}


def records() -> Json:
    """A list of small objects that 96 tokens do not complete."""
    record = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "count": {"type": "integer", "minimum": 0, "maximum": 9999},
            "available": {"type": "boolean"},
            "colour": {"enum": ["red", "green", "blue", "white", "black"]},
        },
        "required": ["name", "count", "available", "colour"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": record, "minItems": 20}


class Bench:
    """One engine with the default model. counter: makes every request another one."""

    def __init__(self, model: str | None) -> None:
        directory = resolve(model, cache_dir(), progress=_quiet)
        self.tokenizer = load_tokenizer(directory)
        self._switch: list[SwitchedDrafter] = []
        built = build(EngineConfig(model=model), directory, _quiet, wrap_drafter=self._wrapped)
        self.engine: Engine = built.engine
        self.info = built.info
        source = self.tokenizer.chat_template
        assert isinstance(source, str), "the model has no chat template"
        tokenizer = self.tokenizer
        self._template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
        self._counter = itertools.count()

    def _wrapped(self, drafter: Drafter) -> Drafter:
        self._switch.append(SwitchedDrafter(drafter))
        return self._switch[-1]

    def run(self, arm: Arm, schema: Json, at_once: int, max_tokens: int) -> tuple[float, list[tuple[int, ...]]]:
        """Output tokens per second of at_once answers, and the answers."""
        run = next(self._counter)
        self.engine.use_policy(arm.policy, forget=False)
        self._switch[0].leaves_grammar_out = not arm.grammar
        structure = StructuredOutput(kind=StructureKind.JSON, text=json.dumps(schema)) if arm.constrained else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=not arm.constrained, structured_output=structure
        )
        requests = [self._request(run, i, sampling) for i in range(at_once)]
        answers: dict[str, list[int]] = {each.request_id: [] for each in requests}
        began_s = time.perf_counter()
        for request in requests:
            self.engine.prepare(request)
            self.engine.add(request)
        while self.engine.has_work():
            for delta in self.engine.step():
                assert delta.error is None, delta.error
                answers[delta.request_id] += delta.token_ids
        seconds = time.perf_counter() - began_s
        return sum(map(len, answers.values())) / seconds, [tuple(each) for each in answers.values()]

    def _request(self, run: int, i: int, sampling: SamplingParams) -> Request:
        question = f"Describe {_SUBJECTS[i % len(_SUBJECTS)]} number {run * 100 + i} of a small town as JSON."
        text = self._template.render(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            continue_final_message=False,
            extra={},
        )
        return Request(
            request_id=f"{run}/{i}",
            prompt_token_ids=tuple(self.tokenizer.encode(text, add_special_tokens=False)),
            sampling=sampling,
            arrival_s=time.monotonic(),
            cache_salt=f"{run}/{i}",
        )


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--at-once", default="1,4,16")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    counts = [int(each) for each in asked.at_once.split(",")]
    bench = Bench(asked.model)
    found: dict[str, Any] = {"rounds": asked.rounds, "tokens_per_second": {}, "mask_us_per_row": {}}
    for workload, schema, arms, max_tokens in (
        ("records", records(), tuple(ARMS), RECORD_TOKENS),
        ("long keys", long_keys(), ("constrained", "drafts", "with grammar"), 160),
    ):
        rates, answers = _measure(bench, schema, arms, counts, max_tokens, asked.rounds)
        found["tokens_per_second"][workload] = _summary(rates)
        found["mask_us_per_row"][workload] = {
            str(count): _mask_times(bench, schema, answers, count) for count in counts
        }
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n")


Rates = dict[int, dict[str, list[float]]]


def _measure(
    bench: Bench, schema: Json, arms: Sequence[str], counts: Sequence[int], max_tokens: int, rounds: int
) -> tuple[Rates, list[tuple[int, ...]]]:
    """Tokens per second by number of requests and arm, a round each; and constrained answers."""
    rates: Rates = {count: {arm: [] for arm in arms} for count in counts}
    answers: list[tuple[int, ...]] = []
    for number in range(rounds + 1):  # the first one warms up
        for count in counts:
            turn = number % len(arms)
            for arm in (*arms[turn:], *arms[:turn]):
                rate, said = bench.run(ARMS[arm], schema, count, max_tokens)
                if number:
                    rates[count][arm].append(rate)
                if arm == "constrained" and len(answers) < 64:
                    answers += said
    return rates, answers


def _summary(rates: Rates) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for count, by_arm in rates.items():
        line: dict[str, Any] = {arm: round(statistics.median(each), 1) for arm, each in by_arm.items()}
        for name, above, below in (
            ("constrained / free", "constrained", "free"),
            ("drafts / constrained", "drafts", "constrained"),
            ("with grammar / constrained", "with grammar", "constrained"),
            ("with grammar / drafts", "with grammar", "drafts"),
        ):
            if above in by_arm and below in by_arm:
                line[name] = ratio(by_arm[above], by_arm[below]).rounded(3)
        found[str(count)] = line
    return found


def _mask_times(bench: Bench, schema: Json, answers: Sequence[tuple[int, ...]], at_once: int) -> dict[str, float]:
    """Microseconds for each row: of calls for at_once rows while the answers are read along."""
    compiler = GrammarCompiler(
        lambda: bench.tokenizer, vocab_size=bench.info.vocab_size, eos_token_ids=bench.info.eos_token_ids
    )
    matchers = SequenceMatchers(compiler, num_threads=2)
    asked = StructuredOutput(kind=StructureKind.JSON, text=json.dumps(schema))
    taken = [answers[i % len(answers)] for i in range(at_once)]
    for slot in range(at_once):
        matchers.start(slot, asked, ())
    times = []
    for position in range(min(map(len, taken)) - 1):
        began_s = time.perf_counter()
        matchers.masks([(slot, ()) for slot in range(at_once)], [position] * at_once)
        times.append((time.perf_counter() - began_s) / at_once * 1e6)
        for slot, answer in enumerate(taken):
            matchers.accept(slot, answer[position])
    median, most = np.percentile(times, (50, 99))
    return {"median": round(float(median), 1), "p99": round(float(most), 1)}


def _quiet(_stage: str, _done: int, _total: int) -> None:
    pass


if __name__ == "__main__":
    main()
