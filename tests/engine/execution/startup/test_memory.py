"""How a GPU's memory is divided.

Oracle: a simulated device on which everything is then really taken. Bugs that these tests have caught: memory in
the allocator's cache counted as needed, kernels that bypass the allocator forgotten, weights hidden by memory that
another process freed, the share taken of the free memory, more granted than is free, a step counted from zero,
workspaces forgotten. Of mixtures: their results not counted, memory that grows to twice what it needs.

How many blocks the KV cache gets, with one model or two, and what is refused.
"""

import ctypes
import mmap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from faser.config.engine import EngineConfig
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.checkpoints.families.architecture import ExpertsSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.startup import memory as sizing
from faser.engine.execution.startup.memory import (
    CachedModel,
    MemoryBudget,
    compute_dtype,
    experts_bytes,
    kv_cache_dtype,
    kv_shapes,
    text_index_bytes,
)
from faser.engine.execution.startup.warm_up import measure_budget
from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.shapes import PackedLinear
from tests.checkpoints import tiny_llama_config
from tests.kernels.cuda.fake_memory import FakeMemory
from tests.kernels.interface.low_bit.blocks import random_blocks

SIZES = st.integers(min_value=0, max_value=100)


def sharing(share: float = 0.9) -> EngineConfig:
    return EngineConfig(device="cuda", gpu_memory_utilization=share)


class Machine:
    """A device on which a step takes `step` bytes while it runs, and the first leaves a workspace and kernels."""

    def __init__(self, memory: FakeMemory, step: int, workspace: int, kernels: int) -> None:
        self.memory = memory
        self._step = step
        self._workspace, self._kernels = workspace, kernels

    def step(self) -> None:
        self.memory.allocate(self._workspace)
        self.memory.past += self._kernels
        self._workspace = self._kernels = 0
        self.memory.allocate(self._step)
        self.memory.free(self._step)


def test_every_part_has_its_own_bytes() -> None:
    memory = FakeMemory(total_bytes=200, others=10)
    start = memory.free_bytes()
    memory.allocate(70)
    memory.free(30)  # needed only while loading
    machine = Machine(memory, step=7, workspace=3, kernels=2)
    found = measure_budget(sharing(0.5), memory, start, machine.step, graph_bytes=5, workspaces_bytes=1)
    assert found == MemoryBudget(
        device="cuda:0",
        total_bytes=200,
        share=0.5,
        free_bytes=190,
        loaded_bytes=45,
        step_bytes=7,
        step_rows=256,
        graph_bytes=5,
        workspaces_bytes=1,
    )
    assert (found.granted_bytes, found.left_bytes, found.most_bytes) == (100, 42, 132)


@given(
    others=SIZES,
    weights=SIZES,
    rest=SIZES,
    step=SIZES,
    workspace=SIZES,
    kernels=SIZES,
    graphs=SIZES,
    share=st.floats(min_value=0.01, max_value=1),
)
def test_what_is_left_can_be_taken_and_no_more_would_be_within_the_share(
    others: int, weights: int, rest: int, step: int, workspace: int, kernels: int, graphs: int, share: float
) -> None:
    memory = FakeMemory(total_bytes=1000, others=others)
    start = memory.free_bytes()
    memory.allocate(weights + rest)
    memory.free(rest)
    machine = Machine(memory, step, workspace, kernels)
    budget = measure_budget(sharing(share), memory, start, machine.step, graph_bytes=graphs, workspaces_bytes=0)
    memory.allocate(budget.left_bytes)
    memory.allocate(graphs)
    memory.reset_peak()
    machine.step()
    ours = memory.peak_bytes() + memory.past
    granted = min(int(1000 * share), 1000 - others)
    assert ours == granted or (budget.left_bytes == 0 and ours > granted)


def test_no_more_is_granted_than_was_free() -> None:
    memory = FakeMemory(total_bytes=100, others=60)
    found = measure_budget(sharing(), memory, 40, lambda: None, graph_bytes=0, workspaces_bytes=0)
    assert (found.granted_bytes, found.left_bytes) == (40, 40)


