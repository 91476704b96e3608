"""Cost of structured output, and gain of the grammar as a drafter, with the default model.

    python -m benchmarks speed.structured_cost --out benchmarks/results/structured-cost.json [--rounds 7]
        [--at-once 1,4,16]

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cells import Cell
from benchmarks.engines import Tokens, answers, model_directory, opened
from benchmarks.exactness.schemas import Json, long_keys
from benchmarks.runner import about, command_line, interleaved, numbers, write_json
from faser.api.requests.chat_template import ChatTemplate
from faser.cli.bench.estimates import ratio
from faser.config.engine import EngineConfig
from faser.engine.contract.drafts import METHOD_IDS
from faser.engine.contract.plan import DraftPlan
from faser.engine.engine import Engine
from faser.engine.execution.drafting.drafter import Drafter, Proposals
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.engine.text.tokenizer import load_tokenizer
from faser.types.request import Request
from faser.types.sampling import SamplingParams, StructuredOutput, StructureKind

RECORD_TOKENS = 96
_RATIOS = (
    ("constrained", "free"),
    ("drafts", "constrained"),
    ("with grammar", "constrained"),
    ("with grammar", "drafts"),
)
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
        return replace(found, table=found.table.take(found.table.methods != METHOD_IDS["grammar"]))


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
        self.tokenizer = load_tokenizer(model_directory(model))
        self._switch: list[SwitchedDrafter] = []
        built = opened(EngineConfig(model=model), wrap_drafter=self._wrapped)
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

    def run(self, arm: Arm, schema: Json, at_once: int, max_tokens: int) -> tuple[float, list[Tokens]]:
        """Output tokens per second of at_once answers, and the answers."""
        run = next(self._counter)
        self.engine.use_policy(arm.policy, forget=False)
        self._switch[0].leaves_grammar_out = not arm.grammar
        structure = StructuredOutput(kind=StructureKind.JSON, text=json.dumps(schema)) if arm.constrained else None
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=not arm.constrained, structured_output=structure
        )
        requests = [self._request(run, i, sampling) for i in range(at_once)]
        began_s = time.perf_counter()
        for request in requests:
            self.engine.prepare(request)
        said = answers(self.engine, requests)
        seconds = time.perf_counter() - began_s
        return sum(map(len, said.values())) / seconds, list(said.values())

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
    parser.add_argument("--at-once", type=numbers, default="1,4,16")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    bench = Bench(asked.model)
    found: dict[str, Any] = {
        **about("speed.structured_cost"),
        "tokens_per_second": {},
        "mask_us_per_row": {},
    }
    for workload, schema, arms, max_tokens in (
        ("records", records(), tuple(ARMS), RECORD_TOKENS),
        ("long keys", long_keys(), ("constrained", "drafts", "with grammar"), 160),
    ):
        cells, constrained = _measure(bench, schema, arms, asked.at_once, max_tokens, asked.rounds)
        found["tokens_per_second"][workload] = {str(cell.labels["at_once"]): _summary(cell) for cell in cells}
        found["mask_us_per_row"][workload] = {
            str(count): _mask_times(bench, schema, constrained, count) for count in asked.at_once
        }
    print(json.dumps(found, indent=1))
    if asked.out is not None:
        write_json(asked.out, found)


def _measure(
    bench: Bench, schema: Json, arms: Sequence[str], counts: Sequence[int], max_tokens: int, rounds: int
) -> tuple[list[Cell[float]], list[Tokens]]:
    """Tokens per second by number of requests and arm, a round each; and constrained answers."""
    constrained: list[Tokens] = []

    def run(setting: Mapping[str, Any], arm: str, _round: int) -> float:
        rate, said = bench.run(ARMS[arm], schema, setting["at_once"], max_tokens)
        if arm == "constrained" and len(constrained) < 64:
            constrained.extend(said)
        return rate

    settings = [{"at_once": count} for count in counts]
    interleaved(settings, arms, 1, run)  # warms up
    return interleaved(settings, arms, rounds, run), constrained


def _summary(cell: Cell[float]) -> dict[str, Any]:
    found: dict[str, Any] = {arm: round(statistics.median(each), 1) for arm, each in cell.runs.items()}
    for above, below in _RATIOS:
        if above in cell.runs and below in cell.runs:
            found[f"{above} / {below}"] = ratio(cell.runs[above], cell.runs[below]).rounded(3)
    return found


def _mask_times(bench: Bench, schema: Json, answers: Sequence[Tokens], at_once: int) -> dict[str, float]:
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
