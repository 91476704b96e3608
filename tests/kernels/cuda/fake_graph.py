"""A flashinfer backend without a GPU, CUDA graphs included.

`fake_backend()` is a FlashInferBackend whose surroundings are emulated on the CPU, in bfloat16 or float16, for
heads
of 64 or 128 channels: the device with its graphs (fake_device), FlashInfer (fake_flashinfer), and here FASER's own
kernels, in torch operators. Tokens are sampled by the engine's reference. `backend.graph_capture` captures and
replays; `backend.concurrent_instance()` gives a backend for another lane of the same device.

    backend = fake_backend()
    size = GraphBatchSize(rows=4, sequences=4, one_row_each=True)
    plan = backend.graph_capture.plan(size, block_size=16, max_blocks=64)
    graph = backend.graph_capture.capture(lambda: decoder.run_layers(hidden, 0, depth, cache, plan))
    backend.graph_capture.update_plan(plan, batch.layout)
    graph.replay()
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from itertools import product as product_of

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.engine.execution.sampling.parameters import Purpose, noise_words
from faser.kernels.cuda.flashinfer.backend import FlashInferBackend
from faser.kernels.cuda.flashinfer.device_kernels import DeviceKernels, ExpertMatrices, LowBitKernels, RunExperts
from faser.kernels.cuda.flashinfer.paged_layout import NO_SLOT, PagedLayout
from faser.kernels.cuda.low_bit import CudaLowBit, LowBitMatrix
from faser.kernels.interface.blocks import Experts
from faser.kernels.interface.delta_net import DeltaNet
from faser.kernels.interface.drafting import FollowedRows, StepMatch
from faser.kernels.interface.experts import routed
from faser.kernels.interface.fp8 import FP8
from faser.kernels.interface.kv_cache import as_bytes, stored
from faser.kernels.interface.mixers import LayerStates, StateStep
from faser.kernels.interface.sampling import DeviceSamplingMetadata, SamplingMetadata
from faser.kernels.interface.shapes import AttentionShape
from faser.kernels.torch_backend import TorchBackend
from faser.types.arrays import NO_TOKEN, Ints, Words
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.flashinfer.fake_flashinfer import FakeFlashInfer


def fake_backend(accelerator: FakeAccelerator | None = None) -> FlashInferBackend:
    """A backend on an emulated device; None: a new one."""
    device = accelerator or FakeAccelerator()
    return FlashInferBackend(device, FakeFlashInfer(device), fake_kernels(device))


def fake_kernels(accelerator: FakeAccelerator) -> DeviceKernels:
    return DeviceKernels(
        rms_norm=partial(_fake_rms_norm, accelerator),
        gate=partial(_fake_gate, accelerator),
        rope_append=FakeRopeAppend(accelerator),
        scale_by_sinks=lambda *tensors: accelerator.launch(partial(_scale_by_sinks, *tensors)),
        match=lambda step: accelerator.launch(partial(_match, step)),
        advance=lambda *given: accelerator.launch(partial(_advance, *given)),
        sampling_kernels=lambda _: TorchSamplingKernels(),
        device_sampling_kernels=lambda max_rows, width: FakeDeviceSamplingKernels(accelerator, max_rows, width),
        experts=partial(_fake_experts, accelerator),
        delta_net=lambda *arguments: accelerator.launch(partial(_delta_net, *arguments)),
        low_bit=fake_low_bit(accelerator),
    )


def fake_low_bit(accelerator: FakeAccelerator) -> LowBitKernels:
    """Emulate the kernels of triton/low_bit.py; weights in 16 bits are rounded as those on tensor cores are."""

    def rows(
        x: Tensor, weight: LowBitMatrix, out: Tensor, *, bias: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        def work() -> None:
            total = x.float() @ weight.dequantised().to(x.dtype).float().T
            for added in (bias, residual):
                total += 0.0 if added is None else added.float()
            out.copy_(total)

        accelerator.launch(work)
        return out

    def copied(out: Tensor, found: Callable[[], Tensor]) -> None:
        def work() -> None:
            out.copy_(found())

        accelerator.launch(work)

    def dequantise(weight: LowBitMatrix, first: int, out: Tensor) -> Tensor:
        copied(out, lambda: weight.dequantised()[first : first + len(out)])
        return out

    def lines(weight: LowBitMatrix, numbers: Tensor, out: Tensor) -> Tensor:
        copied(out, lambda: weight.dequantised()[numbers])
        return out

    return LowBitKernels(few_rows=rows, rows=rows, dequantise=dequantise, lines=lines)


def _fake_experts(
    accelerator: FakeAccelerator, block: Experts, gate_up: ExpertMatrices, down: ExpertMatrices
) -> RunExperts:
    plain = {id(each): _plain_weights(each) for each in (gate_up, down)}

    def product(x: Tensor, matrices: ExpertMatrices, expert: int) -> Tensor:
        found = x.float() @ plain[id(matrices)][expert].to(x.dtype).float().T
        return found if matrices.biases is None else found + matrices.biases[expert]

    def run(
        x: Tensor,
        logits: Tensor,
        hidden: Tensor,
        read: Tensor,
        shared: tuple[Tensor, Tensor] | None,
        slots: Tensor | None,
    ) -> None:
        reference, inner, total = TorchBackend(), plain[id(down)][0].shape[1], torch.zeros(x.shape)
        chosen, weights = routed(logits, block)
        rows = torch.arange(len(x)) if slots is None else (slots >= 0).nonzero()[:, 0]
        for row, place in product_of(rows.tolist(), range(block.top_k)):
            expert = chosen[row].tolist()[place]
            gated = x.new_empty((1, inner))
            reference.gate(product(x[row : row + 1], gate_up, expert).to(x.dtype), gated, block.activation)
            total[row] += weights[row, place] * product(gated, down, expert)[0]
        if shared is not None:
            total += shared[0] * shared[1].sigmoid()[:, None]
        hidden.copy_(hidden + total)
        read += len(set(chosen[rows].flatten().tolist()))

    return lambda *tensors: accelerator.launch(partial(run, *tensors))


def _plain_weights(matrices: ExpertMatrices) -> tuple[Tensor, ...]:
    return matrices.weights or tuple(map(dequantised, matrices.low_bit or ()))


def dequantised(product: CudaLowBit) -> Tensor:
    """Return the weights [N, K] float32, columns in the order of the inputs."""
    columns = torch.cat([each.dequantised() for each in product.parts])
    return columns if product.order is None else columns[:, torch.argsort(product.order)]


def _delta_net(qkv: Tensor, rates: Tensor, net: DeltaNet, held: LayerStates, numbers: Tensor, out: Tensor) -> None:
    """The reference's, of the sequences that have rows."""
    slots, ends, starts, counts, new_ends, first_rows = numbers[:, numbers[3] > 0].numpy()
    drafts = starts + counts - new_ends  # as many as leave new_ends what it is
    step = StateStep(
        states=held, slots=slots, ends=ends, starts=starts, counts=counts, num_drafts=drafts, first_rows=first_rows
    )
    net.mix(qkv, rates, held, step, out)