def test_memory_that_another_process_frees_does_not_hide_weights() -> None:
    memory = FakeMemory(total_bytes=100, others=50)
    start = memory.free_bytes()
    memory.allocate(20)
    memory.others = 0
    found = measure_budget(sharing(), memory, start, lambda: None, graph_bytes=0, workspaces_bytes=0)
    assert found.loaded_bytes == 20


def test_nothing_is_left_where_more_is_taken_than_granted() -> None:
    memory = FakeMemory(total_bytes=100)
    memory.allocate(95)
    found = measure_budget(sharing(), memory, 100, lambda: None, graph_bytes=2, workspaces_bytes=1)
    assert (found.left_bytes, found.most_bytes) == (0, 2)


def test_a_step_without_room_is_refused_with_its_rows() -> None:
    memory = FakeMemory(total_bytes=100 << 30)
    memory.allocate(98 << 30)
    machine = Machine(memory, step=3 << 30, workspace=0, kernels=0)
    with pytest.raises(ConfigError) as caught:
        measure_budget(sharing(), memory, 100 << 30, machine.step, graph_bytes=0, workspaces_bytes=0)
    assert str(caught.value) == (
        "--max-num-batched-tokens is 256; cuda:0 has no room for a step of 256 rows in addition to "
        "the models, which take 98GiB; 100GiB were free"
    )


def test_the_description_names_every_part_with_its_unit() -> None:
    memory = FakeMemory(total_bytes=140 << 30, others=1 << 30)
    memory.allocate(15 << 30)
    machine = Machine(memory, step=1 << 30, workspace=0, kernels=0)
    found = measure_budget(
        sharing(), memory, 139 << 30, machine.step, graph_bytes=1 << 29, workspaces_bytes=128 << 20
    )
    assert found.describe() == (
        "cuda:0 has 140GiB, of which 139GiB were free; --gpu-memory-utilization 0.9 grants 126GiB; loaded 15GiB, "
        "a step of 256 rows 1GiB, CUDA graphs 512MiB, workspaces 128MiB; left for the KV cache: 109.4GiB"
    )


TARGET = CachedModel(spec=decoder_spec(tiny_llama_config()), dtype=torch.float32, kv_dtype=torch.float32)
DRAFT = CachedModel(
    spec=decoder_spec(tiny_llama_config() | {"num_hidden_layers": 1}),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
)
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # keys and values, layers, tokens, heads, channels, bytes
DRAFT_BLOCK_BYTES = BLOCK_BYTES // 4  # half the layers, half the bytes of a number
CONTEXT = 2048


def config(**options: object) -> EngineConfig:
    return EngineConfig(max_num_seqs=4, max_num_batched_tokens=32, **options)  # type: ignore[arg-type]


def test_a_draft_model_has_the_same_blocks_and_its_bytes_count() -> None:
    memory = 200 * (BLOCK_BYTES + DRAFT_BLOCK_BYTES) + 5
    target, draft = kv_shapes(config(kv_cache_memory=memory), [TARGET, DRAFT], CONTEXT)
    assert (target.num_blocks, draft.num_blocks) == (200, 200)
    assert target.block_size == draft.block_size == 16
    assert target.total_bytes + draft.total_bytes <= memory
    (alone,) = kv_shapes(config(kv_cache_memory=memory), [TARGET], CONTEXT)
    assert alone.num_blocks == 250


@pytest.mark.parametrize(
    "device, given, wanted",
    [
        ("cuda", "auto", torch.bfloat16),
        ("cuda", "fp8", torch.float8_e4m3fn),
        ("cpu", "auto", torch.bfloat16),
        ("cpu", "int8", torch.int8),
    ],
)
def test_keys_and_values_have_the_type_of_activations_or_8_bits(
    device: str, given: str, wanted: torch.dtype
) -> None:
    assert kv_cache_dtype(config(device=device, kv_cache_dtype=given), torch.bfloat16) is wanted


