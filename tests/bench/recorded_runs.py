"""Runs of a small campaign with round numbers: two concurrencies, three policies, three rounds."""

from faser.bench.campaign import Run
from faser.bench.runner import StepPoint


def run_of(policy: str, tokens_per_s: float, *, concurrency: int = 1, round_: int = 0, mismatches: int = 0) -> Run:
    drafts = policy != "off"
    return Run(
        policy=policy,
        concurrency=concurrency,
        temperature=0.0,
        round=round_,
        num_jobs=4,
        num_tokens=100,
        wall_s=100 / tokens_per_s,
        window_tokens=100,
        window_s=100 / tokens_per_s,
        num_steps=50,
        gamma_mean=2.0 if drafts else 0.0,
        drafted=60 if drafts else 0,
        verified=50 if drafts else 0,
        accepted=40 if drafts else 0,
        survivals=(0.9, 0.7, None) if drafts else (None, None, None),
        decide_s=0.01,
        mismatches=mismatches,
        points=tuple(
            StepPoint(at_s=0.1 * i, gamma=2.0, predicted_s=0.011, measured_s=0.010 + 0.001 * i) for i in range(3)
        ),
    )


RUNS = [
    run_of(policy, rate * factor, concurrency=concurrency, round_=round_)
    for concurrency, rates in (
        (1, {"off": 10.0, "fixed:3": 15.0, "faser": 18.0}),
        (8, {"off": 40.0, "fixed:3": 30.0, "faser": 42.0}),
    )
    for round_, factor in enumerate((1.0, 0.5, 1.2))
    for policy, rate in rates.items()
]
