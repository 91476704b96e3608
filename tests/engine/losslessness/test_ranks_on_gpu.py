"""Two ranks on emulated GPUs answer as one: replayed graphs, steps and drafts launched ahead, every feature.

Oracle: the same engine on one emulated GPU, token for token, in float32: sums over ranks differ in their last bits
at most. Ranks are threads with a connection each over gloo; what they run is what their processes run, but for
loading kernels and measuring memory.

Planted bugs that these tests have caught: tokens that the host does not know, not sent, or taken from another
place; graphs captured in another order; a rank whose part is in no sum.
"""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from faser.config.engine import EngineConfig
from faser.engine.build import assemble
from faser.engine.contract.step_times import StepTimes
from faser.engine.engine import Engine
from faser.engine.execution.overlap.lanes import DeviceLanes
from faser.engine.execution.ranks.group import RankGroup, group_here
from faser.engine.execution.ranks.meeting import open_meeting
from faser.engine.execution.ranks.relay import LeadingGraphRunner, follow
from faser.engine.execution.startup import rank, warm_up
from faser.engine.execution.startup.executor import EngineParts
from faser.engine.execution.startup.files import find_models, target_files
from faser.engine.execution.startup.leader import NoRanks
from faser.engine.execution.startup.memory import cache_shapes, kv_shapes
from faser.engine.execution.startup.models import (
    LoadedModel,
    load_model,
    load_models,
    make_runner,
    start_models,
)
from faser.engine.structure.compiler import GrammarCompiler
from faser.engine.text.tokenizer import load_tokenizer
from faser.errors import EngineError, FaserError
from faser.kernels.cuda.flashinfer import backend as flashinfer_backend
from faser.types.request import Request
from tests.checkpoints import (
    llama_shapes,
    random_weights,
    tiny_llama_config,
    write_checkpoint,
    write_tokenizer,
)
from tests.engine.losslessness.equality import FEATURES, add_noise, answers, requests
from tests.kernels.cuda.fake_collectives import FakeCollectives
from tests.kernels.cuda.fake_device import FakeAccelerator, FakeGraph, FakeGraphRecorder
from tests.kernels.cuda.fake_graph import fake_backend
from tests.kernels.cuda.fake_memory import FakeMemory
from tests.waiting import PATIENCE_S

TIMES = StepTimes.proportional(step_s=0.01, pass_s=1e-5, text_s=1e-7)  # drafting seems to pay
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated kernels can; those of GPUs cannot."""
    monkeypatch.setattr(flashinfer_backend, "DTYPES", DTYPES)
    monkeypatch.setattr(flashinfer_backend, "KV_DTYPES", DTYPES)


@pytest.fixture(autouse=True)
def computes_on_one_thread() -> Iterator[None]:
    """Two ranks whose operators have threads of their own wait for each other's at every barrier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write_wide(directory: Path) -> Path:
    """A tiny Llama with two heads of keys of 64 channels, which kernels of GPUs have."""
    directory.mkdir()
    config = tiny_llama_config() | {"hidden_size": 256, "tie_word_embeddings": False}
    write_checkpoint(directory, config, random_weights(llama_shapes(config)))
    write_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = write_wide(folder / "target"), write_wide(folder / "drafter")
    add_noise(drafter, size=0.02)
    return target, drafter


@dataclass
class Ranks(NoRanks):
    """Ends the other rank with the engine."""

    runner: LeadingGraphRunner
    own: RankGroup
    thread: threading.Thread

    def close(self) -> None:
        self.runner.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()
        self.own.close()


def config_of(size: int, speculation: dict[str, Any], **settings: Any) -> EngineConfig:
    chosen: dict[str, Any] = {
        "device": "cuda:0",
        "backend": "torch",  # says that float32 is possible
        "dtype": "float32",
        "tensor_parallel_size": size,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "kv_cache_memory": 2 << 20,
        "speculative_config": speculation,
        "cudagraph_capture_sizes": (8, 16, 32),
    }
    return EngineConfig(**chosen | settings)


Change = Callable[[Tensor], object]


