"""The replay: which drafters, over which recorded answers, at which price of a row."""

import json
import time
from collections.abc import Callable, Mapping, Sequence

import torch
from rich.progress import track

from benchmarks.text_replay.drafters import Counted, LookUp, Recycled, Replayed, Successors
from benchmarks.text_replay.recording import TOP, Answer
from benchmarks.text_replay.scoring import Offers, Rates, Tally, gain, offers, played
from faser.engine.checkpoints.ngram_model import LONGEST, count
from faser.engine.execution.drafting.registry import load_index

PRICES = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
REQUESTS = (1, 4, 16, 32)
_FOLDS = 2  # rates are learned from the conversations of the other fold

# What drafts: names of drafters, joined by +.
ARMS = (
    "look-up, no past answers",
    "look-up",
    "look-up from 1 token",
    "recycling",
    "recycling, mean of 8",
    "successors 3 2 1",
    "look-up + recycling",
    "look-up + recycling, mean of 8",
    "look-up, shared",
    "look-up, shared + recycling, shared",
    "look-up, shared + recycling, mean of 8, shared",
    "n-gram model",
    "look-up from 1 token + n-gram model",
    "look-up from 1 token + n-gram model + recycling, mean of 8",
)


def makers(self_made: Sequence[Answer]) -> dict[str, Callable[[], Replayed]]:
    """Makes each drafter anew. self_made: text that the model made up, for its n-gram model."""
    library = load_index()
    ngrams = count([(*each.prompt[-LONGEST:], *each.tokens) for each in self_made]) if self_made else None
    found: dict[str, Callable[[], Replayed]] = {
        "look-up, no past answers": lambda: LookUp(library, corpus=False),
        "look-up": lambda: LookUp(library, corpus=True),
        "look-up from 1 token": lambda: LookUp(library, corpus=True, min_n=1),
        "recycling": lambda: Successors((1,), by_argmax=True),
        "recycling, mean of 8": lambda: Recycled(),
        "successors 3 2 1": lambda: Successors((3, 2, 1)),
        "look-up, shared": lambda: LookUp(library, corpus=True, shares=True),
        "recycling, shared": lambda: Successors((1,), by_argmax=True, shares=True),
        "recycling, mean of 8, shared": lambda: Recycled(shares=True),
    }
    if ngrams is not None:
        found["n-gram model"] = lambda: Counted(library, ngrams)
    return found


def replay(
    recorded: Sequence[Answer], self_made: Sequence[Answer], seconds: Mapping[int, float], most: int
) -> list[dict[str, object]]:
    """A row for every arm, kind of traffic and temperature.

    seconds: of a step, by its rows. most: tokens of an answer that count.
    """
    make = makers(self_made)
    names = list(make)
    groups: dict[tuple[str, float], list[Answer]] = {}
    for answer in recorded:
        groups.setdefault((answer.kind, answer.temperature), []).append(answer.cut(most))
    rows = []
    for (kind, temperature), answers in groups.items():
        found: dict[str, list[Offers]] = {}
        for name in names:
            drafter = make[name]()
            found[name] = [
                offers(drafter, name, answer) for answer in track(answers, f"{kind} {temperature} {name}")
            ]
        talks = {name: number for number, name in enumerate(dict.fromkeys(each.conversation for each in answers))}
        folds = [talks[each.conversation] % _FOLDS for each in answers]
        rates = [_learned(found, folds, fold) for fold in range(_FOLDS)]
        for arm in ARMS:
            parts = parts_of(arm, names)
            if parts:
                by_price = _by_price([found[part] for part in parts], folds, rates)
                rows.append(_row(kind, temperature, arm, by_price, seconds))
                print(json.dumps(rows[-1]), flush=True)
    return rows


def parts_of(arm: str, names: Sequence[str]) -> list[str]:
    """The drafters of an arm; none if one of them is missing."""
    parts = arm.split(" + ")
    return parts if all(part in names for part in parts) else []


def _learned(found: Mapping[str, list[Offers]], folds: Sequence[int], held_out: int) -> Rates:
    rates = Rates()
    for by_answer in found.values():
        for offered, fold in zip(by_answer, folds, strict=True):
            if fold != held_out:
                rates.learn(offered)
    return rates


def _by_price(parts: Sequence[list[Offers]], folds: Sequence[int], rates: Sequence[Rates]) -> dict[float, Tally]:
    tallies = {price: Tally() for price in PRICES}
    for number, fold in enumerate(folds):
        offered = [part[number] for part in parts]
        if not offered[0]:
            continue
        for price, tally in tallies.items():
            tally.add(played(offered, rates[fold], price))
    return tallies


def _row(
    kind: str, temperature: float, arm: str, by_price: Mapping[float, Tally], seconds: Mapping[int, float]
) -> dict[str, object]:
    """gain: by requests at once, at the best price; a price of which nothing is drafted gives 1."""
    row: dict[str, object] = {"kind": kind, "temperature": temperature, "drafts": arm}
    for requests in REQUESTS:
        gains = {price: gain(tally, requests, seconds) for price, tally in by_price.items()}
        best = max(gains, key=gains.__getitem__)
        tally = by_price[best]
        row[f"at {requests}"] = {
            "gain": round(gains[best], 3),
            "price": best,
            "tokens_per_step": round(tally.tokens / tally.steps, 3),
            "rows_per_step": round(tally.rows / tally.steps, 3),
            "steps_that_draft": round(tally.drafting / tally.steps, 3),
        }
    return row


def top_ms(rows: int, vocab_size: int) -> float:
    """What finding the TOP likeliest tokens of so many rows takes: the least of many times, on one thread."""
    logits = torch.randn(rows, vocab_size)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    seconds = []
    for _ in range(50):
        began_s = time.perf_counter()
        torch.topk(logits, TOP)
        seconds.append(time.perf_counter() - began_s)
    torch.set_num_threads(threads)
    return round(1e3 * min(seconds), 3)