def test_8_bit_keys_and_values_leave_room_for_twice_as_many() -> None:
    """For a draft model too."""
    memory = 1 << 20
    models = [replace(each, dtype=torch.bfloat16, kv_dtype=torch.bfloat16) for each in (TARGET, DRAFT)]
    small = [replace(each, kv_dtype=torch.float8_e4m3fn) for each in models]
    wide, narrow = (kv_shapes(config(kv_cache_memory=memory), each, 512)[0] for each in (models, small))
    assert narrow.num_blocks // 2 == wide.num_blocks
    assert narrow.block_bytes == wide.block_bytes // 2


def test_the_scales_of_int8_count() -> None:
    """Two bytes beside the 16 of a head."""
    head_dim = TARGET.spec.head_dim
    (wide,), (narrow,) = (
        kv_shapes(config(kv_cache_memory=1 << 20), [replace(TARGET, kv_dtype=dtype)], 512)
        for dtype in (torch.bfloat16, torch.int8)
    )
    assert narrow.block_bytes * 2 * head_dim == wide.block_bytes * (head_dim + 2)
    assert narrow.num_blocks == (1 << 20) // narrow.block_bytes > wide.num_blocks * 1.7


def test_without_a_limit_the_kv_cache_is_no_more_than_all_sequences_can_fill() -> None:
    for models in ([TARGET], [TARGET, DRAFT]):
        assert kv_shapes(config(), models, CONTEXT)[0].num_blocks == 4 * CONTEXT // 16


def test_a_context_whose_tables_exceed_the_free_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Angles of 16 channels, three times as many while they are computed; blocks, and those of four sequences."""
    needed = 4 * 3 * 16 * CONTEXT + CONTEXT // 16 * (128 + 4 * 8)
    monkeypatch.setattr(sizing, "available_memory", lambda: needed)
    sizing.check_context(config(), TARGET, CONTEXT)
    monkeypatch.setattr(sizing, "available_memory", lambda: needed - 1)
    with pytest.raises(ConfigError, match=r"max_position_embeddings is 2048; tables .* lower --max-model-len"):
        sizing.check_context(config(), TARGET, CONTEXT)
    with pytest.raises(ConfigError, match=r"--max-model-len is 2048; tables"):
        sizing.check_context(config(max_model_len=CONTEXT), TARGET, CONTEXT)


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(1 << 55, dtype=torch.int8), lambda: mmap.mmap(-1, 1 << 55)]
)
def test_memory_that_the_system_refuses_is_the_operators_error(allocate: Callable[[], object]) -> None:
    with (
        pytest.raises(ConfigError, match=r"the system refuses memory \(.*--max-model-len is the model's"),
        sizing.refused_allocations(config()),
    ):
        allocate()
    with pytest.raises(RuntimeError, match="another"), sizing.refused_allocations(config()):
        raise RuntimeError("another")


def test_the_index_of_texts_takes_what_sequences_can_fill_out_of_the_caches_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sizing, "available_memory", lambda: 1 << 30)
    assert text_index_bytes(config(speculative_config={"policy": "off"}), CONTEXT) == 0
    assert text_index_bytes(config(), CONTEXT) == (1 << 30) // 64, "of a small machine's memory no larger share"
    monkeypatch.setattr(sizing, "available_memory", lambda: 1 << 40)
    assert text_index_bytes(config(), CONTEXT) == 200 * (4 * CONTEXT + 262_144)
    assert text_index_bytes(config(), 1 << 20) == 256 << 20
    monkeypatch.setattr(sizing, "available_memory", lambda: 1 << 20)
    share, taken = (1 << 20) // 4, 100 * BLOCK_BYTES // 100 * 8
    (whole,), (less,) = (kv_shapes(config(), [TARGET], 128, text_bytes=each) for each in (0, taken))
    assert whole.num_blocks == min(share // BLOCK_BYTES, 4 * 128 // 16)
    assert less.num_blocks == (share - taken) // BLOCK_BYTES


class _Mallinfo2(ctypes.Structure):
    """What glibc's malloc has given out: hblkhd in mappings of their own, uordblks in others. Bytes."""

    _names = (
        "arena",
        "ordblks",
        "smblks",
        "hblks",
        "hblkhd",
        "usmblks",
        "fsmblks",
        "uordblks",
        "fordblks",
        "keep",
    )
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names)


