"""What a draft model loses that has read only the last tokens of a prompt; JSON and a Markdown table.

    python -m benchmarks.draft_memory OUT_DIR QUESTIONS TARGET_DIR DRAFTER_DIR... [--count 6] [--tokens 64]

The target answers long prompts greedily. A drafter then reads the last M tokens of the prompt, from position 0 on,
and the answer behind them: what is before them is as if it were not there (attention sees only differences of
positions). With `first` tokens kept, it reads the prompt's first ones too, just before the last ones: attention
likes to rest on them (arXiv 2309.17453).

agreement: share of answered tokens that are the drafter's likeliest as well. accepted: mean length of the accepted
beginning of drafts of four tokens, each draft beginning where the one before it was cut. sampled: mean probability
that the drafter gives the target's token. Questions are Spec-Bench's; a second turn has the target's own answer
before it, and a late draft begins in the midst of an answer, whose first 256 tokens count as the prompt. Short
prompts have 100 to 300 tokens, all others 300 to 1200.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import exp
from pathlib import Path
from typing import Any

from faser.offline import LLM, Generation
from faser.types import PositionLogprobs, SamplingParams

MEMORIES = (16, 32, 64, 128, 256, None)
FIRSTS = (0, 4)
GAMMA = 4
_SHORT, _SHORT_PROMPT, _LONG_PROMPT = "short", (100, 300), (300, 1200)  # from, to: tokens
_TURN_TOKENS = 224  # most of the answer between two turns
_LATE, _LATE_AFTER = "late", 256  # tokens of the answer
_COPIED_CHARS = 1200
_LONG_KINDS = ("summarization", "rag")
_ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A prompt and what the target answered."""

    kind: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """One drafter on one answer. memory: M, or all. See the module for the rest."""

    drafter: str
    kind: str
    memory: int | str
    first: int
    prompt_tokens: int
    agreement: float
    accepted: float
    sampled: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("questions", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("drafters", type=Path, nargs="+")
    parser.add_argument("--count", type=int, default=6, help="prompts of each kind (default 6)")
    parser.add_argument("--tokens", type=int, default=64, help="most of each answer (default 64)")
    options = parser.parse_args()
    rows = [json.loads(line) for line in options.questions.read_text("utf-8").splitlines()]
    with LLM(str(options.target), speculative_policy="off", max_model_len=2048) as target:
        answers = answered(target, conversations(target, rows, 4 * options.count), options.count, options.tokens)
    found: list[Quality] = []
    for path in options.drafters:
        with LLM(str(path), speculative_policy="off", max_model_len=2048) as drafter:
            found.extend(qualities(path.name, drafter, answers))
    options.out.mkdir(parents=True, exist_ok=True)
    report = {"target": options.target.name, "tokens": options.tokens, "answers": [asdict(each) for each in found]}
    (options.out / "draft_memory.json").write_text(json.dumps(report) + "\n", "utf-8")
    (options.out / "draft_memory.md").write_text(table(found), "utf-8")
    print(table(found))


def conversations(target: LLM, rows: Sequence[Any], count: int) -> dict[str, list[list[dict[str, str]]]]:
    """By kind, up to count conversations that wait for an answer."""

    def of(category: str) -> list[str]:
        return [row["turns"][0] for row in rows if row["category"] == category][:count]

    turns = [row["turns"] for row in rows if len(row["turns"]) == 2]
    turns = sorted(turns, key=lambda pair: -len(" ".join(pair)))[:count]
    firsts = target.chat([[_user(first)] for first, _ in turns], _greedy(_TURN_TOKENS), progress=True)
    return {
        "summarization": [[_user(text)] for text in of("summarization")],
        "rag": [[_user(text)] for text in of("rag")],
        "multi-turn": [
            [_user(pair[0]), {"role": "assistant", "content": first.text}, _user(pair[1])]
            for pair, first in zip(turns, firsts, strict=True)
        ],
        "copying": [
            [_user(f"Repeat this text word for word:\n\n{text[-_COPIED_CHARS:]}\n\nBegin at once.")]
            for text in of("summarization")
        ],
        _LATE: [[_user(first)] for first, _ in turns],
        _SHORT: [[_user(row["turns"][0])] for row in rows if row["category"] not in _LONG_KINDS][
            :: len(rows) // 60
        ],
    }


def answered(
    target: LLM, asked: dict[str, list[list[dict[str, str]]]], count: int, num_tokens: int
) -> list[Answered]:
    """`count` answers of each kind, to prompts that are long but not too long."""
    found: list[Answered] = []
    for kind, messages in asked.items():
        early = _LATE_AFTER if kind == _LATE else 0
        generations = target.chat(messages, _greedy(early + num_tokens), progress=True)
        found.extend(
            [each for each in (_answered(kind, one, early) for one in generations) if _fits(each)][:count]
        )
    return found


def _answered(kind: str, generation: Generation, early: int) -> Answered:
    token_ids = tuple(generation.samples[0].token_ids)
    return Answered(kind=kind, prompt=(*generation.prompt_token_ids, *token_ids[:early]), answer=token_ids[early:])


def _fits(each: Answered) -> bool:
    least, most = _SHORT_PROMPT if each.kind == _SHORT else _LONG_PROMPT
    return least <= len(each.prompt) <= most and len(each.answer) > GAMMA


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens)


