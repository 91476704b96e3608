"""Statistics of an engine that the tests of the live view make up."""

import random
from dataclasses import replace

from faser.types.statistics import EngineStats, MethodStats, RoleStats, SpeculationStats

CAP = 4
EMPTY = EngineStats(
    speculation=SpeculationStats(
        policy="faser",
        method="suffix",
        methods=(MethodStats(method="suffix"), MethodStats(method="ngram")),
        accepted_at=(("default", (0,) * CAP),),
        gammas=(("default", (0,) * (CAP + 1)), ("chat", (0,) * (CAP + 1))),
        mode_steps=(("plain", 0), ("serial", 0)),
        bypasses=(("load", 0), ("gain", 0)),
        roles=(RoleStats(role="step"), RoleStats(role="verify"), RoleStats(role="text"), RoleStats(role="pass")),
    )
)


def after_step(stats: EngineStats, rng: random.Random) -> EngineStats:
    """The statistics after one more step that brings random numbers."""
    spec = stats.speculation
    assert spec is not None
    mode = rng.choice(("plain", "serial"))
    draft_s, verify_s = rng.uniform(0, 0.01), rng.uniform(0.01, 0.05)
    times = {"step": draft_s + verify_s, "verify": verify_s, "text": draft_s, "pass": 0.0}
    accepted = rng.randrange(3)
    return replace(
        stats,
        num_running=rng.randrange(9),
        num_waiting=rng.randrange(9),
        kv_usage=rng.random(),
        num_steps=stats.num_steps + 1,
        prompt_tokens=stats.prompt_tokens + rng.randrange(50),
        generation_tokens=stats.generation_tokens + rng.randrange(9),
        last_step_rows=rng.randrange(1, 99),
        last_step_s=draft_s + verify_s,
        speculation=replace(
            spec,
            methods=tuple(
                replace(
                    each,
                    drafted=each.drafted + 5,
                    pruned=each.pruned + 1,
                    verified=each.verified + 4,
                    accepted=each.accepted + accepted,
                    expected=each.expected + 0.5,
                )
                for each in spec.methods
            ),
            accepted_at=tuple(
                (name, tuple(count + (at < accepted) for at, count in enumerate(each)))
                for name, each in spec.accepted_at
            ),
            gammas=tuple((name, tuple(count + rng.randrange(3) for count in each)) for name, each in spec.gammas),
            mode=mode,
            mode_steps=tuple((name, count + (name == mode)) for name, count in spec.mode_steps),
            bypasses=tuple((name, count + rng.randrange(2)) for name, count in spec.bypasses),
            roles=tuple(
                replace(
                    each,
                    measured_s=each.measured_s + times[each.role],
                    predicted_s=each.predicted_s + 1.1 * times[each.role],
                )
                for each in spec.roles
            ),
            overlap_s=spec.overlap_s + 0.001,
        ),
    )
