"""Phase `ranks`: sums of two processes in CUDA graphs, and a model that two GPUs hold.

    sums      two processes add up tensors of 4 KiB to 4 MiB, each way that there is
    answers   a model of two ranks next to the same model of one: greedy tokens, and steps

On one GPU there is one way, the kernel over peers' memory: torch's symmetric memory lets two processes share a
device where it is told to, NCCL refuses them. Their kernels take turns there, so its times say nothing. `answers`
needs two GPUs; a dry run has two ranks on the CPU.

Run as `python -m benchmarks.gpu.decoding.ranks RANK DESCRIPTOR FIRST SECOND OUT` it is one of the two processes:
its rank, the file where they meet, their devices, and where rank 0 writes what it found.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.gpu.engines import Wanted, config_of, free_memory, made_up, made_up_costs
from benchmarks.gpu.models import write_shape
from benchmarks.gpu.plan import Plan
from benchmarks.gpu.record import Desk, Json
from benchmarks.gpu.steps import ClosedLoop, Tokens, answers, clock_of, greedy, made_up_prompts, spread_ms
from faser.config.environment import child_environment
from faser.engine.build import build
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.ranks.group import RankGroup, group_here
from faser.engine.execution.ranks.meeting import open_meeting
from faser.kernels.cuda.collectives import Nccl, SymmetricSums, is_small
from faser.types.sampling import SamplingParams

SIZES = tuple(1 << power for power in (12, 14, 16, 18, 19, 20, 22))  # bytes
_IN_A_GRAPH = 20  # sums
_REPLAYS = 10
_ON_CPU = 2  # of both, and of sizes
_CHILD_S = 120.0
_SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
_LOADING_S = 60.0

Way = Callable[[Tensor], object]


def run(plan: Plan, desk: Desk) -> None:
    count = torch.cuda.device_count() if plan.device == "cuda" else 0
    devices = ("cpu", "cpu") if count == 0 else ("cuda:0", f"cuda:{min(count - 1, 1)}")
    desk.result["gpus"] = count
    if desk.may_begin("sums of two processes", needs_s=0.0 if plan.dry_run else _LOADING_S):
        for row in sums_of(plan.out / "sums.json", devices):
            desk.append("sums", row)
    if count == 1:
        desk.say("one GPU: no model of two ranks")
    elif desk.may_begin("a model of two ranks", needs_s=0.0 if plan.dry_run else 2 * _LOADING_S):
        desk.result["answers"] = answers_of(plan, desk)


def sums_of(out: Path, devices: tuple[str, str]) -> list[Json]:
    """Start both processes; return what rank 0 has found. Raises RuntimeError where one fails."""
    meeting = open_meeting()
    environment = child_environment() | (_SHARED if devices[0] == devices[1] else {})
    command = [sys.executable, "-m", "benchmarks.gpu.decoding.ranks"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(meeting), *devices, str(out)],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[meeting],
        )
        for rank in range(2)
    ]
    ends_s = time.monotonic() + _CHILD_S
    try:
        statuses = [each.wait(max(0.0, ends_s - time.monotonic())) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
        os.close(meeting)
    if any(statuses):
        raise RuntimeError(f"the processes that add up have ended with status {statuses}")
    found: list[Json] = json.loads(out.read_text("utf-8"))
    return found


def be_rank(rank: int, meeting: int, devices: tuple[str, str], out: Path) -> None:
    """Do the work of one of the two processes."""
    group = group_here(rank, 2, meeting, answer_s=_CHILD_S)
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    group.connect()
    group.begin()
    rows = list(measured(group, device, ways_of(group, device, shared=devices[0] == devices[1])))
    if rank == 0:
        out.write_text(json.dumps(rows), "utf-8")
    group.agree("the end")


def ways_of(group: RankGroup, device: torch.device, *, shared: bool) -> dict[str, Way]:
    if device.type == "cpu":
        return {"gloo": group.all_reduce}
    found: dict[str, Way] = {"one kernel": SymmetricSums(group.store, group.rank, group.size, device).all_reduce}
    if not shared:
        found["NCCL"] = Nccl(group.store, group.rank, group.size, device).all_reduce
    return found


@torch.inference_mode()
def measured(group: RankGroup, device: torch.device, ways: dict[str, Way]) -> Iterator[Json]:
    """Sums of bfloat16, by way and size: whether they are right, the same bits on both ranks, and how long."""
    for name, way in ways.items():
        for size in SIZES if device.type == "cuda" else SIZES[:_ON_CPU]:
            parts = [drawn(rank, size // 2, device) for rank in range(2)]
            if name == "one kernel" and not is_small(parts[0]):
                continue
            wanted = parts[0] + parts[1]  # rounded once, in whichever order
            work = parts[group.rank].clone()
            way(work)
            found = group.gather(work.view(torch.uint8).long().sum().reshape(1).cpu())
            right = bool(torch.equal(work, wanted))
            replays, again_right = _in_graph(way, parts[group.rank], wanted, device)
            yield {
                "way": name,
                "bytes": size,
                "right": right and again_right,
                "same_bits": found is None or bool(torch.equal(*found)),
                "microseconds": replays,
            }


def drawn(rank: int, count: int, device: torch.device) -> Tensor:
    """Return what a rank adds: the other one knows it too."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(count, generator=generator).to(device, torch.bfloat16)