def engine_of(
    path: Path, config: EngineConfig, other: EngineConfig | None = None, change: Change | None = None
) -> Engine:
    """An engine on one emulated GPU, or two. other: config of the second one. change: done to its part of sums."""
    device = FakeAccelerator()
    if config.tensor_parallel_size == 1:
        return _engine_on(device, path, config)
    meeting = open_meeting()
    group, second = (group_here(rank, 2, meeting) for rank in range(2))
    group.compute_on(FakeCollectives(device, group))
    arguments = path, other or config, second, change
    thread = threading.Thread(target=be_second, args=arguments)
    thread.start()
    try:
        return _engine_on(device, path, config, group, thread)
    except EngineError:
        group.close()
        thread.join()
        raise


def _engine_on(
    device: FakeAccelerator,
    path: Path,
    config: EngineConfig,
    group: RankGroup | None = None,
    thread: threading.Thread | None = None,
) -> Engine:
    config, files = find_models(config, path, _quiet)
    target, drafting = load_models(config, files, fake_backend(device), _quiet, group=group)
    if group is not None:
        group.connect()
    shapes = kv_shapes(config, files, files[0].max_positions)
    if group is not None:
        num_blocks = group.least(shapes[0].num_blocks)
        shapes = [replace(each, num_blocks=num_blocks) for each in shapes]
    started, started_drafting = start_models(
        config, target, drafting, shapes, _quiet, on=DeviceLanes(), group=group
    )
    ranks = NoRanks()
    if group is not None and thread is not None:
        group.begin()
        assert isinstance(started.runner, LeadingGraphRunner)
        ranks = Ranks(started.runner, group, thread)
    parts = EngineParts(
        config=config,
        grammars=GrammarCompiler(
            lambda: load_tokenizer(path),
            vocab_size=files[0].spec.vocab_size,
            eos_token_ids=files[0].config.eos_token_ids,
        ),
        target=started,
        drafting=tuple(started_drafting),
        lanes=None,
        ngram_model=None,
        text_index_bytes=1 << 20,
        ranks=ranks,
    )
    return assemble(parts, _quiet, step_times=TIMES).engine


def be_second(path: Path, config: EngineConfig, group: RankGroup, change: Change | None) -> None:
    """What rank.run does, on an emulated device."""
    device = FakeAccelerator()
    group.compute_on(FakeCollectives(device, group, change))
    target = load_model(config, target_files(config, path, 1), fake_backend(device), _quiet, group=group)
    try:
        group.connect()
        follow(rank.start(config, target, group, None, 0), group)
    except EngineError:
        pass  # the first one has it too
    finally:
        group.close()


def _quiet(_stage: str, _done: int, _total: int) -> None: ...


def mixed(count: int, *, shares_prompts: bool = True) -> list[Request]:
    """Each asks for another one of the features than its neighbours, for a few tokens; the last 16 for none.

    shares_prompts: some ask for two answers.
    """
    by_feature, plain = [requests(**sampling) for sampling in FEATURES.values()], requests(temperature=0.0)
    asked = [(plain if i >= 24 else by_feature[i % len(by_feature)])[i] for i in range(count)]
    return [
        replace(
            each,
            prompt_token_ids=each.prompt_token_ids[-24:],
            sampling=replace(each.sampling, max_tokens=9 + i % 4, n=each.sampling.n if shares_prompts else 1),
        )
        for i, each in enumerate(asked)
    ]


def tokens_of(engine: Engine, asked: list[Request]) -> dict[tuple[str, int], tuple[int, ...]]:
    try:
        return {key: tokens for key, (tokens, _) in answers(engine, asked).items()}
    finally:
        engine.close()


@pytest.mark.full(but=("model",))
@pytest.mark.parametrize("drafting", ["off", "text", "model"])
def test_two_gpus_answer_as_one(drafting: str, pair: tuple[Path, Path]) -> None:
    drafts: dict[str, Any] = {"num_speculative_tokens": 3}
    speculation: dict[str, Any] = {
        "off": {"policy": "off"},
        "text": drafts | {"method": "ngram"},
        "model": drafts | {"method": "draft_model", "policy": "fixed", "model": str(pair[1])},
    }[drafting]
    # The emulated device does not let a draft model fill one block for two sequences.
    asked, shares = mixed(40, shares_prompts=drafting != "model"), {"enable_prefix_caching": drafting != "model"}
    wanted = tokens_of(engine_of(pair[0], config_of(1, speculation, **shares)), asked)
    engine = engine_of(pair[0], config_of(2, speculation, **shares))
    assert tokens_of(engine, asked) == wanted
    stats = engine.stats()
    if drafting == "model":
        assert stats.speculation is not None
        assert sum(each.accepted for each in stats.speculation.methods) > 20


