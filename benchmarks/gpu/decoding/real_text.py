"""Policies on models that say something: phases `real_text` and `arrivals`.

SmolLM2-135M is widened to the cost of a 7B model without changing what it says (benchmarks/models/grow_model.py),
on the device; the drafter is the small model with noise on its weights. Acceptance then depends on token and
request, which given rates lack and adaptive lengths need.

`arrivals` is the measurement of benchmarks.ablation with that engine, under the arrivals of a real trace: greedy
answers to the questions, arms in an order of their own in every repeat on the same stretch. tokens/s counts the
output while requests arrived. Answers of different arms are compared; where rounding differs between batches a
near tie may be broken otherwise, so they are counted, not forbidden.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.ablation.campaign import Bearing, Campaign
from benchmarks.ablation.campaign import Wanted as WantedRuns
from benchmarks.ablation.drive import arms_named
from benchmarks.ablation.report import Run, write
from benchmarks.gpu.decoding.policies import Turns, arms_of, contest, rows_of
from benchmarks.gpu.engines import Opened, Wanted, close, made_up_costs, open_engine
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk
from benchmarks.gpu.steps import Tokens, answers, greedy, sampled
from benchmarks.models.grow_model import Growth, NoisySource, grown_spec, resized
from benchmarks.simulator.workload import read_azure
from benchmarks.spec_bench.prompts import evenly_spaced
from faser.cli.bench.prompts import read_prompts
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.contract.step_times import StepTimes
from faser.engine.execution.models import tensors
from faser.engine.execution.models.sources import SafetensorsSource
from faser.engine.execution.models.weights import WeightSource
from faser.engine.text.tokenizer import Tokenizer, load_tokenizer
from faser.types.sampling import SamplingParams

_NOISE = 0.05  # of the drafter's weights; about 0.85 of its tokens are then accepted at temperature 0.8
_SAMPLINGS = {"greedy": greedy, "T 0.8, top_p 0.95": sampled}
_MOST_PROMPTS = 512
_SAID_TOKENS = 48
_BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Both models in an engine, and prompts. parameters: of the target."""

    opened: Opened
    tokenizer: Tokenizer
    prompts: list[Tokens]
    parameters: int


def run(plan: Plan, desk: Desk) -> None:
    sizes, small = plan.sizes, plan.smollm2
    if small is None:
        desk.keep("not there", "no --smollm2 was given")
        return
    pair = open_pair(plan, desk, small)
    engine = pair.opened.engine
    desk.keep("parameters", pair.parameters)
    engine.use_policy("off")
    said = answers(engine, pair.prompts[:1], lambda _: _said(_SAID_TOKENS))
    desk.keep("says", pair.tokenizer.decode(list(said[0])))
    for place, (name, sampling) in enumerate(_SAMPLINGS.items()):
        turns = Turns(
            arms=arms_of(sizes),
            batches=sizes.policy_batches,
            prompts=pair.prompts,
            sampling=sampling,
            about={"sampling": name},
        )
        contest(plan, desk, engine, turns, ends_s=desk.left_s / (len(_SAMPLINGS) - place))
    close(pair.opened)
    desk.keep("rows", rows_of(desk.result.get("turns", [])))


def open_pair(
    plan: Plan,
    desk: Desk,
    small: Path,
    *,
    overlap: str = "off",
    costs: StepTimes | None = None,
) -> Pair:
    """small: directory of SmolLM2. overlap, costs: as in Wanted."""
    sizes = plan.sizes
    spec = read_model_config(small).spec
    wide = wide_spec(spec, *sizes.grown)
    target = _directory(small, plan.models / "grown", wide)
    draft = _directory(small, plan.models / "noised", spec)
    tokenizer = load_tokenizer(small)
    prompts = _prompts(plan, tokenizer, max(sizes.policy_batches))

    def sources(directory: Path) -> WeightSource:
        if directory == target:
            return Grown(Growth(spec, wide, device=plan.device), SafetensorsSource(small))
        return NoisySource(SafetensorsSource(small), _NOISE)

    desk.say(f"growing {tensors.num_parameters(wide) / 1e9:.2f} billion parameters on {plan.device}")
    opened = open_engine(
        plan,
        Wanted(
            target=target,
            draft=draft,
            sequences=max(sizes.policy_batches),
            context=max(map(len, prompts)),
            rows=sizes.rows,
            sources=sources,
            speculative={"method": "draft_model", "model": str(draft), "num_speculative_tokens": sizes.cap},
            overlap=overlap,
            costs=costs,
        ),
    )
    return Pair(opened=opened, tokenizer=tokenizer, prompts=prompts, parameters=tensors.num_parameters(wide))