def _match(step: StepMatch) -> None:
    sampled, fed = step.sampled.tolist(), step.fed.tolist()
    drafted = [max(fed[-2 - each], 0) if each < -1 else each for each in step.drafted.tolist()]
    bounds, decided = step.first.tolist(), step.decided.tolist()
    for at, (begin, end) in enumerate(pairwise(bounds)):
        row = begin
        while row < end - 1 and (sampled[row] == drafted[row] if decided[row] < 0 else decided[row] == 1):
            row += 1
        step.counts[at] = row + 1 - begin
        before = drafted[row - 1] if row > begin else int(step.known[at])
        step.last[at] = torch.tensor([before, max(sampled[row], 0)])


def _advance(rows: FollowedRows, step: StepMatch | None, layout: PagedLayout, block_size: int) -> None:
    width, count = len(rows.lengths), int(rows.numbers[0])
    for draft in range(count):
        if step is not None:
            at = int(rows.numbers[1 + width + draft])
            known = int(rows.numbers[1 + draft]) + int(step.counts[at])
            rows.fed[2 * draft : 2 * draft + 2] = step.last[at]
            _place(layout, 2 * draft, known - 1, block_size)
            _place(layout, 2 * draft + 1, known, block_size)
        else:
            known = int(rows.lengths[draft]) + 1
            _place(layout, draft, known, block_size)
        rows.lengths[draft] = known
        rows.positions[draft] = known + rows.numbers[1 + 2 * width + draft]


