"""Cost of drafts from text on the host, in microseconds: looked up, and chosen among by the control plane.

    python -m benchmarks speculation.host_drafters OUT.json [--prompt-tokens 2000] [--steps 60]

Text, of two kinds. With drafts: words of a random vocabulary, Zipf distributed and often repeated in
phrases. Nothing found: every token as likely. Every step proposes for all sequences and commits three tokens to
each, or one where nothing is found, as a step does. Time is that of the thread, so that other work on the machine
does not count; it takes caches too, so that the fastest step is there as well as the median one.

`long texts`: of a new text with suffix and n-gram drafts, the longest call while it is indexed in chunks, and the
bytes of its index; of nine texts, the medians.
"""

import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.runner import about, command_line, write_json
from benchmarks.simulator.selected_drafter import SelectedDrafter
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.drafts import empty_table
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.drafting.registry import load_index
from faser.engine.execution.drafting.text import LookupDrafter, TextAndModel, text_rules
from faser.kernels.cpu.text_index import TextIndex, TextRules
from faser.types import SamplingParams

CAP = 16
NUM_SEQUENCES = (1, 32, 256)
CORPUS_TOKENS = 100_000


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    rows = []
    for (kind, text, tokens_per_step), sequences in itertools.product(TEXTS, NUM_SEQUENCES):
        for name, make in DRAFTERS.items():
            drafter = make()
            _fill_corpus(drafter)
            costs = _measure(drafter, text(1), sequences, options.prompt_tokens, options.steps, tokens_per_step)
            rows.append({"text": kind, "sequences": sequences, "drafter": name, **costs})
            print(json.dumps(rows[-1]))
    long_texts = [_index(num_tokens) for num_tokens in (8192, 32_768, 131_072)]
    print(json.dumps(long_texts))
    asked = {"prompt_tokens": options.prompt_tokens, "steps": options.steps}
    result = about("speculation.host_drafters") | asked | {"rows": rows, "long texts": long_texts}
    write_json(options.out, result)


def _lookup(*methods: str) -> LookupDrafter:
    return LookupDrafter(load_index(), text_rules(SpeculationConfig(), methods))


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "ngram": lambda: _lookup("ngram"),
    "suffix": lambda: _lookup("suffix"),
    "selection of both": lambda: SelectedDrafter(
        TextAndModel([_lookup("suffix", "ngram")]), num_slots=max(NUM_SEQUENCES), cap=CAP
    ),
}


def _uniform(seed: int) -> Iterator[int]:
    """Endless text in which no context comes again but by chance."""
    rng = random.Random(seed)
    while True:
        yield rng.randrange(10**9)


def _zipfian(seed: int) -> Iterator[int]:
    """Endless text: phrases said before come again with probability one half."""
    rng, vocabulary = random.Random(seed), range(30_000)
    weights = list(itertools.accumulate(1 / (rank + 1) for rank in vocabulary))

    def words(count: int) -> list[int]:
        return rng.choices(vocabulary, cum_weights=weights, k=count)

    phrases = [words(rng.randrange(3, 20)) for _ in range(200)]
    while True:
        yield from rng.choice(phrases) if rng.random() < 0.5 else words(rng.randrange(1, 8))


TEXTS: tuple[tuple[str, Callable[[int], Iterator[int]], int], ...] = (
    ("nothing found", _uniform, 1),
    ("with drafts", _zipfian, 3),
)


def _taken(text: Iterator[int], num_tokens: int) -> tuple[int, ...]:
    return tuple(itertools.islice(text, num_tokens))


def _fill_corpus(drafter: Drafter) -> None:
    text = _zipfian(7)
    for _ in range(CORPUS_TOKENS // 500):
        drafter.start(SequenceStart(slot=0, sampling=SamplingParams(), seed=0, prompt_len=0, token_ids=()))
        drafter.commit([0], [500], _taken(text, 500))
        drafter.release(0)


def _measure(
    drafter: Drafter, text: Iterator[int], sequences: int, prompt_tokens: int, steps: int, tokens_per_step: int
) -> dict[str, float]:
    prompts = [_taken(text, prompt_tokens) for _ in range(sequences)]
    requests = tuple(DraftRequest(slot=slot, max_tokens=CAP, new_blocks=()) for slot in range(sequences))
    plan = DraftPlan(step=0, width=CAP, requests=requests)
    gc.collect()
    gc.disable()
    began = time.thread_time()
    for slot, prompt in enumerate(prompts):
        drafter.start(
            SequenceStart(slot=slot, sampling=SamplingParams(), seed=0, prompt_len=prompt_tokens, token_ids=prompt)
        )
    for _ in range(-(-sequences * prompt_tokens // TextRules(cap=CAP).chunk)):
        drafter.commit([], [], [])
    drafter.propose(plan)
    first_s = time.thread_time() - began
    propose_s, commit_s, drafted = [], [], 0
    for _ in range(steps):
        sampled = _taken(text, tokens_per_step * sequences)
        began = time.thread_time()
        drafter.commit(range(sequences), [tokens_per_step] * sequences, sampled)
        middle = time.thread_time()
        proposals = drafter.propose(plan)
        ended = time.thread_time()
        commit_s.append(middle - began)
        propose_s.append(ended - middle)
        drafted += int(proposals.table.lengths.sum())
    gc.enable()
    began = time.thread_time()
    for slot in range(sequences):
        drafter.release(slot)
    step_s = [sum(both) for both in zip(propose_s, commit_s, strict=True)]
    return {
        "start_and_first_propose_us_per_prompt_token": _us(first_s / (sequences * prompt_tokens)),
        "commit_us_per_sequence": _us(statistics.median(commit_s) / sequences),
        "propose_us_per_sequence": _us(statistics.median(propose_s) / sequences),
        "step_us_per_sequence": _us(statistics.median(step_s) / sequences),
        "fastest_step_us_per_sequence": _us(min(step_s) / sequences),
        "release_us_per_sequence": _us((time.thread_time() - began) / sequences),
        "drafted_tokens_per_sequence_step": round(drafted / (steps * sequences), 2),
    }


def _index(num_tokens: int) -> dict[str, float]:
    rules, library = text_rules(SpeculationConfig(), ("suffix", "ngram")), load_index()
    text, taken = _taken(_zipfian(1), num_tokens), []
    for _ in range(9):
        index, calls = TextIndex(library, rules), []
        empty = index.num_bytes
        table = empty_table([0] * index.num_methods, "suffix", CAP)
        index.open(0, text)
        for _ in range(-(-num_tokens // rules.chunk)):
            began = time.thread_time()
            index.extend([], [], [])
            index.look_up(
                [0],
                [CAP],
                [()],
                lengths=table.lengths,
                token_ids=table.token_ids,
                confidences=table.confidences,
            )
            calls.append(time.thread_time() - began)
        taken.append((max(calls), statistics.median(calls), sum(calls), index.num_bytes - empty))
    longest, median, total, num_bytes = map(statistics.median, zip(*taken, strict=True))
    return {
        "tokens": num_tokens,
        "longest_call_ms": round(longest * 1e3, 3),
        "median_call_ms": round(median * 1e3, 3),
        "all_calls_ms": round(total * 1e3, 2),
        "bytes_per_token": round(num_bytes / num_tokens, 1),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