def test_what_the_other_rank_adds_counts(pair: tuple[Path, Path]) -> None:
    """Else the comparison above would say nothing."""
    off = {"policy": "off"}
    wanted = tokens_of(engine_of(pair[0], config_of(1, off)), mixed(3))
    assert tokens_of(engine_of(pair[0], config_of(2, off), change=Tensor.zero_), mixed(3)) != wanted


def test_ranks_that_would_capture_different_graphs_are_refused(pair: tuple[Path, Path]) -> None:
    off = {"policy": "off"}
    other = config_of(2, off, cudagraph_capture_sizes=(8, 16, 24))
    with pytest.raises(EngineError, match=r"do not start alike; here the graph of GraphBatchSize\(rows=32"):
        engine_of(pair[0], config_of(2, off), other)


def on_two_ranks(
    path: Path, config: EngineConfig, work: Callable[[LoadedModel, RankGroup, FakeAccelerator], object]
) -> list[object]:
    """What work returns or raises on each rank, whose part of the model is loaded."""
    meeting, found = open_meeting(), list[object]([None, None])

    def run(number: int) -> None:
        group, device = group_here(number, 2, meeting), FakeAccelerator()
        group.compute_on(FakeCollectives(device, group))
        files = target_files(config, path, number)
        target = load_model(config, files, fake_backend(device), _quiet, group=group)
        try:
            group.connect()
            found[number] = work(target, group, device)
        except (FaserError, RuntimeError) as error:
            found[number] = error
        finally:
            group.close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(PATIENCE_S)
        assert not each.is_alive()
    return found


def test_the_gpu_with_the_least_room_decides_the_number_of_blocks(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both measure what they have, in the same largest step. Here the second one has more."""
    monkeypatch.setattr(warm_up, "_FEW_BLOCKS", 64)  # the emulated device wants a place for each row
    settings: dict[str, Any] = {
        "max_model_len": 2048,
        "max_num_seqs": 2,
        "kv_cache_memory": None,
        "enforce_eager": True,
    }
    config = config_of(2, {"policy": "off"}, cudagraph_capture_sizes=None, **settings)

    def blocks(target: LoadedModel, group: RankGroup, _device: FakeAccelerator) -> object:
        memory = FakeMemory(total_bytes=(6 if group.rank else 5) << 19)
        if group.rank:
            return rank.start(config, target, group, memory, memory.free_bytes()).cache.layers[0][0].shape
        budget = warm_up.profile_memory(config, [target], memory, memory.free_bytes(), DeviceLanes())
        (kv,) = kv_shapes(config, [target.files], target.files.max_positions, budget)
        least = group.least(kv.num_blocks)
        make_runner(config, target, replace(kv, num_blocks=least), _quiet, group=group)
        return kv.num_blocks, least

    first, shape = on_two_ranks(pair[0], config, blocks)
    assert isinstance(first, tuple), first
    assert isinstance(shape, torch.Size), shape
    most, least = first
    assert most == least == shape[0] > 100
    assert shape[2] == 1, "heads of keys of this rank"


def test_a_rank_that_cannot_capture_ends_the_start_of_all(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, captured = config_of(2, {"policy": "off"}), FakeGraphRecorder.capture
    failing: list[FakeAccelerator] = []

    def capture(recorder: FakeGraphRecorder, work: Callable[[], None]) -> FakeGraph:
        found = captured(recorder, work)
        if any(each is recorder.owner for each in failing):
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return found

    monkeypatch.setattr(FakeGraphRecorder, "capture", capture)

    def start(target: LoadedModel, group: RankGroup, device: FakeAccelerator) -> object:
        if group.rank:
            failing.append(device)
        (kv,) = cache_shapes(config, [target.files], 8)
        return make_runner(config, target, kv, _quiet, group=group)

    first, second = on_two_ranks(pair[0], config, start)
    assert str(first) == "rank 1 of the tensor-parallel model has failed at its start; see the log"
    assert isinstance(second, torch.OutOfMemoryError)
