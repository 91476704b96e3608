"""How good drafts from text are, and how true their confidences, on this package's own source files.

    python -m benchmarks.text_drafts OUT.json [--tokens 2500]

Tokens are words and signs. A third of each file is the prompt, the rest is what a greedy target is taken to say;
each file's rest enters the corpus before the next file comes. Calibration: by confidence rounded to a tenth, the
share of judged tokens that were right, and their number. AUC: of confidences as a ranking of judged tokens. Those
drafted behind the first wrong one have no verdict and do not count.
"""

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import faser
from faser.config.speculation import SpeculationConfig
from faser.engine.contract.plan import Draft, DraftPlan, DraftRequest, SequenceStart
from faser.engine.execution.drafting.drafter import Continuation, Drafter
from faser.engine.execution.drafting.registry import load_index
from faser.engine.execution.drafting.text import LookupDrafter, text_rules
from faser.types import SamplingParams

CAP = 16
PLAN = DraftPlan(step=0, released=(), requests=(DraftRequest(slot=0, max_tokens=CAP, new_blocks=()),))
WORDS = re.compile(r"\w{1,6}|\s+|[^\w\s]")

Verdict = tuple[float, bool]  # confidence, was it right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=2500, help="most tokens of a file")
    options = parser.parse_args()
    drafters: dict[str, Drafter] = {
        "ngram": _lookup("ngram"),
        "suffix": _lookup("suffix"),
        "suffix without corpus": _lookup("suffix", suffix_max_cached_requests=0),
    }
    texts = list(_texts(options.tokens))
    rows = {name: _judge(drafter, texts) for name, drafter in drafters.items()}
    result = {"files": len(texts), "tokens": sum(map(len, texts)), "drafters": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def _lookup(method: str, **given: int) -> Drafter:
    config = SpeculationConfig(num_speculative_tokens=CAP, prompt_lookup_min=2, **given)  # type: ignore[arg-type]
    return LookupDrafter(load_index(), text_rules(config, (method,)))


def _texts(most: int) -> Iterator[tuple[int, ...]]:
    numbers: dict[str, int] = {}
    for path in sorted((Path(faser.__file__).parent / "engine").rglob("*.py")):
        words = WORDS.findall(path.read_text())[:most]
        yield tuple(numbers.setdefault(word, len(numbers)) for word in words)


def _judge(drafter: Drafter, texts: list[tuple[int, ...]]) -> dict[str, object]:
    steps = drafted = accepted = 0
    verdicts: list[Verdict] = []
    for text in texts:
        for draft, right in _speak(drafter, text):
            steps, drafted, accepted = steps + 1, drafted + len(draft.token_ids), accepted + right
            judged = draft.confidences[: right + 1]
            verdicts += [(confidence, index < right) for index, confidence in enumerate(judged)]
    return {
        "accepted_per_step": round(accepted / steps, 3),
        "drafted_per_step": round(drafted / steps, 3),
        "auc": round(_auc(verdicts), 3),
        "calibration": _calibration(verdicts),
    }


def _speak(drafter: Drafter, text: tuple[int, ...]) -> Iterator[tuple[Draft, int]]:
    """Each step's draft and how many leading tokens of it were right."""
    known = len(text) // 3
    drafter.start(
        SequenceStart(
            slot=0, sampling=SamplingParams(), seed=0, prompt_len=known, token_ids=text[:known], salt=None
        )
    )
    while known < len(text) - CAP:
        (draft,) = drafter.propose(PLAN).drafts
        right = 0
        while right < len(draft.token_ids) and draft.token_ids[right] == text[known + right]:
            right += 1
        came = text[known : known + right + 1]
        drafter.commit([Continuation(slot=0, token_ids=came, num_accepted=right)])
        known += len(came)
        yield draft, right
    drafter.release(0)


def _calibration(verdicts: list[Verdict]) -> dict[str, tuple[float, int]]:
    tenths: dict[float, list[bool]] = defaultdict(list)
    for confidence, right in verdicts:
        tenths[round(confidence, 1)].append(right)
    return {
        str(tenth): (round(sum(rights) / len(rights), 2), len(rights)) for tenth, rights in sorted(tenths.items())
    }


def _auc(verdicts: list[Verdict]) -> float:
    """Probability that a right token had the higher confidence than a wrong one; equal ones count half."""
    counts: dict[float, list[int]] = defaultdict(lambda: [0, 0])
    for confidence, right in verdicts:
        counts[confidence][right] += 1
    above = wrong_below = 0.0
    for _, (wrong, hits) in sorted(counts.items()):
        above += hits * (wrong_below + wrong / 2)
        wrong_below += wrong
    return above / (wrong_below * sum(right for _, right in verdicts))


if __name__ == "__main__":
    main()
