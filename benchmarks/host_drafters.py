"""What the drafters from text cost on the host, in microseconds, and how the chooser adds to them.

    python -m benchmarks.host_drafters OUT.json [--sequences 64] [--prompt-tokens 2000] [--steps 60]

Text: words of a random vocabulary, drawn with Zipf's law and often repeated in phrases, so that drafts are found.
Every step proposes for all sequences and commits three tokens to each, as a step with speculation does. Time is
that of the thread, so that other work on the machine does not count.
"""

import argparse
import gc
import itertools
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from faser.engine.plan import DraftPlan, DraftWish, SequenceStart
from faser.engine.spec.chooser import Chooser
from faser.engine.spec.drafter import Continuation, Drafter
from faser.engine.spec.ngram import NgramDrafter
from faser.engine.spec.suffix import SuffixDrafter
from faser.types import SamplingParams

CAP = 16
TOKENS_PER_STEP = 3
CORPUS_TOKENS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    drafters: dict[str, Callable[[], Drafter]] = {
        "ngram": _ngram,
        "suffix": _suffix,
        "chooser of both": lambda: Chooser([_suffix(), _ngram()], model_cap=CAP),
    }
    rows = {
        name: _measure(make, options.sequences, options.prompt_tokens, options.steps)
        for name, make in drafters.items()
    }
    sizes = {"sequences": options.sequences, "prompt_tokens": options.prompt_tokens, "steps": options.steps}
    result = {"sizes": sizes, "drafters": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _ngram() -> Drafter:
    return NgramDrafter(min_n=2, max_n=5, cap=CAP)


def _suffix() -> Drafter:
    drafter = SuffixDrafter(cap=CAP, corpus_tokens=CORPUS_TOKENS)
    text = Zipfian(seed=7)
    for _ in range(CORPUS_TOKENS // 500):
        drafter.corpus.add(text.take(500), salt=hash(None))
    return drafter


class Zipfian:
    """Endless text: phrases said before come again with probability one half."""

    def __init__(self, *, seed: int) -> None:
        self._rng = random.Random(seed)
        self._vocabulary = range(30_000)
        self._weights = list(itertools.accumulate(1 / (rank + 1) for rank in self._vocabulary))
        self._phrases = [self._words(self._rng.randrange(3, 20)) for _ in range(200)]

    def take(self, num_tokens: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while len(tokens) < num_tokens:
            again = self._rng.random() < 0.5
            tokens += self._rng.choice(self._phrases) if again else self._words(self._rng.randrange(1, 8))
        return tuple(tokens[:num_tokens])

    def _words(self, count: int) -> list[int]:
        return self._rng.choices(self._vocabulary, cum_weights=self._weights, k=count)


def _measure(make: Callable[[], Drafter], sequences: int, prompt_tokens: int, steps: int) -> dict[str, float]:
    drafter, text = make(), Zipfian(seed=1)
    prompts = [text.take(prompt_tokens) for _ in range(sequences)]
    plan = DraftPlan(
        step=0,
        released=(),
        wishes=tuple(DraftWish(slot=slot, max_tokens=CAP, new_blocks=()) for slot in range(sequences)),
    )
    gc.collect()
    gc.disable()
    began = time.thread_time()
    for slot, prompt in enumerate(prompts):
        drafter.start(
            SequenceStart(slot=slot, sampling=SamplingParams(), seed=0, prompt_len=prompt_tokens, token_ids=prompt)
        )
    drafter.propose(plan)
    first_s = time.thread_time() - began
    propose_s, commit_s, drafted = [], [], 0
    for _ in range(steps):
        came = [Continuation(slot=slot, token_ids=text.take(TOKENS_PER_STEP)) for slot in range(sequences)]
        began = time.thread_time()
        drafter.commit(came)
        middle = time.thread_time()
        proposals = drafter.propose(plan)
        ended = time.thread_time()
        commit_s.append(middle - began)
        propose_s.append(ended - middle)
        drafted += sum(len(draft.token_ids) for draft in proposals.drafts)
    gc.enable()
    began = time.thread_time()
    for slot in range(sequences):
        drafter.release(slot)
    return {
        "start_and_first_propose_us_per_prompt_token": _us(first_s / (sequences * prompt_tokens)),
        "commit_us_per_token": _us(statistics.median(commit_s) / (sequences * TOKENS_PER_STEP)),
        "propose_us_per_sequence": _us(statistics.median(propose_s) / sequences),
        "step_us_all_sequences": _us(statistics.median(propose_s) + statistics.median(commit_s)),
        "release_us_per_sequence": _us((time.thread_time() - began) / sequences),
        "drafted_tokens_per_sequence_step": round(drafted / (steps * sequences), 2),
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)


if __name__ == "__main__":
    main()
