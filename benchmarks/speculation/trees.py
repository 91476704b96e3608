"""Trees of drafts against chains, counted offline on recorded answers; nothing of it is in the engine.

    python -m benchmarks.speculation.trees OUT.json TRACE.jsonl...

TRACE: of `python -m benchmarks.simulator --record`, of which the prompts and answers are read. At every place of
an answer the drafters of the default flags draft a chain, as in the engine. A tree has further candidates for
the first token, or for the first two: what the other methods propose, what else has followed the last one to five
tokens in the text, what the n-gram model has after shorter contexts; each goes on with a chain of its own. How
likely a candidate is follows from how often those of its kind were right so far. Of a tree the likeliest nodes are
verified: as many as bring most tokens a second by a table of prices, or a fixed number.

Prices are milliseconds of a step by its rows: low-bit-steps.json and low-bit-steps-1.5b.json (AVX-512), the same
with low-bit tiles of AMX from 12 rows on, and free_rows.py (AMX in bfloat16); those of AMX are predictions.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.runner import Json, about, command_line, write_json
from benchmarks.simulator.trace import RequestTrace, Trace, read_trace
from benchmarks.speculation import free_rows
from faser.config.environment import cache_dir
from faser.config.speculation import SpeculationConfig
from faser.engine.build import native_acceptance
from faser.engine.checkpoints.ngram_model import NO_TOKEN, NgramModel
from faser.engine.checkpoints.source import cached
from faser.engine.contract.drafts import DraftTable
from faser.engine.contract.plan import DraftPlan, DraftRequest, SequenceStart
from faser.engine.contract.step_times import CostTable
from faser.engine.control.speculation.acceptance import Acceptance, point_mass_outcomes, sampled_tokens
from faser.engine.execution.drafting.registry import load_index
from faser.engine.execution.drafting.text import LookupDrafter, ngram_table, text_rules
from faser.engine.execution.startup.ngram_text import counted_ngram_model
from faser.engine.text.tokenizer import load_tokenizer
from faser.kernels.cpu.text_index import text_library
from faser.types import SamplingParams

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
RESULTS = Path(__file__).parents[1] / "results"
CAP, MOST_DRAFT_ROWS = 16, 15
CONTEXTS = (5, 4, 3, 2, 1)  # tokens before a candidate that was counted in the text
SIBLINGS = 2
# Which groups of nodes an arm has besides the chain: siblings of its first token, of its second one.
ARMS = {
    "chain": (0, 0),
    "2 at the first place": (1, 0),
    "3 at the first place": (2, 0),
    "2 at the first two": (1, 1),
    "3 at the first two": (2, 2),
}
ROWS = (1, 3, 7, 15)
_DOUBT, _USUAL = 4.0, 0.1  # a kind of candidates that is new counts as this many, of which this share was right


@dataclass(frozen=True, slots=True)
class Node:
    """A draft token of a tree. depth: from 1 on. right: it and all before it on its path are the answer's."""

    survival: float
    depth: int
    right: bool


@dataclass(slots=True)
class Place:
    """The nodes at a place of an answer. first, second: those of each further candidate, its chain included."""

    chain: list[Node]
    first: list[list[Node]] = field(default_factory=list)
    second: list[list[Node]] = field(default_factory=list)

    def nodes(self, arm: str) -> list[Node]:
        """The likeliest first, and none before the one that it follows."""
        num_first, num_second = ARMS[arm]
        groups = [self.chain, *self.first[:num_first], *self.second[:num_second]]
        return sorted((node for group in groups for node in group), key=lambda node: (-node.survival, node.depth))


