"""Time that the host adds to the steps of a GPU: the real engine on a device that is a clock, without a GPU.

    python -m benchmarks speed.host_gap OUT.json [--base CHECKOUT] [--sequences 1,16,64] [--rounds 5]

Everything between two steps is real, from the scheduler to the last staged array; the device is a clock on which
a step of the target and a pass of the draft model take given times, and calls of the driver are guesses
(clock_gpu.py). `gap` is what a step takes beyond the device's work. Modes: plain decoding with steps in flight,
drafts before the step, drafts during it, and short answers: plain decoding for clients that ask again as soon as
they are answered. With --base another checkout is measured in turns with this one, each in a process of its own;
ratios are within a round.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from benchmarks.gpu.models import TINY_DRAFT, TINY_TARGET, Config, MadeUp, write_shape
from benchmarks.runner import CHECKOUT, about, command_line, git_commit, in_turn, write_json
from benchmarks.speed.clock_gpu import ClockGpu, clock_backend
from faser.config.speculation import SpeculationConfig
from faser.engine.build import native_acceptance
from faser.engine.contract.step_times import StepTimes
from faser.engine.control.clock import WallClock
from faser.engine.control.kv_cache import KvManager
from faser.engine.control.scheduler import Scheduler
from faser.engine.control.speculation.control import SpeculationControl
from faser.engine.control.speculation.overlap import OverlapOptions
from faser.engine.control.step_cost import CostModel
from faser.engine.engine import Engine
from faser.engine.execution.drafting.draft_model import DraftKvCache
from faser.engine.execution.drafting.registry import DrafterParts, DraftModelParts, load_index, make_drafter
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.overlap.lanes import Lanes, device_lanes_of
from faser.engine.execution.overlap.streams import plain_streams
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.tokens import DeviceTokenSampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import DeviceLane
from faser.types.request import Request
from faser.types.sampling import SamplingParams

_CHILD = """
import json, sys
import benchmarks.speed.host_gap
sys.path.insert(0, sys.argv[1])
from benchmarks.speed.host_gap import Wanted, measure
for line in sys.stdin:
    print(json.dumps(measure(Wanted(**json.loads(line)))), flush=True)
