"""The flashinfer backend without a GPU: calls against FlashInfer's signatures, results against the reference.

The kernels are emulated from their documentation (fake_flashinfer); under test is everything between the contract
of a backend and what the kernels are given. Nothing here says that FlashInfer itself does what it documents.

Bugs these tests have been seen to catch: the last page's length one short, the index of pages shifted, causal
from the top left or not at all, a window one wider, the scale left to its default, keys and values swapped,
keys' weight replaced by the queries', values rotated too, every layer read from the first, one layer copied of
two; planned only once, planned anew without waiting, one plan for all kinds of layers, index arrays never sent,
float16 by default, a kernel that FlashInfer chooses itself, a workspace for two lanes; a bias dropped next to a
residual, a residual that is overwritten before it is added, a weight that is not copied; a keyword that does
not exist, an argument missing; keys and values planned with the queries' type or the other way round.
"""

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.library import load_flashinfer
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.kv_cache import as_bytes
from faser.kernels.interface.shapes import AttentionPlan, AttentionShape, KvCache, PackedLinear
from faser.kernels.torch_backend import TorchBackend
from faser.types.activation import Activation
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_kernels
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer
from tests.kernels.cuda.flashinfer.signatures import SIGNATURES, VERSION, signature
from tests.kernels.histories import Steps, histories, shapes
from tests.kernels.layouts import (
    BLOCK_SIZE,
    Span,
    attention_shape,
    kv_shape,
    layout_of,
    qkv_width,
    rotary_angles,
    shuffled_table,
    step,
)

pytestmark = pytest.mark.usefixtures("one_thread", "seeded")

REFERENCE = TorchBackend()
ROOT = Path(__file__).parents[4]
DTYPES = [torch.bfloat16, torch.float16]
PREFILL, DECODE = "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"
# Keys and mixed values are rounded in other places than the reference's: a few units in the last place.
NEAR = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


def fake() -> tuple[FlashInferBackend, FakeFlashInfer, FakeAccelerator]:
    accelerator = FakeAccelerator()
    library = FakeFlashInfer(accelerator)
    return FlashInferBackend(accelerator, library, fake_kernels(accelerator)), library, accelerator


def check(actual: Tensor, wanted: Tensor) -> None:
    near = NEAR[actual.dtype]
    assert_close(actual.float(), wanted.float(), rtol=near, atol=near)


def test_the_backend_is_one() -> None:
    backend: Backend = fake()[0]
    assert backend.name == "flashinfer"
    assert backend.graph_capture is not None
    assert backend.sampling_kernels is not None
    assert backend.device_sampling_kernels(4, 100) is not None
    backend.wait()


