"""A target and a drafter, loaded once, and engines over them with the benchmark's own early pruning.

Engines are made anew for every run and run one after the other.

What early pruning can tell after each layer, and what it gains end to end; JSON and Markdown tables.

    python -m benchmarks.speculation.pruning OUT_DIR TARGET_DIR DRAFTER_DIR... [--prompts FILE] [--part looks|all]

looks: every step of real answers stops after several layers, and no row leaves. For each layer: the area under the
ROC curve of the count as a predictor of refusal (0.5: it predicts nothing); the least count from which on at most
2 % of the judged tokens would have been accepted; the share of all drafted rows that would leave there, and the
share of the drafted rows' work that this saves in the layers after it.

cells: off, on and auto take turns on one engine, round after round, drafter by drafter and load by load. The gate
starts with the counts of the looks at temperature 0, so that no cell waits for calibration. tokens/s are medians.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from faser.bench.prompts import read_prompts
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.contract.step_times import Role, StepTimes
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.sequences.kv_cache import KvManager
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.timing.clock import WallClock
from faser.engine.control.timing.cost_model import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafter_registry import DrafterParts, DraftModelParts, make_drafter
from faser.engine.execution.drafters.draft_kv_cache import DraftKvCache
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.pruning.calibration import MOST_FALSE
from faser.engine.execution.pruning.early_pruning import EarlyPruning
from faser.engine.execution.pruning.gate import (
    AUTO,
    OFF,
    ON,
    UNSPLIT,
    Lesson,
    Look,
    PruneGate,
    Split,
    candidate_layers,
)
from faser.engine.execution.pruning.rank_judge import NUM_TOP, DraftedTokens, RankJudge
from faser.engine.execution.pruning.step_seconds import StepSeconds
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.startup.model_loading import LoadedModel, load_draft_model, load_target
from faser.engine.execution.startup.sizing import CachedModel, kv_shapes
from faser.engine.execution.startup.step_times.profile import profile
from faser.engine.execution.startup.step_times.table_fit import DummyBatchLimits
from faser.engine.execution.verification_forward import PlainForward
from faser.engine.execution.verifiers.factory import make_verifier
from faser.engine.text.tokenizer import load_tokenizer
from faser.kernels.factory import make_backend
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.shapes import KvShape
from faser.types import PruneStats, Request, SamplingParams

MAX_LEN = 1024
MAX_ROWS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The target without a KV cache."""

    backend: Backend
    model: LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunePair:
    """Target and drafter with their KV caches. kv: the shape of the target's."""

    config: EngineConfig
    target: Target
    runner: Runner
    draft: LoadedModel
    draft_runner: Runner
    kv: KvShape


def config_of(target: Path, drafter: Path, *, gamma: int, sequences: int) -> EngineConfig:
    """Every sequence drafts gamma tokens in every step."""
    return EngineConfig(
        model=str(target),
        speculative_config={
            "method": "draft_model",
            "model": str(drafter),
            "policy": "fixed",
            "num_speculative_tokens": gamma,
        },
        max_num_seqs=sequences,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=MAX_LEN,
    )


def load_target_of(config: EngineConfig, directory: Path) -> Target:
    backend = make_backend("native", "cpu", num_threads=config.threads, cache_dir=cache_dir() / "kernels")
    return Target(backend=backend, model=load_target(config, directory, backend, _quiet))


def pair_of(config: EngineConfig, target: Target, drafter: Path) -> PrunePair:
    backend = target.backend.concurrent_instance()
    draft = load_draft_model(config, drafter, target.model, backend, _quiet)
    models = [
        CachedModel(spec=each.decoder.spec, dtype=each.decoder.dtype, kv_dtype=each.decoder.dtype)
        for each in (target.model, draft)
    ]
    shapes = kv_shapes(config, models, target.model.max_positions)
    return PrunePair(
        config=config,
        target=target,
        runner=Runner(target.model.decoder, target.backend, shapes[0]),
        draft=draft,
        draft_runner=Runner(draft.decoder, backend, shapes[1]),
        kv=shapes[0],
    )