"""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="checkout of another version")
    parser.add_argument("--modes", default="plain,serial,overlapped,short")
    parser.add_argument("--sequences", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=int, default=5, help="of 20 steps (default 5)")
    parser.add_argument("--step-ms", type=float, default=4.5, help="a step of the target (default 4.5)")
    parser.add_argument("--pass-ms", type=float, default=0.7, help="a pass of the draft model (default 0.7)")
    options = parser.parse_args()
    checkouts = {"this": CHECKOUT} if options.base is None else {"base": options.base.resolve(), "this": CHECKOUT}
    cells = [
        {
            "mode": mode,
            "sequences": int(count),
            "step_s": options.step_ms / 1000,
            "pass_s": options.pass_ms / 1000,
            "blocks": options.blocks,
        }
        for mode in options.modes.split(",")
        for count in options.sequences.split(",")
    ]
    rounds = [
        {name: _measured(checkouts[name], cells) for name in in_turn(checkouts, number)}
        for number in track(range(options.rounds), "rounds")
    ]
    result = {
        **about("speed.host_gap"),
        "versions": {name: git_commit(checkout) for name, checkout in checkouts.items()},
        "cells": [_summary(cell, i, rounds) for i, cell in enumerate(cells)],
    }
    write_json(options.out, result)
    print(json.dumps(result["cells"], indent=2))


def _measured(checkout: Path, cells: list[dict[str, object]]) -> list[dict[str, float]]:
    """Every cell in one process, which has faser from the checkout."""
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(checkout)],
        cwd=CHECKOUT,
        input="".join(json.dumps(cell) + "\n" for cell in cells),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _summary(
    cell: dict[str, object], at: int, rounds: list[dict[str, list[dict[str, float]]]]
) -> dict[str, object]:
    """Medians over rounds; and of the ratios within a round."""
    found: dict[str, object] = {"mode": cell["mode"], "sequences": cell["sequences"]}
    for name in sorted(rounds[0]):
        found[name] = {
            key: round(statistics.median(each[name][at][key] for each in rounds), 3) for key in rounds[0][name][at]
        }
    if "base" in rounds[0]:
        ratios = [each["this"][at]["period_ms"] / each["base"][at]["period_ms"] for each in rounds]
        found["period_ratio"] = round(statistics.median(ratios), 3)
    return found


PLAIN, SERIAL, OVERLAPPED, SHORT = "plain", "serial", "overlapped", "short"
MODES = (
    PLAIN,
    SERIAL,
    OVERLAPPED,
    SHORT,
)  # none; before the step; during it; none, short answers
SHORT_PROMPT_LEN, SHORT_ANSWERS = 40, (16, 48)  # tokens; clients ask again as soon as they are answered
GAMMA = 4
PROMPT_LEN = 200
_BLOCK, _WIDTH = 16, 128
_TARGET_HEADS, _DRAFT_HEADS = 4, 2  # tell the two models apart
_TARGET: Config = TINY_TARGET | {"num_hidden_layers": 1, "hidden_size": 128, "head_dim": 64}
_TARGET |= {"num_attention_heads": _TARGET_HEADS, "num_key_value_heads": 1}
_DRAFT: Config = TINY_DRAFT | {"hidden_size": 128, "head_dim": 64}
_DRAFT |= {"num_attention_heads": _DRAFT_HEADS, "num_key_value_heads": 1}
_WARM, _BLOCK_STEPS = 40, 20  # tokens of a sequence before, steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """step_s, pass_s: that the target's trunk takes on the device, and the draft model's.

    blocks: of _BLOCK_STEPS steps.
    """

    mode: str
    sequences: int
    step_s: float
    pass_s: float
    blocks: int


def measure(wanted: Wanted) -> dict[str, float]:
    """Milliseconds a step, and tokens; medians over blocks of steps.

    period: from one step's end to the next one's. device: that the device worked, of two lanes the longer one.
    gap: the difference: the host's doing. cpu: that the engine's thread computed, waits included, which spin.
    before_step, before_draft: the gap's two parts where drafts come before the step: what the device waits for the
    step after the draft, and for the draft after the step. plans: of attention that were made.
    """
    gpu = ClockGpu(trunk_s={_TARGET_HEADS: wanted.step_s, _DRAFT_HEADS: wanted.pass_s})
    engine = _engine(gpu, wanted)
    clients = _Clients(engine, short=wanted.mode == SHORT)
    for _ in range(wanted.sequences):
        clients.ask()
    while engine.stats().generation_tokens < _WARM * wanted.sequences:
        clients.step()
    names = {"before_step_ms": _TARGET_HEADS, "before_draft_ms": _DRAFT_HEADS} if wanted.mode == SERIAL else {}
    blocks = [_block(gpu, clients, _BLOCK_STEPS, names) for _ in range(wanted.blocks)]
    found = {name: statistics.median(each[name] for each in blocks) for name in blocks[0]}
    return {name: round(value, 3) for name, value in found.items()}


class _Clients:
    """Ask, and ask again once they are answered."""

    def __init__(self, engine: Engine, *, short: bool) -> None:
        self.engine = engine
        self._short = short
        self._lengths = random.Random(1)
        self._num_asked = 0

    def ask(self) -> None:
        i, self._num_asked = self._num_asked, self._num_asked + 1
        length = SHORT_PROMPT_LEN if self._short else PROMPT_LEN
        prompt = tuple(20 + (7 * i + j) % 400 for j in range(length))
        most = self._lengths.randint(*SHORT_ANSWERS) if self._short else None
        sampling = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        self.engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, arrival_s=float(i)))

    def step(self) -> None:
        for delta in self.engine.step():
            if delta.finish_reason is not None:
                self.ask()


def _block(gpu: ClockGpu, clients: _Clients, steps: int, waits: Mapping[str, int]) -> dict[str, float]:
    """waits: the heads of a trunk, by the name of what the device waits before it."""
    engine = clients.engine
    gpu.waited_s.clear()
    began_s, began_cpu_s, before = time.perf_counter(), time.thread_time(), engine.stats().generation_tokens
    worked_s, plans_before = 0.0, gpu.num_plans
    for _ in range(steps):
        busy_s = [stream.busy_s for stream in (gpu.default, *gpu.streams)]
        clients.step()
        everywhere, *lanes = (
            stream.busy_s - each for stream, each in zip((gpu.default, *gpu.streams), busy_s, strict=True)
        )
        worked_s += everywhere + max(lanes, default=0.0)
    period_ms = 1000 * (time.perf_counter() - began_s) / steps
    device_ms = 1000 * worked_s / steps
    return {
        "period_ms": period_ms,
        "device_ms": device_ms,
        "gap_ms": period_ms - device_ms,
        "cpu_ms": 1000 * (time.thread_time() - began_cpu_s) / steps,
        "tokens": (engine.stats().generation_tokens - before) / steps,
        "plans": (gpu.num_plans - plans_before) / steps,
        **{name: 1000 * gpu.waited_s.get(heads, 0.0) / steps for name, heads in waits.items()},
    }


def _engine(gpu: ClockGpu, wanted: Wanted) -> Engine:
    slots, rows = wanted.sequences, max(wanted.sequences * (GAMMA + 2), 64)
    partition = plain_streams(gpu)
    places = device_lanes_of(partition)
    target_backend = clock_backend(gpu)
    draft_backend = target_backend.concurrent_instance()
    table, clock = BlockTable(slots, _WIDTH), WallClock()
    with tempfile.TemporaryDirectory() as folder:
        target = _runner(_TARGET, Path(folder) / "target", target_backend, places.verify, slots, rows, GAMMA)
        draft = _runner(_DRAFT, Path(folder) / "draft", draft_backend, places.draft, slots, rows, None)
    sampler = Sampler(slots, target.vocab_size, (2,), TorchSamplingKernels())
    control = speculation = None
    if wanted.mode not in (PLAIN, SHORT):
        config = SpeculationConfig(
            model="draft", method="draft_model", policy="fixed", num_speculative_tokens=GAMMA
        )
        model = DraftModelParts(
            runner=draft,
            kv=DraftKvCache(table, num_blocks=slots * _WIDTH, block_size=_BLOCK),
            max_positions=_BLOCK * _WIDTH,
        )
        parts = DrafterParts(
            table=table, sampling=sampler.state, max_rows=rows, model=model, samples_in_runner=True
        )
        speculation = SpeculativeExecution(
            drafter=make_drafter(config, parts),
            verifier=make_verifier(config, sampler),
            lanes=Lanes(partition=partition, target=target_backend, draft=draft_backend),
        )
        overlap = OverlapOptions(
            name="streams",
            share=partition.share,
            mode="on" if wanted.mode == OVERLAPPED else "off",
        )
        times = StepTimes.proportional(step_s=wanted.step_s, pass_s=wanted.pass_s, text_s=1e-7)
        costs = CostModel(times, schedules_async=True)
        control = SpeculationControl(
            config,
            costs,
            num_slots=slots,
            clock=clock,
            make_native=native_acceptance(load_index),
            overlap=overlap,
        )
    scheduler = Scheduler(
        kv=KvManager(slots * _WIDTH, _BLOCK),
        max_num_seqs=slots,
        max_num_batched_tokens=min(rows, slots * (GAMMA + 1)) if wanted.mode == SHORT else rows,
        max_model_len=_BLOCK * _WIDTH,
        eos_token_ids=(2,),
        clock=clock,
        speculation=control,
    )
    executor = ModelExecutor(
        target, sampler, table, max_logit_rows=rows, speculation=speculation, samples_in_runner=True
    )
    return Engine(scheduler, executor, schedules_async=True)


def _runner(
    config: Config,
    folder: Path,
    backend: FlashInferBackend,
    places: tuple[DeviceLane, ...],
    slots: int,
    rows: int,
    drafts: int | None,
) -> GraphRunner:
    """drafts: most of a sequence in a step; None: of the model that drafts itself."""
    directory = write_shape(folder, config)
    decoder = load_decoder(
        directory,
        backend,
        torch.bfloat16,
        max_model_len=_BLOCK * _WIDTH,
        max_rows=rows,
        max_logit_rows=rows,
        source=MadeUp.of(directory, "cpu"),
        progress=lambda *_: None,
    )
    spec = decoder.spec
    kv = KvShape(
        heads=spec.kv_heads,
        num_blocks=slots * _WIDTH,
        block_size=_BLOCK,
        dtype=torch.bfloat16,
    )
    chooser = DeviceTokenSampler(
        backend.device_sampling_kernels(rows, spec.vocab_size), backend.graph_capture, backend.device, rows
    )
    sizes = GraphSizes.default(
        max_rows=rows,
        max_sequences=slots,
        max_drafts=1 if drafts is None else drafts,
        max_blocks_each=_WIDTH,
        pairs=drafts is None,
    )
    return GraphRunner(
        decoder,
        backend,
        kv,
        chooser,
        backend.graph_capture,
        sizes=sizes,
        max_logit_rows=rows,
        drafts=drafts is None,
        lane_captures={each: backend.graph_capture_on(each) for each in places},
        report=lambda *_: None,
    )