def allocated_bytes() -> int:
    malloc = ctypes.CDLL(None)
    malloc.mallinfo2.restype = _Mallinfo2
    found = malloc.mallinfo2()
    return int(found.hblkhd + found.uordblks)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="malloc is not glibc's")
@pytest.mark.parametrize("form, shared", [("float", 0), ("Q8_0", 0), ("float", 512), ("Q8_0", 2048)])
def test_mixtures_count_with_what_their_kernels_allocate(form: str, shared: int, kernel_cache: Path) -> None:
    """Bytes of malloc before and after the largest step. A thread's memory is new; a smaller step came first."""
    hidden, size, rows = 512, 256, 300
    mixture = ExpertsSpec(num_experts=6, top_k=4, size=size, renormalise=True, shared_size=shared)
    layer = replace(TARGET.spec.layers[0], feed_forward=mixture)
    model = replace(TARGET, spec=replace(TARGET.spec, hidden_size=hidden, layers=(layer,)))
    expected = experts_bytes(replace(config(), max_num_batched_tokens=rows), model)

    def measured() -> int:
        native = NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)

        def packed(outputs: int, inputs: int) -> PackedLinear:
            return native.pack(
                torch.ones(outputs, inputs) if form == "float" else random_blocks(form, outputs, inputs)
            )

        block = Experts(
            router=native.pack(torch.ones(6 + (shared > 0), hidden)),
            gate_up=tuple(packed(2 * size, hidden) for _ in range(6)),
            down=tuple(packed(hidden, size) for _ in range(6)),
            top_k=4,
            renormalise=True,
            shared=(packed(2 * shared, hidden), packed(hidden, shared)) if shared else None,
        )
        x = torch.ones(rows, hidden)
        native.experts(x[:1], block, torch.ones(1, hidden))
        before = allocated_bytes()
        for count in (200, rows):
            native.experts(x[:count], block, torch.ones(count, hidden))
        return allocated_bytes() - before

    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(measured).result()
    assert expected * (0.7 if form == "float" else 0.8) < found <= expected