class Candidates:
    """Further candidates for the next token of a text, and how often those of their kind were right."""

    def __init__(self, ngrams: NgramModel | None) -> None:
        self._right: Counter[Any] = Counter()
        self._seen: Counter[Any] = Counter()
        self._following: dict[tuple[int, ...], tuple[int, float]] = {}
        if ngrams is not None:
            rows = zip(ngrams.contexts.tolist(), ngrams.following.tolist(), ngrams.chances.tolist(), strict=True)
            self._following = {
                tuple(each for each in context if each != NO_TOKEN): (following, chance)
                for context, following, chance in rows
            }
        self._counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)

    def start(self, prompt: Sequence[int]) -> None:
        self._counts.clear()
        for at in range(1, len(prompt)):
            self.append(prompt[: at + 1])

    def append(self, text: Sequence[int]) -> None:
        """The last token of the text has come."""
        for length in CONTEXTS:
            if length < len(text):
                self._counts[tuple(text[-length - 1 : -1])][text[-1]] += 1

    def kinds(self, text: Sequence[int], drafted: DraftTable) -> dict[int, list[Any]]:
        """Return by token what speaks for it. drafted: by every method, of this text."""
        found: dict[int, list[Any]] = defaultdict(list)
        for method, length, tokens, sure in zip(
            drafted.methods.tolist(), drafted.lengths.tolist(), drafted.token_ids, drafted.confidences, strict=True
        ):
            if length:
                found[int(tokens[0])].append(("method", method, round(float(sure[0]), 1)))
        for length in CONTEXTS:
            counts = self._counts.get(tuple(text[-length:]))
            total = 0 if counts is None else min(counts.total(), 8)
            for rank, (token, times) in enumerate(() if counts is None else counts.most_common(4)):
                found[token].append(("count", length, rank, min(times, 4), total))
            entry = self._following.get(tuple(text[-length:]))
            if entry is not None:
                found[entry[0]].append(("n-gram", length, round(entry[1], 1)))
        return found

    def best(self, kinds: dict[int, list[Any]], taken: int | None) -> list[tuple[int, float]]:
        """The likeliest tokens but for the taken one."""
        chances = {token: max(map(self._chance, of)) for token, of in kinds.items() if token != taken}
        return sorted(chances.items(), key=lambda each: -each[1])[:SIBLINGS]

    def learn(self, kinds: dict[int, list[Any]], token: int) -> None:
        for candidate, of in kinds.items():
            for kind in of:
                self._seen[kind] += 1
                self._right[kind] += candidate == token

    def _chance(self, kind: Any) -> float:
        return (self._right[kind] + _DOUBT * _USUAL) / (self._seen[kind] + _DOUBT)


class Counted:
    """The places of recorded answers, in order: what was learned at one counts at the next."""

    def __init__(self, ngrams: NgramModel | None) -> None:
        library = text_library(cache_dir())
        methods = ("suffix", "ngram", *(() if ngrams is None else ("ngram_model",)))
        table = None if ngrams is None else ngram_table(library, ngrams)
        config = SpeculationConfig(suffix_max_cached_requests=0)
        self._drafter = LookupDrafter(library, text_rules(config, methods, table))
        self._acceptance = Acceptance(1, CAP, native_acceptance(load_index))
        self._candidates = Candidates(ngrams)

    def places(self, request: RequestTrace, temperature: float) -> list[Place]:
        prompt, answer = request.prompt_token_ids, request.output_token_ids
        text = [*prompt, answer[0]]
        self._acceptance.start(0, samples=temperature > 0)
        self._candidates.start(text)
        sampling = SamplingParams(temperature=temperature)
        self._drafter.start(
            SequenceStart(slot=0, sampling=sampling, seed=0, prompt_len=len(prompt), token_ids=tuple(text))
        )
        found = []
        for at in range(1, len(answer)):
            found.append(self._place(text, answer[at:]))
            text.append(answer[at])
            self._candidates.append(text)
            self._drafter.commit([0], [1], [answer[at]])
        self._drafter.release(0)
        self._acceptance.release(0)
        return found

    def _place(self, text: list[int], said: Sequence[int]) -> Place:
        drafted = self._drafted()
        tokens, survival = self._chain(drafted)
        place = Place(chain=_nodes((), 1.0, tokens, survival, said))
        kinds = self._candidates.kinds(text, drafted)
        for token, chance in self._candidates.best(kinds, tokens[0] if tokens else None):
            after = self._chain(self._drafted(token))
            place.first.append([_node((token,), chance, said), *_nodes((token,), chance, *after, said)])
        if tokens:
            after_first = self._drafted(tokens[0])
            more = self._candidates.kinds([*text, tokens[0]], after_first)
            for token, chance in self._candidates.best(more, tokens[1] if len(tokens) > 1 else None):
                path, both = (tokens[0], token), survival[0] * chance
                after = self._chain(self._drafted(*path))
                place.second.append([_node(path, both, said), *_nodes(path, both, *after, said)])
            if said[0] == tokens[0] and len(said) > 1:
                self._candidates.learn(more, said[1])
        self._candidates.learn(kinds, said[0])
        accepted = sum(node.right for node in place.chain)
        sampled = sampled_tokens([tuple(said[: accepted + 1])] * len(drafted.slots), CAP)
        self._acceptance.learn(point_mass_outcomes(drafted, sampled))
        return place

    def _drafted(self, *after: int) -> DraftTable:
        """Draft by every method, after the text and these tokens."""
        request = DraftRequest(slot=0, max_tokens=CAP, new_blocks=(), unverified=after)
        return self._drafter.propose(DraftPlan(step=0, width=CAP, requests=(request,), from_text=True)).table

    def _chain(self, drafted: DraftTable) -> tuple[list[int], list[float]]:
        """The draft that the engine takes, and its survival."""
        survival = self._acceptance.drafted_survival(drafted)
        best = int(np.add.reduce(survival, axis=1).argmax())
        length = drafted.lengths.item(best)
        return drafted.token_ids[best, :length].tolist(), survival[best, 1 : 1 + length].tolist()


