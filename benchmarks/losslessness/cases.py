"""The combinations of verifier, drafter, γ and sampling whose law is judged, and the mistakes that must be seen.

The whole product takes hours. Of it stand here so many that every verifier meets every drafter, γ and sampling,
and every drafter every γ but the longest. Trimming of sampled drafts, which no policy does because it is wrong, is
among the mistakes.
"""

import gc
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import partial
from typing import Any

import torch

from benchmarks.losslessness import wrong
from benchmarks.losslessness.law import World, exact_law, holm, joint_and_single, uniform_p_value
from benchmarks.losslessness.play import play
from benchmarks.losslessness.scenarios import (
    PATTERNS,
    SAMPLINGS,
    Case,
    coupled,
    greedy,
    misstated,
    mixed,
    sampled,
    stale,
    text,
)
from faser.engine.execution.drafting.drafter import Drafter
from faser.engine.execution.sampling.parameters import Purpose
from faser.engine.execution.sampling.rejection import Block, Rejection
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import SampleAndMatch, Verifier

FAMILY_ALPHA = 0.01  # chance that any right combination is flagged, over all of them
SEEN = 1e-6  # p-value below which a mistake counts as seen
PAIRS: tuple[tuple[Callable[[Sampler], Verifier], Callable[[World], Drafter]], ...] = (
    (SampleAndMatch, text),
    (SampleAndMatch, greedy),
    (SampleAndMatch, coupled),
    (Rejection, text),
    (Rejection, sampled),
    (Rejection, mixed),
    (Block, sampled),
    (Block, greedy),
)
DRAWN = (sampled, mixed)
NO_DRAFTS, DEEPEST, TRIMMED = "0", "7", "keep trimming"
ROWS = {"0": 3, "1": 5, "3": 7, DEEPEST: 18, "ragged": 6, "changing by step": 6, "stop rule": 8, TRIMMED: 8}
COSTLY_ROWS = ("penalties", "all")  # they cost thrice as much


def product() -> list[Case]:
    """All combinations that an engine could be made of, but for the slowest."""
    return [
        Case(verifier=verifier, drafter=drafter, pattern=pattern, sampling=sampling)
        for verifier, drafter in PAIRS
        for pattern in PATTERNS
        for sampling in SAMPLINGS
        if not (pattern == TRIMMED and drafter in DRAWN)
        and not (pattern == DEEPEST and (drafter is text or sampling in COSTLY_ROWS))
    ]


def meetings(case: Case) -> frozenset[tuple[str, str]]:
    """The pairs of values of which every one has to occur somewhere. Without drafts only the verifier matters."""
    verifier, drafter = (
        f"{part} {role}" for part, role in zip(case.title.split(", "), ("by", "of"), strict=False)
    )
    found = {(verifier, case.pattern)}
    if case.pattern != NO_DRAFTS:
        found |= {(verifier, case.sampling), (verifier, drafter)}
        if case.pattern != DEEPEST:
            found.add((drafter, case.pattern))
    return frozenset(found)


def chosen(cases: Sequence[Case]) -> tuple[Case, ...]:
    """So many of the cases that all their meetings occur, the cheapest for what they add first."""
    missing, found = set[tuple[str, str]]().union(*map(meetings, cases)), list[Case]()

    def worth(case: Case) -> tuple[float, int]:
        cost = ROWS[case.pattern] * (3 if case.sampling in COSTLY_ROWS else 1)
        return len(meetings(case) & missing) ** 2 / cost, -sum(each.sampling == case.sampling for each in found)

    while missing:
        best = max(cases, key=worth)
        missing -= meetings(best)
        found.append(best)
    return tuple(found)