def wide_spec(spec: DecoderSpec, hidden: int, inner: int, num_kv_heads: int) -> DecoderSpec:
    """Sizes that kernels like, where grown_spec keeps proportions; groups stay as they are."""
    return resized(grown_spec(spec, hidden), hidden, inner, num_kv_heads)


class Grown:
    """A WeightSource of a model that grows as it is read: in the order of tensor_shapes, each tensor once."""

    def __init__(self, growth: Growth, source: WeightSource) -> None:
        self._names = list(tensors.tensor_shapes(growth.wide))
        self._shards: Iterator[dict[str, Tensor]] = growth.shards(source)
        self._shard: dict[str, Tensor] = {}

    def names(self) -> list[str]:
        return self._names

    def get(self, name: str) -> Tensor:
        while name not in self._shard:
            self._shard = next(self._shards)
        return self._shard.pop(name)


def _directory(small: Path, out: Path, spec: DecoderSpec) -> Path:
    """Write what lies next to the tensors of a model of these sizes, from the small one's."""
    out.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = json.loads((small / "config.json").read_text("utf-8"))
    config |= {
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.feed_forward.size,
        "num_attention_heads": spec.attention.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "tie_word_embeddings": spec.tie_word_embeddings,
    }
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    (out / "grown.safetensors").touch()
    for name in _BESIDE:
        if (small / name).is_file():
            shutil.copyfile(small / name, out / name)
    return out


def _prompts(plan: Plan, tokenizer: Any, count: int) -> list[tuple[int, ...]]:
    """count of those that fit into the context; the first one follows the last one."""
    read = evenly_spaced(
        read_prompts(None if plan.prompts is None else str(plan.prompts), tokenizer), _MOST_PROMPTS
    )
    fitting = [each.token_ids for each in read if len(each.token_ids) <= plan.sizes.context]
    if not fitting:
        shortest = min(len(each.token_ids) for each in read)
        raise ValueError(f"the shortest prompt has {shortest} tokens; contexts have {plan.sizes.context}")
    return [fitting[place % len(fitting)] for place in range(count)]


def _said(count: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=count)


ARMS = ("off", "fixed:3", "+lengths", "+overlap")
FOLDER = "arrivals"  # of the tables and pictures of benchmarks.ablation
_LOADS = (0.8, 1.4)
_MOST_REPEATS = 3
_ALONE_AND_CROWD = 2  # stretches that measure what arm off can bear
_DONE = 1.3  # times a run's seconds: until the last answer


def run_arrivals(plan: Plan, desk: Desk) -> None:
    if plan.trace is None or plan.smollm2 is None:
        desk.keep("not there", f"no --{'trace' if plan.trace is None else 'smollm2'} was given")
        return
    trace = read_azure(plan.trace)
    costs = made_up_costs() if plan.dry_run else None
    pair = open_pair(plan, desk, plan.smollm2, overlap="auto", costs=costs)
    wanted = wanted_of(plan, desk.left_s)
    campaign = Campaign(engine=pair.opened.engine, wanted=wanted, trace=trace, prompts=pair.prompts)
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


def wanted_of(plan: Plan, left_s: float) -> WantedRuns:
    """Runs as long as the time allows: every arm at every load three times, and what comes before."""
    arms = arms_named(ARMS)
    count = len(arms) * len(_LOADS) * (1 if plan.dry_run else _MOST_REPEATS)
    seconds = left_s / (_DONE * count + (len(arms) + _ALONE_AND_CROWD) / 2)
    return WantedRuns(
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