def _place(layout: PagedLayout, row: int, length: int, block_size: int) -> None:
    begin, end = layout.page_indptr[row : row + 2].tolist()
    fits, length = length <= (end - begin) * block_size, min(length, (end - begin) * block_size)
    page, offset = divmod(length - 1, block_size)
    layout.seq_len[row], layout.positions[row] = length, length - 1
    layout.last_page_len[row] = length - (end - begin - 1) * block_size
    layout.slots[row] = int(layout.page_indices[begin + page]) * block_size + offset if fits else NO_SLOT


def _scale_by_sinks(mixed: Tensor, log2_sums: Tensor, sinks: Tensor) -> None:
    assert sinks.dtype is torch.float32, sinks.dtype
    sums = torch.exp2(log2_sums.double())
    mixed *= (sums / (sums + sinks.double().exp()))[..., None]


def _fake_rms_norm(
    accelerator: FakeAccelerator,
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    residual: Tensor | None = None,
) -> Tensor:
    assert x.dtype is out.dtype, (x.dtype, out.dtype)
    assert weight.dtype is torch.float32, weight.dtype
    assert x.ndim == 2, x.shape
    assert x.shape == out.shape, (x.shape, out.shape)
    accelerator.launch(partial(_rms_norm, x, weight, eps, out, residual))
    return out


def _rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor, residual: Tensor | None = None) -> None:
    wide = x.float()
    normed = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight
    out.copy_(normed if residual is None else normed + residual)


def _fake_gate(accelerator: FakeAccelerator, gate_up: Tensor, out: Tensor, activation: str) -> Tensor:
    assert gate_up.dtype is out.dtype, (gate_up.dtype, out.dtype)
    assert gate_up.shape == (len(out), 2 * out.shape[1]), (gate_up.shape, out.shape)
    accelerator.launch(partial(_gate, gate_up, out, activation))
    return out


def _gate(gate_up: Tensor, out: Tensor, activation: str) -> None:
    gate, up = gate_up.float().chunk(2, dim=-1)
    activate = functional.silu if activation == "silu" else partial(functional.gelu, approximate="tanh")
    out.copy_(activate(gate) * up)


class FakeRopeAppend:
    """See DeviceKernels.rope_append. calls: number of calls."""

    def __init__(self, accelerator: FakeAccelerator) -> None:
        self._accelerator = accelerator
        self.calls = 0

    def __call__(
        self,
        qkv: Tensor,
        angles: Tensor | None,
        positions: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        shape: AttentionShape,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        query_angles: Tensor | None,
        v_norm: Tensor | None,
    ) -> Tensor:
        self.calls += 1
        rows, num_kv_heads = len(qkv), 0 if shape.reads_other else shape.num_kv_heads
        assert qkv.shape == (rows, shape.qkv_size), qkv.shape
        assert qkv.stride(1) == 1
        for each in (positions, slots):
            assert each.dtype is torch.int64, each.dtype
            assert each.shape == (rows,), (each.shape, rows)
            assert each.is_contiguous()
        for each in (keys, values):
            assert each.dtype in (qkv.dtype, FP8), (each.dtype, qkv.dtype)
            assert each.shape[2:] == (num_kv_heads, shape.head_dim), each.shape
            assert each.is_contiguous()
        norms = (q_norm, k_norm, v_norm)
        self._accelerator.launch(
            partial(_rope_append, qkv, angles, positions, slots, keys, values, shape, norms, eps, query_angles)
        )
        return qkv[:, : shape.num_heads * shape.head_dim]


def _rope_append(
    qkv: Tensor,
    angles: Tensor | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    shape: AttentionShape,
    norms: tuple[Tensor | None, ...],
    eps: float,
    query_angles: Tensor | None,
) -> None:
    parts = qkv.view(len(qkv), -1, shape.head_dim)
    queries, others = parts[:, : shape.num_heads], parts[:, shape.num_heads :]
    new_keys, new_values = others.chunk(2, dim=1)
    for heads, weight in zip((queries, new_keys, new_values), norms, strict=True):
        if weight is not None:
            _normalise(heads, weight, eps)
    if angles is not None:
        _rotate(queries, (angles if query_angles is None else query_angles)[positions])
        _rotate(new_keys, angles[positions])
    rows = (slots >= 0).nonzero()[:, 0]
    places = slots[rows]
    assert len(set(places.tolist())) == len(places), "two rows are stored in one place"
    for cache, heads in ((keys, new_keys), (values, new_values)):
        as_bytes(cache).flatten(0, 1)[places] = as_bytes(stored(heads[rows], cache.dtype))