def test_mixtures_leave_less_for_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    mixture = ExpertsSpec(num_experts=6, top_k=4, size=256, renormalise=True)
    layers = tuple(replace(each, feed_forward=mixture) for each in TARGET.spec.layers)
    mixed = replace(TARGET, spec=replace(TARGET.spec, layers=layers))
    share = experts_bytes(config(), mixed) + 20 * BLOCK_BYTES
    monkeypatch.setattr(sizing, "available_memory", lambda: 4 * share)
    (whole,), (less,) = (kv_shapes(config(), [each], 128) for each in (TARGET, mixed))
    assert (whole.num_blocks, less.num_blocks) == (4 * 128 // 16, 20)
    assert experts_bytes(config(), TARGET) == 0


def test_memory_for_less_than_one_context_is_refused_with_both_numbers() -> None:
    needed = 128 * (BLOCK_BYTES + DRAFT_BLOCK_BYTES)
    kv_shapes(config(kv_cache_memory=needed), [TARGET, DRAFT], CONTEXT)
    with pytest.raises(ConfigError) as caught:
        kv_shapes(config(kv_cache_memory=needed - 1), [TARGET, DRAFT], CONTEXT)
    assert str(caught.value) == (
        "--kv-cache-memory is 1.2MiB; one context of 2048 tokens needs 1.3MiB; raise it, or lower --max-model-len"
    )


def test_every_draft_token_needs_logits_up_to_the_rows_of_a_step_and_a_limit() -> None:
    assert config(speculative_config={"policy": "off"}).max_logit_rows == 4
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    assert config(speculative_config=ngram).max_logit_rows == 16
    assert config(speculative_config={**ngram, "num_speculative_tokens": 9}).max_logit_rows == 32
    for seqs, most in ((200, 800), (300, 1024), (600, 1200)):
        many = EngineConfig(max_num_seqs=seqs, max_num_batched_tokens=8192, speculative_config=ngram)
        assert many.max_logit_rows == most


def budget(left: int, *, beyond: int = 0) -> MemoryBudget:
    """left: bytes within the share. beyond: further bytes that are free."""
    return MemoryBudget(
        device="cuda:0",
        total_bytes=2 * (left + beyond + 30),
        share=(left + 30) / (2 * (left + beyond + 30)),
        free_bytes=left + beyond + 30,
        loaded_bytes=20,
        step_bytes=5,
        step_rows=32,
        graph_bytes=4,
        workspaces_bytes=1,
    )


def gpu(**options: object) -> EngineConfig:
    return config(device="cuda", **options)


def test_a_gpus_kv_cache_has_all_that_is_left_for_all_models() -> None:
    left = 300 * (BLOCK_BYTES + DRAFT_BLOCK_BYTES) + 100
    target, draft = kv_shapes(gpu(), [TARGET, DRAFT], CONTEXT, budget(left))
    assert (target.num_blocks, draft.num_blocks) == (300, 300)
    assert target.total_bytes + draft.total_bytes <= left


def test_a_gpus_kv_cache_is_no_more_than_all_sequences_can_fill() -> None:
    (found,) = kv_shapes(gpu(), [TARGET], CONTEXT, budget(10**9))
    assert found.num_blocks == 4 * CONTEXT // 16


def test_a_gpu_without_room_for_one_context_is_refused_with_all_parts() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_shapes(gpu(), [TARGET], CONTEXT, budget(100 * BLOCK_BYTES))
    said = str(caught.value)
    assert said.startswith("one context of 2048 tokens needs 1MiB of KV cache, and 800KiB are left: cuda:0 has ")
    for part in ("loaded 20B", "a step of 32 rows 5B", "CUDA graphs 4B", "workspaces 1B"):
        assert part in said
    assert "lower --max-model-len to 1600, lower --max-num-batched-tokens or --max-num-seqs" in said
    assert said.endswith("or raise --gpu-memory-utilization")


def test_a_gpu_without_room_for_a_block_gets_no_advice_to_shorten_the_context() -> None:
    with pytest.raises(ConfigError) as caught:
        kv_shapes(gpu(), [TARGET], CONTEXT, budget(BLOCK_BYTES - 1))
    assert "--max-model-len" not in str(caught.value)


def test_configured_memory_wins_over_the_share_but_not_over_what_is_free() -> None:
    asked = 200 * BLOCK_BYTES
    there = budget(10, beyond=asked - 10)
    (found,) = kv_shapes(gpu(kv_cache_memory=asked), [TARGET], CONTEXT, there)
    assert found.num_blocks == 200
    with pytest.raises(
        ConfigError, match=r"^--kv-cache-memory is 1\.6MiB; at most 1\.6MiB can be had: cuda:0 has "
    ):
        kv_shapes(gpu(kv_cache_memory=asked + 1), [TARGET], CONTEXT, there)


@pytest.mark.parametrize(
    "asked, backend, stored, computed",
    [
        ("auto", "flashinfer", "bfloat16", torch.bfloat16),
        ("auto", "flashinfer", "float16", torch.bfloat16),
        ("auto", "flashinfer", "float32", torch.bfloat16),
        ("auto", "flashinfer", None, torch.bfloat16),
        ("auto", "torch", "float32", torch.float32),
        ("auto", "torch", "float16", torch.bfloat16),
        ("float16", "flashinfer", "bfloat16", torch.float16),
        ("float32", "torch", "bfloat16", torch.float32),
    ],
)
def test_a_gpu_computes_in_the_configured_type_or_near_the_checkpoints(
    asked: str, backend: str, stored: str | None, computed: torch.dtype, tiny_checkpoint: Path
) -> None:
    model = replace(read_model_config(tiny_checkpoint), dtype=stored)
    assert compute_dtype(gpu(dtype=asked, backend=backend), model) is computed