def _node(path: Sequence[int], survival: float, said: Sequence[int]) -> Node:
    return Node(survival, len(path), tuple(said[: len(path)]) == tuple(path))


def _nodes(
    before: Sequence[int], chance: float, tokens: list[int], survival: list[float], said: Sequence[int]
) -> list[Node]:
    """Return the nodes of a chain after a path."""
    return [
        _node((*before, *tokens[: at + 1]), chance * each, said) for at, each in enumerate(survival) if each > 0
    ]


def decoded(answers: list[list[Place]], arm: str, step_ms: Sequence[float], rows: int | None) -> dict[str, float]:
    """Decode all answers. rows: draft rows of every step; None: as many as step_ms says pay."""
    steps = tokens = drafted = 0
    seconds = 0.0
    prices = np.array(step_ms)
    for places in answers:
        at = 0
        while at < len(places):
            nodes = places[at].nodes(arm)[:MOST_DRAFT_ROWS]
            count = min(len(nodes), rows or 0)
            if rows is None:
                worth = 1.0 + np.add.accumulate([0.0, *(node.survival for node in nodes)])
                count = int((worth / prices[1 : 2 + len(nodes)]).argmax())
            accepted = max((node.depth for node in nodes[:count] if node.right), default=0)
            gained = min(1 + accepted, len(places) - at)
            at += gained
            tokens, steps, drafted, seconds = (
                tokens + gained,
                steps + 1,
                drafted + count,
                seconds + prices[1 + count],
            )
    return {"tokens_per_step": tokens / steps, "draft_rows": drafted / steps, "ms_per_token": seconds / tokens}


def prices_of(model: str) -> dict[str, list[float]]:
    """Return the milliseconds [1 + MOST_DRAFT_ROWS + 1] of a step by rows; 0 rows are none."""
    small = model in (DEFAULT_MODEL, "embedded")
    filed = json.loads((RESULTS / f"low-bit-steps{'' if small else '-1.5b'}.json").read_text("utf-8"))["decoding"]
    dense = {}
    for weights in ("bfloat16", "as stored"):
        measured = {row["rows"]: row[weights]["min_ms"] for row in filed}
        dense[weights] = CostTable.measured(measured, edges=(6, 12)).dense(1 + MOST_DRAFT_ROWS)
    size = 1.0 if small else 3.09e9 / free_rows.MODEL_BYTES
    amx = np.array(
        [0.0, *(free_rows.step_s("AMX", rows, size=size) * 1e3 for rows in range(1, 2 + MOST_DRAFT_ROWS))]
    )
    tiles = dense["as stored"].copy()
    tiles[12:] = np.maximum(tiles[12:] / 1.3, tiles[11])
    found = {
        "AVX-512, low-bit": dense["as stored"],
        "AVX-512, bfloat16": dense["bfloat16"],
        "AMX, low-bit (predicted)": tiles,
        "AMX, bfloat16 (predicted)": amx,
        "AMX, further rows at half of that": np.concatenate(([0.0], (amx[1:] + amx[1]) / 2)),
        "rows that cost nothing": np.array([0.0, *[1.0] * (1 + MOST_DRAFT_ROWS)]),
    }
    return {name: each.tolist() for name, each in found.items()}