@settings(max_examples=40)
@given(steps=histories(), shape=shapes(), rotates=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_steps_give_what_the_reference_gives(
    steps: Steps, shape: AttentionShape, rotates: bool, dtype: torch.dtype
) -> None:
    """Oracle: the torch backend in float32, from the same inputs."""
    backend, _, _ = fake()
    table = shuffled_table(3, 6)
    size = kv_shape(shape, 18, dtype)
    cache = backend.allocate_kv(size)
    wide_cache = REFERENCE.allocate_kv(replace(size, dtype=torch.float32))
    angles = rotary_angles(64) if rotates else None
    generator = torch.Generator().manual_seed(len(steps))
    for spans in steps:
        layout = layout_of(spans, table)
        qkv = torch.randn(len(layout.positions), qkv_width(shape), generator=generator).to(dtype)
        wanted = step(REFERENCE, wide_cache, shape, layout, qkv.float(), angles)
        check(step(backend, cache, shape, layout, qkv, angles), wanted)


@settings(max_examples=30, deadline=None)
@given(steps=histories(), shape=shapes(), rotates=st.booleans(), dtype=st.sampled_from(DTYPES))
def test_steps_over_8_bit_keys_and_values_give_what_the_reference_gives(
    steps: Steps, shape: AttentionShape, rotates: bool, dtype: torch.dtype
) -> None:
    """Oracle: the torch backend, which rounds what it rotated in the same places, over the same stored bits."""
    backend, library, _ = fake()
    table = shuffled_table(3, 6)
    size = kv_shape(shape, 18, FP8)
    cache, its_cache = backend.allocate_kv(size), REFERENCE.allocate_kv(size)
    angles = rotary_angles(64) if rotates else None
    generator = torch.Generator().manual_seed(len(steps))
    for spans in steps:
        layout = layout_of(spans, table)
        qkv = torch.randn(len(layout.positions), qkv_width(shape), generator=generator).to(dtype)
        wanted = step(REFERENCE, its_cache, shape, layout, qkv, angles)
        check(step(backend, cache, shape, layout, qkv, angles), wanted)
    for part, its_part in zip(cache.layers[1], (its_cache.keys[1], its_cache.values[1]), strict=True):
        assert torch.equal(as_bytes(part), as_bytes(its_part))
    for wrapper in library.wrappers:
        assert wrapper.static is not None
        assert (wrapper.static.dtype, wrapper.static.kv_dtype) == (dtype, FP8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, num_norms", [(64, 2), (128, 2), (512, 3)])
def test_head_norms_come_before_the_rotation(head_dim: int, num_norms: int, dtype: torch.dtype) -> None:
    backend, _, _ = fake()
    shape = attention_shape(4, 2, head_dim)
    layout = layout_of(
        [Span(sequence=0, start=0, rows=9), Span(sequence=1, start=0, rows=1)], shuffled_table(2, 1)
    )
    weights = [torch.randn(head_dim).to(dtype) for _ in range(num_norms)]
    qkv = torch.randn(10, qkv_width(shape)).to(dtype)

    def run(backend: Backend, qkv: Tensor) -> list[Tensor]:
        cache = backend.allocate_kv(kv_shape(shape, 2, qkv.dtype))
        plan = backend.plan(layout, BLOCK_SIZE)
        norms = dict(zip(("q_norm", "k_norm", "v_norm"), (each.to(qkv.dtype) for each in weights), strict=False))
        queries = backend.rope_append(qkv, rotary_angles(head_dim), cache, 0, shape, plan, **norms, eps=1e-3)
        assert queries.data_ptr() == qkv.data_ptr()
        out = torch.empty(10, 4 * 2 * head_dim, dtype=qkv.dtype)
        return [queries, backend.attend(queries, cache, 0, shape, plan, out)]

    wanted = run(REFERENCE, qkv.float())
    ours = run(backend, qkv.clone())
    for mine, theirs in zip(ours, wanted, strict=True):
        assert_close(mine.float(), theirs, rtol=4 * NEAR[dtype], atol=4 * NEAR[dtype])


@pytest.mark.parametrize("window, cap", [(None, None), (5, None), (None, 4.0)])
@pytest.mark.parametrize("heads", [(4, 2), (1, 2)])  # group 4 and 1: kernels with tensor cores and without
def test_sinks_give_what_the_reference_gives(
    heads: tuple[int, int], window: int | None, cap: float | None
) -> None:
    """Sinks from one that weighs nothing to one that weighs all, of steps with one row each and with more.

    Planted: a sink with a value, the logarithm taken for a natural one, the sink of the next head.
    """
    group, num_kv_heads = heads
    shape = replace(attention_shape(group, num_kv_heads, 64, window), score_cap=cap)
    sinks = torch.linspace(-20.0, 6.0, shape.num_heads)
    table = shuffled_table(2, 3)
    sides = []
    for backend, dtype in ((fake()[0], torch.float16), (REFERENCE, torch.float32)):
        cache = backend.allocate_kv(kv_shape(shape, 6, dtype))
        found = []
        for number, rows in enumerate(((0, 7), (7, 1), (8, 3))):
            spans = [Span(sequence=s, start=rows[0], rows=rows[1]) for s in range(2)]
            drawn = torch.randn(2 * rows[1], qkv_width(shape), generator=torch.Generator().manual_seed(number))
            qkv = drawn.half().to(dtype)
            found.append(step(backend, cache, shape, layout_of(spans, table), qkv, sinks=sinks))
        sides.append(found)
    for mine, theirs in zip(*sides, strict=True):
        assert_close(mine.float(), theirs, rtol=4 * NEAR[torch.float16], atol=2 * NEAR[torch.float16])


def grown(backend: Backend, shape: AttentionShape, rows: int) -> tuple[KvCache, Tensor]:
    """A cache in which two sequences have that many positions, and their block table."""
    table = shuffled_table(2, 3)
    cache = backend.allocate_kv(kv_shape(shape, 6, torch.float16))
    spans = [Span(sequence=s, start=0, rows=rows) for s in range(2)]
    step(backend, cache, shape, layout_of(spans, table), torch.randn(2 * rows, qkv_width(shape)).half())
    return cache, table


def test_a_step_is_planned_once_for_all_layers_of_a_kind_and_sent_once() -> None:
    backend, library, accelerator = fake()
    unbounded, windowed = attention_shape(4, 1, 64), attention_shape(4, 1, 64, window=3)
    cache = backend.allocate_kv(kv_shape(unbounded, 2, torch.float16, num_layers=4))
    layout = layout_of([Span(sequence=0, start=0, rows=5)], shuffled_table(1, 2))
    plan = backend.plan(layout, BLOCK_SIZE)
    for layer, shape in enumerate((unbounded, windowed, unbounded, windowed)):
        qkv = torch.randn(5, qkv_width(shape)).half()
        queries = backend.rope_append(qkv, None, cache, layer, shape, plan)
        backend.attend(queries, cache, layer, shape, plan, torch.empty(5, 4 * 64, dtype=torch.float16))
    assert (library.calls[f"{PREFILL}.plan"], library.calls[f"{PREFILL}.run"]) == (2, 4)
    assert accelerator.uploads == 1


def test_a_layer_that_reads_the_keys_of_another_takes_its_plan() -> None:
    """And stores nothing. Planted: a plan of its own; the keys of the layer itself."""
    shape = attention_shape(4, 1, 512)
    other = replace(shape, reads_other=True)
    layout = layout_of([Span(sequence=0, start=0, rows=5)], shuffled_table(1, 2))
    qkv = torch.randn(5, shape.qkv_size).half()
    queries = torch.randn(5, shape.q_size).half()

    def run(backend: Backend, dtype: torch.dtype) -> Tensor:
        size = replace(kv_shape(shape, 2, dtype), heads=((1, 512), (0, 512)))
        cache, plan = backend.allocate_kv(size), backend.plan(layout, BLOCK_SIZE)
        out = torch.empty(5, shape.q_size, dtype=dtype)
        own = backend.rope_append(qkv.to(dtype), None, cache, 0, shape, plan)
        backend.attend(own, cache, 0, shape, plan, out)
        rotated = backend.rope_append(queries.to(dtype), None, cache, 1, other, plan)
        found: Tensor = backend.attend(rotated, cache, 0, other, plan, out)
        return found

    backend, library, _ = fake()
    check(run(backend, torch.float16), run(REFERENCE, torch.float32))
    assert (library.calls[f"{PREFILL}.plan"], library.calls[f"{PREFILL}.run"]) == (1, 2)


def test_plans_that_take_turns_do_not_mix() -> None:
    """Two runners of one backend, each with a step under way: the wrapper is planned anew at every turn."""
    backend, _, _ = fake()
    shape = attention_shape(1, 2, 64)
    rows = [3, 5]
    qkv = [torch.randn(count, qkv_width(shape)).half() for count in rows]

    def begin(backend: Backend, at: int, dtype: torch.dtype) -> tuple[KvCache, AttentionPlan, Tensor]:
        cache = backend.allocate_kv(kv_shape(shape, 3, dtype))
        layout = layout_of([Span(sequence=0, start=0, rows=rows[at])], shuffled_table(1, 3, seed=at))
        plan = backend.plan(layout, BLOCK_SIZE)
        return cache, plan, backend.rope_append(qkv[at].to(dtype).clone(), None, cache, 0, shape, plan)

    steps = [begin(backend, at, torch.float16) for at in range(2)]
    wanted = []
    for at in range(2):
        cache, plan, queries = begin(REFERENCE, at, torch.float32)
        wanted.append(REFERENCE.attend(queries, cache, 0, shape, plan, torch.empty(rows[at], 2 * 64)))
    for at in (0, 1, 0, 1, 1):
        cache, plan, queries = steps[at]
        out = torch.empty(rows[at], 2 * 64, dtype=torch.float16)
        check(backend.attend(queries, cache, 0, shape, plan, out), wanted[at])


@pytest.mark.parametrize("group, tensor_cores", [(1, False), (2, True), (3, True), (8, True)])
def test_one_row_each_is_decoded_and_more_are_prefilled(group: int, tensor_cores: bool) -> None:
    backend, library, _ = fake()
    shape = attention_shape(group, 1, 64)
    cache, table = grown(backend, shape, 4)
    assert (library.calls[f"{PREFILL}.run"], library.calls[f"{DECODE}.run"]) == (1, 0)
    layout = layout_of([Span(sequence=s, start=4, rows=1) for s in range(2)], table)
    step(backend, cache, shape, layout, torch.randn(2, qkv_width(shape)).half())
    assert (library.calls[f"{PREFILL}.run"], library.calls[f"{DECODE}.run"]) == (1, 1)
    assert library.wrappers[1].options["use_tensor_cores"] is tensor_cores


def test_two_lanes_share_weights_but_no_workspace() -> None:
    backend, library, _ = fake()
    other = backend.concurrent_instance()
    shape = attention_shape(1, 1, 64)
    for each in (backend, other):
        grown(each, shape, 2)
    ours, theirs = library.wrappers
    assert ours.workspace.data_ptr() != theirs.workspace.data_ptr()
    packed = backend.pack(torch.randn(3, 8).half())
    x = torch.randn(2, 8).half()
    results = [each.linear(x, packed, torch.empty(2, 3, dtype=torch.float16)) for each in (backend, other)]
    assert torch.equal(*results)


def test_wrappers_of_one_lane_share_its_workspace() -> None:
    backend, library, _ = fake()
    for group in (1, 2):
        grown(backend, attention_shape(group, 1, 64), 2)
    first, second = library.wrappers
    assert first.workspace.data_ptr() == second.workspace.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("residual", ["none", "another", "out"])
@pytest.mark.parametrize("wide", [False, True])
def test_linear_adds_bias_and_residual(dtype: torch.dtype, has_bias: bool, residual: str, wide: bool) -> None:
    backend, _, _ = fake()
    out_dtype = torch.float32 if wide else dtype
    weight, x = torch.randn(7, 16).to(dtype), torch.randn(5, 16).to(dtype)
    bias = torch.randn(7).to(dtype) if has_bias else None
    out = torch.randn(5, 7).to(out_dtype)
    before = {"none": None, "another": torch.randn(5, 7).to(out_dtype), "out": out}[residual]
    wanted = x.double() @ weight.double().t()
    for addend in (bias, before):
        wanted = wanted if addend is None else wanted + addend.double()
    packed = backend.pack(weight, bias)
    weight.zero_()
    found = backend.linear(x, packed, out, residual=before)
    assert found is out
    near = 1e-5 if wide else 4 * NEAR[dtype]
    assert_close(found.double(), wanted, rtol=near, atol=near)


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_operations_give_what_the_reference_gives(dtype: torch.dtype) -> None:
    backend, _, _ = fake()
    x, gate_up, weight = torch.randn(4, 24).to(dtype), torch.randn(4, 40).to(dtype), torch.randn(24)
    out, wide = torch.empty(4, 24, dtype=dtype), torch.empty(4, 24)
    for residual in (None, x):
        added = None if residual is None else residual.float()
        wanted = REFERENCE.rms_norm(x.float(), weight, 1e-3, wide, residual=added)
        check(backend.rms_norm(x, weight, 1e-3, out, residual=residual), wanted)
    for activation in (Activation.SILU, Activation.GELU_TANH):
        found = backend.gate(gate_up, torch.empty(4, 20, dtype=dtype), activation)
        check(found, REFERENCE.gate(gate_up.float(), torch.empty(4, 20), activation))
    packed: PackedLinear = backend.pack(x)
    rows = backend.embed(torch.tensor([3, 0, 3]), packed, torch.empty(3, 24, dtype=dtype))
    assert torch.equal(rows, x[[3, 0, 3]])


@pytest.mark.parametrize("kv_dtype", [*DTYPES, FP8])
def test_a_cache_starts_at_zero_and_has_the_bytes_that_were_asked_for(kv_dtype: torch.dtype) -> None:
    backend, _, _ = fake()
    size = replace(kv_shape(attention_shape(1, 2, 64), 3, kv_dtype), heads=((2, 64), (1, 128), (3, 64)))
    cache = backend.allocate_kv(size)
    assert not cache.data.any()
    assert cache.data.nbytes == size.total_bytes
    for number, ((keys, values), heads) in enumerate(zip(cache.layers, size.heads, strict=True)):
        assert keys.dtype is values.dtype is kv_dtype
        assert keys.shape == values.shape == (3, size.block_size, *heads)
        assert keys.stride() == values.stride()
        assert keys.is_contiguous()
        for each in (keys, values):
            each.view(torch.uint8).fill_(number + 1)
    counts = torch.bincount(cache.data.int(), minlength=4).tolist()
    assert counts == [0, *(3 * each for each in size.layer_block_bytes)], "layers share no bytes, and leave none"


def test_cores_are_refused() -> None:
    backend, _, _ = fake()
    backend.use(None)
    with pytest.raises(ConfigError, match=r"cannot use cores \(0, 1\)"):
        backend.use((0, 1))


@pytest.mark.parametrize("head_dim", [32, 96])
def test_a_head_size_without_kernels_is_refused(head_dim: int) -> None:
    with pytest.raises(ConfigError, match=f"heads of 64, 128, 256, 512, not {head_dim}"):
        fake()[0].allocate_kv(kv_shape(attention_shape(1, 1, head_dim), 1, torch.bfloat16))


def test_a_type_without_kernels_is_refused() -> None:
    backend, _, _ = fake()
    with pytest.raises(ConfigError, match="bfloat16 and float16; the weight is float32"):
        backend.pack(torch.zeros(1, 1))
    for dtype, name in ((torch.float32, "float32"), (torch.float8_e5m2, "float8_e5m2")):
        with pytest.raises(ConfigError, match=f"float16 and float8_e4m3fn; the KV cache is {name}"):
            backend.allocate_kv(kv_shape(attention_shape(1, 1, 64), 1, dtype))


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it() -> None:
    def missing() -> object:
        raise ModuleNotFoundError("No module named 'tvm_ffi'", name="tvm_ffi")

    with pytest.raises(ConfigError, match=r"tvm_ffi is missing; install FASER with its extra cuda"):
        load_flashinfer(None, missing)


class NoPrefill:
    pass


class NoDecode:
    pass


def fake_package(version: str = VERSION) -> SimpleNamespace:
    """What is taken from FlashInfer's package."""
    return SimpleNamespace(
        __version__=version,
        BatchPrefillWithPagedKVCacheWrapper=NoPrefill,
        BatchDecodeWithPagedKVCacheWrapper=NoDecode,
        jit=SimpleNamespace(env=SimpleNamespace(FLASHINFER_AOT_DIR=Path("own"))),
    )


def test_wrappers_are_the_packages_own_but_for_their_planner() -> None:
    package = fake_package()
    library = load_flashinfer(None, lambda: package)
    for name, wrapper in ((PREFILL, NoPrefill), (DECODE, NoDecode)):
        made = getattr(library, name)()
        assert isinstance(made, wrapper)
        assert type(made) is not wrapper


def test_a_version_whose_plans_may_be_others_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"0\.8\.0 is installed, and FASER plans attention as 0\.7\.4 does"):
        load_flashinfer(None, lambda: fake_package("0.8.0"))


def test_the_package_looks_first_for_modules_compiled_ahead_of_time(tmp_path: Path) -> None:
    package = fake_package()
    load_flashinfer(None, lambda: package)
    assert Path("own") == package.jit.env.FLASHINFER_AOT_DIR
    load_flashinfer(tmp_path, lambda: package)
    assert tmp_path == package.jit.env.FLASHINFER_AOT_DIR


@pytest.mark.parametrize("name", SIGNATURES)
def test_a_call_with_a_strange_keyword_or_without_an_argument_fails(name: str) -> None:
    """What the emulation relies on."""
    parameters = signature(name).parameters.values()
    needed = {
        each.name: None for each in parameters if each.default is each.empty and each.kind != each.VAR_POSITIONAL
    }
    signature(name).bind(**needed)
    with pytest.raises(TypeError, match="colour"):
        signature(name).bind(**needed, colour=1)
    for without in needed:
        with pytest.raises(TypeError, match=without):
            signature(name).bind(**{key: value for key, value in needed.items() if key != without})


@pytest.mark.slow
@pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer is not installed")
def test_the_installed_package_accepts_what_the_table_says(tmp_path: Path) -> None:
    """In a process of its own: importing the package takes seconds and makes a folder for its cache."""
    program = (
        "import json, flashinfer\n"
        "from tests.kernels.cuda.flashinfer.signatures import describe\n"
        "print(json.dumps([flashinfer.__version__, describe(flashinfer)]))"
    )
    environment = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path), "PYTHONPATH": ":".join([str(ROOT), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    version, found = json.loads(done.stdout.splitlines()[-1])
    assert version == VERSION
    assert found == SIGNATURES