def _in_graph(way: Way, part: Tensor, wanted: Tensor, device: torch.device) -> tuple[float, bool]:
    """Return microseconds of a sum in a replayed graph, and whether the last one of each replay is right."""
    work = part.clone()
    count, num_replays = (_IN_A_GRAPH, _REPLAYS) if device.type == "cuda" else (_ON_CPU, _ON_CPU)

    def sums() -> None:
        for _ in range(count):
            work.copy_(part)
            way(work)

    replay: Callable[[], object] = sums
    if device.type == "cuda":
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            sums()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            sums()
        replay = graph.replay
    clock, right = clock_of(device.type), True
    replay()
    marks = [clock.mark()]
    for _ in range(num_replays):
        work.zero_()
        replay()
        marks.append(clock.mark())
        right = right and bool(torch.equal(work, wanted))
    seconds = sorted(clock.between_s(marks))[num_replays // 2]
    return round(1e6 * seconds / count, 1), right


def answers_of(plan: Plan, desk: Desk) -> Json:
    """Greedy tokens with one rank and with two, and steps of each. The weights lie on the disk for both ranks."""
    directory, sizes = write_shape(plan.models / "ranked", plan.sizes.draft), plan.sizes
    (directory / "made-up.safetensors").unlink(missing_ok=True)
    source = made_up(plan)(directory)
    save_file({name: source.get(name).cpu() for name in source.names()}, directory / "model.safetensors")
    del source
    free_memory()
    wanted = Wanted(
        target=directory,
        sequences=min(sizes.beside, 8),
        context=sizes.context,
        rows=sizes.rows,
        sources=made_up(plan),
    )
    found: Json = {}
    said: dict[int, list[Tokens]] = {}
    for ranks in (1, 2):
        desk.say(f"{ranks} ranks")
        config = replace(config_of(plan, wanted), tensor_parallel_size=ranks, async_scheduling=None)
        built = build(config, directory, lambda *_: None, step_times=made_up_costs())
        try:
            vocab = read_model_config(directory).spec.vocab_size
            prompts = made_up_prompts(wanted.sequences, wanted.context, vocab)
            said[ranks] = answers(built.engine, prompts, partial(bounded, sizes.answer_tokens))
            loop = ClosedLoop(built.engine, clock_of(plan.device))
            loop.start(prompts, greedy)
            loop.warm()
            steps = loop.look(seconds=sizes.cell_s, steps=sizes.steps)
            loop.stop()
            found[f"{ranks} ranks"] = {"period_ms": spread_ms(steps.device_s), "blocks": built.info.num_blocks}
        finally:
            built.engine.close()
        del built
        free_memory()
    found["together"] = alike(said[1], said[2])
    return found


def bounded(num_tokens: int, place: int) -> SamplingParams:
    return replace(greedy(place), max_tokens=num_tokens)


def alike(ones: Sequence[Tokens], others: Sequence[Tokens]) -> float:
    """Return the share of tokens before an answer's first difference."""
    pairs = [list(zip(one, other, strict=True)) for one, other in zip(ones, others, strict=True)]
    same = sum(next((at for at, (one, other) in enumerate(each) if one != other), len(each)) for each in pairs)
    return round(same / max(sum(map(len, pairs)), 1), 4)


if __name__ == "__main__":
    rank, meeting, first, second, out = sys.argv[1:]
    be_rank(int(rank), int(meeting), (first, second), Path(out))