RIGHT = (
    *chosen(product()),
    Case(verifier=wrong.Tokenwise, drafter=sampled, pattern="3", sampling="T 1"),  # with nothing planted
)
WRONG = (
    Case(
        name="target instead of residual",
        verifier=partial(wrong.Tokenwise, replace=wrong.target_instead_of_residual),
        drafter=sampled,
        pattern="3",
        sampling="T 1",
    ),
    Case(
        name="target instead of residual",
        verifier=partial(wrong.Tokenwise, replace=wrong.target_instead_of_residual),
        drafter=text,
        pattern="1",
        sampling="all",
    ),
    Case(
        name="residual not renormalised",
        verifier=partial(wrong.Tokenwise, replace=wrong.residual_not_renormalised),
        drafter=sampled,
        pattern="1",
        sampling="T 0.7",
    ),
    Case(
        name="accepted 0.01 too often",
        verifier=partial(wrong.Tokenwise, accept=wrong.accept_too_often),
        drafter=sampled,
        pattern="3",
        sampling="logit_bias",
        at_least=200_000,
    ),
    Case(
        name="one number for verdict and replacement",
        verifier=partial(wrong.Tokenwise, replace_purpose=Purpose.ACCEPT),
        drafter=sampled,
        pattern="3",
        sampling="T 1",
    ),
    Case(
        name="drafted again with the old noise",
        verifier=Block,
        drafter=stale,
        pattern="7",
        sampling="T 1",
        at_least=30_000,
    ),
    Case(name="draft law misstated", verifier=Rejection, drafter=misstated, pattern="stop rule", sampling="top_k"),
    Case(name="draft law misstated", verifier=Block, drafter=misstated, pattern="3", sampling="T 1"),
    Case(
        name="dropped by own probability",
        verifier=Rejection,
        drafter=sampled,
        pattern="3",
        sampling="T 1",
        cut=wrong.cut_low_tokens,
    ),
    Case(
        name="trimmed by fresh confidences",
        verifier=Rejection,
        drafter=sampled,
        pattern="3",
        sampling="T 1",
        cut=wrong.cut_to_the_best_rate,
    ),
    Case(
        name="penalties blind to the draft",
        verifier=SampleAndMatch,
        drafter=greedy,
        pattern="3",
        sampling="penalties",
        sampler=wrong.BlindSampler,
    ),
    Case(
        name="one number for all rows of a step",
        verifier=SampleAndMatch,
        drafter=greedy,
        pattern="changing by step",
        sampling="T 1",
        sampler=wrong.OneNumberSampler,
    ),
)


def measure(case: Case, num_samples: int) -> dict[str, Any]:
    """One line of the report: p_value and what it was computed from."""
    began_s = time.perf_counter()
    scenario = case.scenario()
    played = play(scenario, num_samples, case.seed)
    law = exact_law(scenario.world, scenario.sampling)
    return {
        "case": case.title,
        "p_value": joint_and_single(played.answers, law, scenario.world),
        "samples": len(played.answers),
        "outcomes": int((law > 0).sum()),
        "verified": played.verified,
        "accepted": played.accepted,
        "seconds": round(time.perf_counter() - began_s, 2),
    }


def _prepare() -> None:
    """A process of its own core. Nothing here makes circles, and looking for them takes a third of the time."""
    torch.set_num_threads(1)
    gc.disable()


def judge(num_samples: int, jobs: int, done: Callable[[], None]) -> dict[str, Any]:
    """All combinations, on so many processes. done: called after each."""
    found: dict[Case, dict[str, Any]] = {}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), _prepare) as pool:
        asked = {pool.submit(measure, case, num_samples): case for case in RIGHT}
        asked |= {pool.submit(measure, case, max(num_samples // 4, case.at_least)): case for case in WRONG}
        for future in as_completed(asked):
            found[asked[future]] = future.result()
            done()
    right, planted = [found[case] for case in RIGHT], [found[case] for case in WRONG]
    values = [each["p_value"] for each in right]
    for each, adjusted in zip(right, holm(values), strict=True):
        each["holm"] = adjusted
    return {
        "passed": min(each["holm"] for each in right) >= FAMILY_ALPHA
        and max(each["p_value"] for each in planted) < SEEN,
        "samples": num_samples,
        "combinations": len(right),
        "product": len(product()),
        "thinned": "every verifier with every gamma and every sampling, every drafter with every gamma but 7",
        "family_alpha": FAMILY_ALPHA,
        "smallest_holm": min(each["holm"] for each in right),
        "p_values_uniform": uniform_p_value(values),
        "seen_below": SEEN,
        "right": right,
        "planted": planted,
    }