def qualities(name: str, drafter: LLM, answers: Sequence[Answered]) -> Iterator[Quality]:
    """Of every answer, memory and number of first tokens."""
    cases = [
        (each, memory, first)
        for each in answers
        for memory in MEMORIES
        for first in (FIRSTS if memory is not None else (0,))
    ]
    reading = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    contexts = [(*remembered(each.prompt, memory, first), *each.answer) for each, memory, first in cases]
    for (each, memory, first), read in zip(cases, drafter.generate(contexts, reading, progress=True), strict=True):
        assert read.prompt_logprobs is not None
        tokens = [token for token in read.prompt_logprobs[-len(each.answer) :] if token is not None]
        yield _quality(name, each, tokens, memory, first)


def _quality(
    name: str, each: Answered, tokens: Sequence[PositionLogprobs], memory: int | None, first: int
) -> Quality:
    agrees = [token.rank == 1 for token in tokens]
    return Quality(
        drafter=name,
        kind=each.kind,
        memory=_ALL if memory is None else memory,
        first=first,
        prompt_tokens=len(each.prompt),
        agreement=round(statistics.fmean(agrees), 4),
        accepted=round(mean_accepted(agrees, GAMMA), 4),
        sampled=round(statistics.fmean(exp(token.logprob) for token in tokens), 4),
    )


def remembered(prompt: tuple[int, ...], memory: int | None, first: int) -> tuple[int, ...]:
    """The last `memory` tokens, `first` of them given up for as many of the prompt's first ones."""
    if memory is None or len(prompt) <= memory:
        return prompt
    return (*prompt[:first], *prompt[first - memory :])


def mean_accepted(agrees: Sequence[bool], gamma: int) -> float:
    """Accepted tokens a draft; after each comes one of the target's own. Drafts that the end cuts do not count."""
    accepted, start = [], 0
    while start + gamma <= len(agrees):
        draft = agrees[start : start + gamma]
        accepted.append(draft.index(False) if False in draft else gamma)
        start += accepted[-1] + 1
    return statistics.fmean(accepted)


def table(found: Sequence[Quality]) -> str:
    """Means by drafter, kind and memory; and the accepted tokens in parts of those with the whole prompt."""
    lines = [
        "| drafter | kind | prompts | last tokens | first tokens | agreement | accepted of 4 | of all | sampled |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    kinds = list(dict.fromkeys(each.kind for each in found))
    for drafter in dict.fromkeys(each.drafter for each in found):
        of_drafter = [each for each in found if each.drafter == drafter]
        for kind in kinds:
            lines.extend(_lines(drafter, kind, [each for each in of_drafter if each.kind == kind]))
        lines.extend(_lines(drafter, "each", of_drafter))
    return "\n".join(lines) + "\n"


def _lines(drafter: str, kind: str, found: Sequence[Quality]) -> Iterator[str]:
    whole = statistics.fmean(each.accepted for each in found if each.memory == _ALL)
    for memory, first in dict.fromkeys((each.memory, each.first) for each in found):
        here = [each for each in found if (each.memory, each.first) == (memory, first)]
        accepted = statistics.fmean(each.accepted for each in here)
        yield (
            f"| {drafter} | {kind} | {len(here)} | {memory} | {first} "
            f"| {statistics.fmean(each.agreement for each in here):.3f} | {accepted:.2f} | {accepted / whole:.3f} "
            f"| {statistics.fmean(each.sampled for each in here):.3f} |"
        )


if __name__ == "__main__":
    main()