def counted(trace: Trace) -> Json:
    """Every arm with every price and every number of rows."""
    name = Path(trace.model).name
    directory = cached(None if name == "embedded" else name, cache_dir())
    vocab_size = load_tokenizer(directory).vocab_size
    of = Counted(counted_ngram_model(directory, vocab_size, cache_dir() / "ngrams", lambda *_: None))
    answers = [of.places(request, trace.temperature) for request in trace.requests]
    cells = []
    settings: list[tuple[str, list[float], int | None]] = [
        (price, step_ms, None) for price, step_ms in prices_of(name).items()
    ]
    settings += [
        (f"always {rows} draft rows, which cost nothing", [0.0, *[1.0] * (1 + MOST_DRAFT_ROWS)], rows)
        for rows in ROWS
    ]
    for price, step_ms, rows in settings:
        found = {arm: decoded(answers, arm, step_ms, rows) for arm in ARMS}
        chain_ms = found["chain"]["ms_per_token"]
        cells.append(
            {
                "price": price,
                "chain over none": round(step_ms[1] / chain_ms, 3),
                "over chain": {arm: round(chain_ms / each["ms_per_token"], 3) for arm, each in found.items()},
                "tokens_per_step": {arm: round(each["tokens_per_step"], 3) for arm, each in found.items()},
                "draft_rows": {arm: round(each["draft_rows"], 2) for arm, each in found.items()},
            }
        )
        print(name, trace.temperature, price, cells[-1]["chain over none"], cells[-1]["over chain"], flush=True)
    return {
        "model": DEFAULT_MODEL if name == "embedded" else name,
        "temperature": trace.temperature,
        "answers": len(answers),
        "tokens": sum(map(len, answers)),
        "step_ms": {price: [round(each, 3) for each in step_ms[1:]] for price, step_ms in prices_of(name).items()},
        "cells": cells,
    }


HEADING = """# Trees of drafts against chains, counted offline

Decoding speed by what rows cost: `chain` is the chain that is drafted today over no drafts, the other columns
are trees over that chain. A tree has two or three candidates for the first token, or for the first two, each
with a chain of its own. Answers to Spec-Bench's questions but for summaries and retrieval; drafters of the
default flags: look-up in the text, and for the default model its n-gram table. Neither look-up nor a mask in
attention costs anything here, so the figures are bounds for trees. Prices of AVX-512 were measured; those of
AMX are predictions, and nothing was measured on such a machine.

What is counted: `benchmarks/speculation/trees.py`, the command: [README.md](README.md), all figures:
[trees.json](trees.json).
"""


def sheet(models: Sequence[Json]) -> str:
    arms = [arm for arm in ARMS if arm != "chain"]
    lines = [HEADING]
    for model in models:
        said = f"{model['answers']} answers, {model['tokens']:,} tokens"
        lines += [f"**{model['model']}, temperature {model['temperature']:g}** ({said})", ""]
        lines += [f"| a row costs as with | chain | {' | '.join(arms)} |", "| --- " * (2 + len(arms)) + "|"]
        for cell in model["cells"]:
            gains = [f"{100 * (cell['over chain'][arm] - 1):+.1f} %" for arm in arms]
            lines.append(f"| {cell['price']} | {cell['chain over none']:.2f}x | {' | '.join(gains)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("traces", type=Path, nargs="+")
    options = parser.parse_args()
    models = [counted(read_trace(path)) for path in options.traces]
    write_json(options.out, {**about("benchmarks.speculation.trees"), "models": models})
    options.out.with_suffix(".md").write_text(sheet(models))


if __name__ == "__main__":
    main()