def measured_costs(pair: PrunePair, *, budget_s: float) -> CostModel:
    room = DummyBatchLimits(
        num_blocks=pair.kv.num_blocks,
        block_size=pair.kv.block_size,
        max_len=MAX_LEN,
        max_rows=MAX_ROWS,
        max_logit_rows=pair.config.max_num_seqs,
    )
    return CostModel(profile(pair.runner, pair.draft_runner, room, progress=_quiet, budget_s=budget_s))


def engine_of(pair: PrunePair, pruning: EarlyPruning | None, costs: CostModel) -> Engine:
    """An engine over the pair, with empty caches. costs: changed by the engine, so no two engines share one."""
    config, kv, clock = pair.config, pair.kv, WallClock()
    decoder = pair.target.model.decoder
    sampler = Sampler(
        config.max_num_seqs,
        decoder.spec.vocab_size,
        (),
        pair.target.backend.device,
        pair.target.backend.sampling_kernels,
    )
    table = BlockTable(config.max_num_seqs, -(-MAX_LEN // kv.block_size))
    parts = DrafterParts(
        target=pair.runner,
        table=table,
        sampling=sampler.state,
        max_rows=MAX_ROWS,
        model=DraftModelParts(
            runner=pair.draft_runner,
            kv=DraftKvCache(table, num_blocks=kv.num_blocks, block_size=kv.block_size),
            max_positions=pair.draft.max_positions,
        ),
        num_top=0 if pruning is None else NUM_TOP,
    )
    speculation = SpeculativeExecution(
        drafter=make_drafter(config.speculation, parts),
        verifier=make_verifier(config.speculation, sampler),
        forward=pruning or PlainForward(),
    )
    scheduler = Scheduler(
        kv=KvManager(kv.num_blocks, kv.block_size, enable_prefix_caching=True),
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=MAX_ROWS,
        max_model_len=MAX_LEN,
        eos_token_ids=(),
        clock=clock,
        speculation=SpeculationControl(config.speculation, costs, num_slots=config.max_num_seqs, clock=clock),
    )
    executor = ModelExecutor(pair.runner, sampler, table, max_logit_rows=MAX_ROWS, speculation=speculation)
    return Engine(scheduler, executor)


def requests_of(
    prompts: Sequence[tuple[int, ...]], *, temperature: float, num_tokens: int, name: str
) -> list[Request]:
    """Answers of exactly num_tokens tokens. seed: the place in the list."""
    return [
        Request(
            request_id=f"{name}-{i}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=temperature, max_tokens=num_tokens, seed=i, ignore_eos=True),
            arrival_s=float(i),
        )
        for i, prompt in enumerate(prompts)
    ]


def _quiet(_stage: str, _done: int, _total: int) -> None:
    pass


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CONCURRENCIES = (1, 4, 16)
MODES = (OFF, ON, AUTO)
LAST = 27 / 30  # of the layers: too late to pay, and a yardstick of what could be known
MOST_PROMPT_TOKENS = 96
PROFILE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLook:
    """What counts after `layer` layers predict.

    judged: tokens that were looked at and then verified. threshold: None where none keeps to MOST_FALSE.
    false_share: of the flagged tokens, those that were right. dropped_share: of all drafted rows, those that would
    leave. saved_share: of the drafted rows' work. look_ms: median.
    """

    drafter: str
    temperature: float
    layer: int
    judged: int
    accepted_share: float
    auc: float
    threshold: int | None
    false_share: float
    dropped_share: float
    saved_share: float
    look_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One mode under one load.

    tokens_per_s: of every round. ratio: of the medians, to off. dropped_share: of the drafted rows, those that
    left. false_share: of the flagged tokens, those that were right.
    """

    drafter: str
    concurrency: int
    mode: str
    tokens_per_s: list[float]
    ratio: float
    drafted_rows: int
    dropped_share: float
    flagged: int
    false_share: float
    other_answers: int


@dataclass(slots=True, kw_only=True)
class Seen:
    """All that looks after one layer found. kept: a step each, as rows_kept returns it."""

    counts: list[Ints] = field(default_factory=list)
    accepted: list[Bools] = field(default_factory=list)
    kept: list[Ints] = field(default_factory=list)
    num_drafts: int = 0
    looks: list[Look] = field(default_factory=list)


class Observer:
    """A gate that stops every forward after all its layers and never prunes, and the judge that counts for it."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.seen = [Seen() for _ in self.layers]
        self.lessons: list[tuple[list[Lesson], int]] = []
        self._judge = RankJudge()
        self._next = 0

    def use(self, mode: str | None) -> None: ...

    def may_look(self) -> bool:
        return True

    def ask(self, num_rows: int, num_drafts: int, *, named: bool) -> Split:
        del num_rows, num_drafts
        self._next = 0
        return Split(layers=tuple(enumerate(self.layers))) if named else UNSPLIT

    def counts(self, runner: Runner, drafted: DraftedTokens) -> Ints:
        counts = self._judge.counts(runner, drafted)
        seen = self.seen[self._next]
        self._next += 1
        seen.num_drafts += len(counts)
        seen.kept.append(rows_kept(counts, drafted))
        return counts

    def thresholds(self, layer: int, temperatures: Floats) -> Ints:
        del layer
        return np.full(len(temperatures), NUM_TOP + 1)

    def looked(self, look: Look) -> None:
        self.seen[look.layer].looks.append(look)

    def learn(self, lessons: list[Lesson], num_tokens: int) -> None:
        self.lessons.append((lessons, num_tokens))
        for lesson in lessons:
            self.seen[lesson.layer].counts.append(lesson.counts)
            self.seen[lesson.layer].accepted.append(lesson.accepted)


def rows_kept(counts: Ints, drafted: DraftedTokens) -> Ints:
    """[NUM_TOP] drafted rows that stay in a step if tokens with a count of at least 1, 2, … are flagged."""
    kept = np.empty(NUM_TOP, dtype=np.int64)
    for k in range(1, NUM_TOP + 1):
        left = drafted.num_drafts.copy()
        flagged = np.flatnonzero(counts >= k)
        np.minimum.at(left, drafted.sequence[flagged], drafted.depth[flagged])
        kept[k - 1] = left.sum()
    return kept


def area(counts: Ints, accepted: Bools) -> float:
    """Chance that a refused token has the higher count than an accepted one, ties halved; 0.5 without either."""
    refused, good = counts[~accepted], counts[accepted]
    if not len(refused) or not len(good):
        return 0.5
    above = np.searchsorted(np.sort(good), refused, "left").sum()
    above_or_tied = np.searchsorted(np.sort(good), refused, "right").sum()
    return float((above + above_or_tied) / 2 / (len(refused) * len(good)))


def least_threshold(counts: Ints, accepted: Bools) -> int | None:
    """The least count of at least 1 from which on no more than MOST_FALSE were accepted, without a margin."""
    for k in range(1, NUM_TOP + 1):
        flagged = counts >= k
        if flagged.any() and accepted[flagged].mean() <= MOST_FALSE:
            return k
    return None


def layer_looks(observer: Observer, num_layers: int, drafter: str, temperature: float) -> list[LayerLook]:
    found = []
    for layer, seen in zip(observer.layers, observer.seen, strict=True):
        counts, accepted = np.concatenate(seen.counts), np.concatenate(seen.accepted)
        threshold = least_threshold(counts, accepted)
        dropped = 0.0 if threshold is None else 1 - int(np.sum(seen.kept, axis=0)[threshold - 1]) / seen.num_drafts
        found.append(
            LayerLook(
                drafter=drafter,
                temperature=temperature,
                layer=layer,
                judged=len(counts),
                accepted_share=float(accepted.mean()),
                auc=area(counts, accepted),
                threshold=threshold,
                false_share=0.0 if threshold is None else float(accepted[counts >= threshold].mean()),
                dropped_share=dropped,
                saved_share=dropped * (1 - layer / num_layers),
                look_ms=1000 * statistics.median(each.seconds for each in seen.looks),
            )
        )
    return found


def answered(engine: Engine, asked: Sequence[Request]) -> tuple[dict[str, list[int]], float]:
    """Token ids by request, and seconds."""
    began_s = time.perf_counter()
    for request in asked:
        engine.add(request)
    tokens: dict[str, list[int]] = {}
    while engine.has_work():
        for delta in engine.step():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens, time.perf_counter() - began_s


def look_at(
    pair: PrunePair,
    prompts: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
    layers: Sequence[int],
    name: str,
) -> tuple[list[LayerLook], Observer]:
    """At both temperatures. Returns the observer of temperature 0 as well."""
    found, observers = [], []
    for temperature in (0.0, 0.8):
        observer = Observer(layers)
        times = StepTimes.proportional(step_s=0.1, pass_s=1e-3, text_s=1e-5)
        step_seconds = StepSeconds(times.tables[Role.STEP])
        pruning = EarlyPruning(observer, observer, step_seconds, num_slots=pair.config.max_num_seqs)
        engine = engine_of(pair, pruning, CostModel(times))
        answered(engine, requests_of(prompts, temperature=temperature, num_tokens=options.tokens, name="look"))
        found += layer_looks(observer, pair.runner.num_layers, name, temperature)
        observers.append(observer)
    return found, observers[0]


def gate_of(pair: PrunePair, step_seconds: StepSeconds, observer: Observer) -> PruneGate:
    """A gate that has learned what the observer saw at its candidate layers."""
    gate = PruneGate("auto", num_layers=pair.runner.num_layers, num_top=NUM_TOP, step_seconds=step_seconds)
    at = {observer.layers.index(layer): i for i, layer in enumerate(gate.layers)}
    for lessons, num_tokens in observer.lessons:
        gate.learn([replace(each, layer=at[each.layer]) for each in lessons if each.layer in at], num_tokens)
    for there, here in at.items():
        seen, least = observer.seen[there], int(gate.thresholds(here, np.zeros(1))[0])
        flagged = seen.num_drafts - int(np.sum(seen.kept, axis=0)[least - 1]) if least <= NUM_TOP else 0
        seconds = statistics.median(each.seconds for each in seen.looks)
        gate.looked(Look(layer=here, num_drafts=seen.num_drafts, flagged_rows=flagged, seconds=seconds))
    return gate


def cells_of(
    pair: PrunePair,
    prompts: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
    observer: Observer,
    name: str,
    bar: Progress,
) -> list[Cell]:
    costs = measured_costs(pair, budget_s=PROFILE_S)
    step_seconds = StepSeconds(costs.tables[Role.STEP])
    gate = gate_of(pair, step_seconds, observer)
    pruning = EarlyPruning(gate, RankJudge(), step_seconds, num_slots=pair.config.max_num_seqs)
    engine = engine_of(pair, pruning, costs)
    answered(engine, requests_of(prompts, temperature=0.0, num_tokens=1, name="warm"))
    found = []
    for concurrency in CONCURRENCIES:
        found += _cells(engine, pruning, prompts[:concurrency], options, (name, concurrency), bar)
    return found


def _cells(
    engine: Engine,
    pruning: EarlyPruning,
    prompts: Sequence[tuple[int, ...]],
    options: argparse.Namespace,
    where: tuple[str, int],
    bar: Progress,
) -> list[Cell]:
    task = bar.add_task(f"{where[0]} x{where[1]}", total=options.rounds * len(MODES))
    speeds: dict[str, list[float]] = {mode: [] for mode in MODES}
    stats: dict[str, list[PruneStats]] = {mode: [] for mode in MODES}
    others = dict.fromkeys(MODES, 0)
    for turn in range(options.rounds):
        asked = requests_of(prompts, temperature=0.0, num_tokens=options.cell_tokens, name=str(turn))
        first = turn % len(MODES)
        expected: dict[str, list[int]] = {}
        for mode in MODES[first:] + MODES[:first]:
            pruning.use(mode)
            before = pruning.stats
            answers, seconds = answered(engine, asked)
            expected = expected or answers
            others[mode] += sum(answers[key] != expected[key] for key in answers)
            speeds[mode].append(sum(map(len, answers.values())) / seconds)
            stats[mode] += [before, pruning.stats]
            bar.advance(task)
    usual = statistics.median(speeds["off"])
    return [_cell(where, mode, speeds[mode], usual, stats[mode], others[mode]) for mode in MODES]


def _cell(
    where: tuple[str, int], mode: str, speeds: list[float], usual: float, stats: list[PruneStats], others: int
) -> Cell:
    """stats: before and after each round."""

    def grown(field_name: str) -> int:
        values = [int(getattr(each, field_name)) for each in stats]
        return sum(values[1::2]) - sum(values[::2])

    drafted, flagged = grown("drafted_rows"), grown("flagged")
    return Cell(
        drafter=where[0],
        concurrency=where[1],
        mode=mode,
        tokens_per_s=speeds,
        ratio=statistics.median(speeds) / usual,
        drafted_rows=drafted,
        dropped_share=grown("pruned_rows") / max(drafted, 1),
        flagged=flagged,
        false_share=grown("false_prunes") / max(flagged, 1),
        other_answers=others,
    )


def markdown(looks: Sequence[LayerLook], cells: Sequence[Cell]) -> str:
    lines = [
        "| drafter | T | after layer | judged | accepted | AUC | least count | false | rows leave | work saved "
        "| look |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {each.drafter} | {each.temperature:g} | {each.layer} | {each.judged} | {each.accepted_share:.0%} "
        f"| {each.auc:.3f} | {each.threshold or '–'} | {each.false_share:.1%} | {each.dropped_share:.1%} "
        f"| {each.saved_share:.1%} | {each.look_ms:.1f} ms |"
        for each in looks
    ]
    lines += [
        "",
        "| drafter | requests | mode | tokens/s | to off | rows left | flagged | false | other answers |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {each.drafter} | {each.concurrency} | {each.mode} | {statistics.median(each.tokens_per_s):.1f} "
        f"| {each.ratio:.3f} | {each.dropped_share:.1%} of {each.drafted_rows} | {each.flagged} "
        f"| {each.false_share:.1%} | {each.other_answers} |"
        for each in cells
    ]
    return "\n".join(lines) + "\n"


def save(out: Path, looks: Sequence[LayerLook], cells: Sequence[Cell]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    result = {"looks": [asdict(each) for each in looks], "cells": [asdict(each) for each in cells]}
    (out / "prune.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "prune.md").write_text(markdown(looks, cells), encoding="utf-8")


def main() -> None:
    options = _options()
    sequences = max(CONCURRENCIES)
    config = config_of(options.target, options.drafters[0], gamma=options.gamma, sequences=sequences)
    target = load_target_of(config, options.target)
    torch.set_num_threads(1)  # the native kernels have threads of their own
    read = read_prompts(options.prompts, load_tokenizer(options.target))
    prompts = [each.token_ids for each in read if len(each.token_ids) <= MOST_PROMPT_TOKENS][:sequences]
    num_layers = target.model.decoder.spec.num_layers
    layers = (*candidate_layers(num_layers), round(LAST * num_layers))
    looks: list[LayerLook] = []
    cells: list[Cell] = []
    with Progress() as bar:
        task = bar.add_task("drafters", total=len(options.drafters))
        for drafter in options.drafters:
            pair = pair_of(config, target, drafter)
            found, observer = look_at(pair, prompts, options, layers, drafter.name)
            looks += found
            save(options.out, looks, cells)
            if options.part == "all":
                cells += cells_of(pair, prompts, options, observer, drafter.name, bar)
                save(options.out, looks, cells)
            bar.advance(task)
    print(markdown(looks, cells))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for prune.json and prune.md")
    parser.add_argument("target", type=Path)
    parser.add_argument("drafters", type=Path, nargs="+")
    parser.add_argument("--prompts", help="Spec-Bench's JSON lines (default: the built-in questions)")
    parser.add_argument("--part", choices=("looks", "all"), default="all", help="all: looks, then cells [all]")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=48, help="of every answer that is looked at [48]")
    parser.add_argument("--cell-tokens", type=int, default=24, help="of every answer of a cell [24]")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