def _normalise(heads: Tensor, weight: Tensor, eps: float) -> None:
    wide = heads.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    heads.copy_((wide * factor).to(heads.dtype) * weight)


def _rotate(heads: Tensor, angles: Tensor) -> None:
    """heads: [R, H, D], in place; angles: [R, D]."""
    cos, sin = angles[:, None].chunk(2, dim=-1)
    first, second = heads.float().chunk(2, dim=-1)
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), -1))


class FakeDeviceSamplingKernels:
    """See DeviceSamplingKernels: the tokens of the engine's reference."""

    def __init__(self, accelerator: FakeAccelerator, max_rows: int, width: int) -> None:
        self._accelerator = accelerator
        self._shape = (max_rows, width)
        self._choice = TorchSamplingKernels()

    def take(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        chosen: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        self._check(logits, rows, chosen)

        def kernel() -> None:
            token_ids = self._choice.best(logits)
            at, shaping, noise = _asked(rows, token_ids, top_k=top_k, top_p=top_p, random=random)
            if len(at):
                token_ids[at] = self._choice.draw(logits, at, token_ids[at], shaping, noise)
            chosen.copy_(torch.from_numpy(token_ids))

        self._accelerator.launch(kernel)

    def draft(
        self,
        logits: Tensor,
        rows: DeviceSamplingMetadata,
        chosen: Tensor,
        margins: Tensor,
        *,
        top_k: bool,
        top_p: bool,
        random: bool = True,
    ) -> None:
        self._check(logits, rows, chosen)
        assert margins.shape == chosen.shape, margins.shape
        assert margins.dtype is torch.float32, margins.dtype

        def kernel() -> None:
            token_ids, differences = self._choice.best_and_margin(logits)
            at, shaping, noise = _asked(rows, token_ids, top_k=top_k, top_p=top_p, random=random)
            if len(at):
                token_ids[at], differences[at] = self._choice.predict(logits, at, token_ids[at], shaping, noise)
            chosen.copy_(torch.from_numpy(token_ids))
            margins.copy_(torch.from_numpy(differences))

        self._accelerator.launch(kernel)

    def _check(self, logits: Tensor, rows: DeviceSamplingMetadata, chosen: Tensor) -> None:
        count, width = logits.shape
        assert count <= self._shape[0], (count, self._shape)
        assert width == self._shape[1], (width, self._shape)
        assert logits.dtype is torch.float32, logits.dtype
        assert chosen.dtype is torch.int64, chosen.dtype
        numbers = (rows.temperature, rows.log_min_p, rows.top_k, rows.top_p, rows.seeds, rows.positions)
        for each in (chosen, *numbers):
            assert each.shape == (count,), each.shape
            assert each.is_contiguous()


def _asked(
    rows: DeviceSamplingMetadata, token_ids: Ints, *, top_k: bool, top_p: bool, random: bool
) -> tuple[Ints, SamplingMetadata, Words]:
    """Rows that draw, what is done to them, and their random words."""
    temperature = rows.temperature.numpy()
    at = np.flatnonzero((temperature > 0) & (token_ids != NO_TOKEN)) if random else np.zeros(0, dtype=np.int64)
    count = len(at)
    metadata = SamplingMetadata(
        temperature=temperature[at],
        min_p=np.exp(rows.log_min_p.numpy()[at].astype(np.float64)),
        top_k=rows.top_k.numpy()[at] if top_k else np.zeros(count, dtype=np.int64),
        top_p=rows.top_p.numpy()[at] if top_p else np.ones(count),
        seeds=rows.seeds.numpy().view(np.uint64)[at],
        positions=rows.positions.numpy()[at],
    )
    return at, metadata, noise_words(metadata.seeds, metadata.positions, Purpose.TOKEN)
