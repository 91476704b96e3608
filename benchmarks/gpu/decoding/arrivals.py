"""Phase `arrivals`: what each part of speculation brings under the arrivals of a real trace, on the device.

The measurement of benchmarks.ablation with the engine of phase real_text: the widened SmolLM2 and its noisy small
self, greedy answers to the questions, arms in an order of their own in every repeat on the same stretch. tokens/s
counts what came while requests did. Answers of different arms are compared; where rounding differs between batches
a near tie may be broken otherwise, so they are counted, not forbidden.
"""

from dataclasses import asdict, replace
from typing import Any

from benchmarks.ablation.arms import arms_named
from benchmarks.ablation.campaign import Bearing, Campaign, Wanted
from benchmarks.ablation.report import write
from benchmarks.ablation.summary import Run
from benchmarks.gpu.common.engines import close, lane_costs
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.record import Desk
from benchmarks.gpu.decoding.real_text import open_pair
from benchmarks.simulator.workload import read_azure

ARMS = ("off", "fixed:3", "+lengths", "+overlap")
FOLDER = "arrivals"  # of the tables and pictures of benchmarks.ablation
_LOADS = (0.8, 1.4)
_MOST_REPEATS = 3
_ALONE_AND_CROWD = 2  # stretches that measure what arm off can bear
_DONE = 1.3  # times a run's seconds: until the last answer


def run(plan: Plan, desk: Desk) -> None:
    if plan.trace is None or plan.smollm2 is None:
        desk.keep("not there", f"no --{'trace' if plan.trace is None else 'smollm2'} was given")
        return
    trace = read_azure(plan.trace)
    costs = lane_costs() if plan.dry_run else None
    pair = open_pair(plan, desk, plan.smollm2, overlap="auto", costs=costs)
    wanted = wanted_of(plan, desk.left_s)
    campaign = Campaign(engine=pair.opened.engine, pruning=None, wanted=wanted, trace=trace, prompts=pair.prompts)
    desk.say(f"{wanted.num_runs} runs of {wanted.seconds:.1f} s")
    bearing = campaign.bearing()
    desk.keep("bearing", asdict(bearing))
    campaign.warm(desk.say)
    about = about_of(plan, campaign, bearing)
    runs: list[Run] = []
    out = desk.folder.path / FOLDER
    out.mkdir(exist_ok=True)
    for found in campaign.runs(bearing, desk.say):
        runs.append(found)
        desk.keep("rows", [asdict(row) for row in write(out, about, runs)])
        if len(runs) < wanted.num_runs and not desk.may_begin("the next run", needs_s=_DONE * wanted.seconds):
            break
    close(pair.opened)


def wanted_of(plan: Plan, left_s: float) -> Wanted:
    """Runs as long as the time allows: every arm at every load three times, and what comes before."""
    arms = tuple([replace(arm, early_prune="off") for arm in arms_named(ARMS)])
    count = len(arms) * len(_LOADS) * (1 if plan.dry_run else _MOST_REPEATS)
    seconds = left_s / (_DONE * count + (len(arms) + _ALONE_AND_CROWD) / 2)
    return Wanted(
        arms=arms,
        seconds=min(seconds, plan.sizes.arrival_s),
        repeats=count // (len(arms) * len(_LOADS)),
        loads=_LOADS,
        max_tokens=plan.sizes.answer_tokens,
        clients=max(plan.sizes.policy_batches),
        warm_s=min(seconds, plan.sizes.arrival_s) / 2,
    )


def about_of(plan: Plan, campaign: Campaign, bearing: Bearing) -> dict[str, Any]:
    """Under which conditions the figures hold."""
    wanted, lengths = campaign.wanted, [len(prompt) for prompt in campaign.prompts]
    return {
        "command": "python -m benchmarks.gpu OUT --phases arrivals",
        "conditions": {
            "device": "a CPU, dry run: no figure here says anything of a device" if plan.dry_run else plan.device,
            "prompts": f"{len(lengths)} of {min(lengths)} to {max(lengths)} tokens",
            "output tokens": f"of the trace, at most {wanted.max_tokens}",
            "requests at a time": wanted.clients,
            "capacity": f"{bearing.tokens_per_s:.1f} output tokens a second, measured with arm off",
            "target of time per token": f"{bearing.slo.tpot_ms:.1f} ms",
            "arrivals": f"within {wanted.seconds:.1f} s, {wanted.repeats} repeats",
        },
    }
