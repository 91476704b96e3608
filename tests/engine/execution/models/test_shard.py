"""Ranks that each compute a part of a model give what the whole model gives. Oracle: the whole, in float64.

Planted bugs that these tests have caught: a residual that every rank adds; a bias of o or down on every rank; a
part of the head one token off; heads shared out without their queries.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from faser.engine.checkpoints.families.architecture import AttentionSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.models.shard import Shard, local_shapes
from faser.errors import ConfigError
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.torch_backend import TorchBackend
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.gguf.gguf_files import write_gguf
from tests.engine.checkpoints.test_families import CASES, Case
from tests.engine.execution.models.paged import MAX_POSITIONS, PagedModel, load, prompt
from tests.kernels.cuda.fake_graph import fake_backend


class ThreadRanks:
    """Collectives of ranks that are threads of this process; sums are in the order of the ranks."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor] = [torch.empty(0)] * size

    def of(self, rank: int) -> "_OneRank":
        return _OneRank(self, rank)

    def exchange(self, rank: int, given: Tensor) -> list[Tensor]:
        self._given[rank] = given.clone()
        self._barrier.wait(30)
        found = [*self._given]
        self._barrier.wait(30)
        return found


class _OneRank:
    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._ranks.exchange(self._rank, x)
        for each in others:
            first = first + each
        return x.copy_(first)

    def gather(self, part: Tensor) -> list[Tensor] | None:
        found = self._ranks.exchange(self._rank, part)
        return None if self._rank else found

    def broadcast(self, x: Tensor) -> None:
        x.copy_(self._ranks.exchange(self._rank, x)[0])


def on_ranks(
    directory: Path,
    size: int,
    work: Callable[[PagedModel], Tensor],
    *,
    dtype: torch.dtype = torch.float64,
    backend: Callable[[], Backend] = TorchBackend,
    quantization: str | None = None,
) -> list[Tensor]:
    """What work returns on each rank."""
    ranks = ThreadRanks(size)

    def run(rank: int) -> Tensor:
        own = backend()
        decoder = load_decoder(
            directory,
            own,
            dtype,
            max_model_len=MAX_POSITIONS,
            max_rows=MAX_POSITIONS,
            quantization=quantization,
            progress=lambda *_: None,
            shard=Shard(rank=rank, size=size),
            ranks=ranks.of(rank),
        )
        return work(PagedModel(decoder, own, block_size=16))

    with ThreadPoolExecutor(size) as threads:
        return [each.result() for each in [threads.submit(run, rank) for rank in range(size)]]


def some_logits(model: PagedModel) -> Tensor:
    """Of a prompt in uneven chunks, some of them single rows."""
    return model.prefill(prompt(40, model.decoder.spec.vocab_size), (7, 13, 1, 1, 1))


DIVIDED = [
    each
    for each in CASES
    if "linear_num_key_heads" not in each.fields and not each.model_type.startswith(("gemma4", "lfm2"))
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", DIVIDED, ids=lambda case: case.name)
@pytest.mark.full(but=[f"{case.name}-{2 + at % 2 * 2}" for at, case in enumerate(DIVIDED)])
def test_ranks_give_the_logits_of_the_whole(case: Case, size: int, tmp_path: Path) -> None:
    write_family_model(tmp_path, case.model_type, case.fields)
    spec = read_model_config(tmp_path).spec
    attention = spec.attention
    if attention.wide_qk_norm or size not in (2, attention.num_heads):
        with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}"):
            local_shapes(spec, Shard(rank=0, size=size))
        return
    wanted = some_logits(load(tmp_path, dtype=torch.float64))
    first, *others = on_ranks(tmp_path, size, some_logits)
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-5)
    assert len(others) == size - 1


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "int8", "int4"])
def test_low_bit_products_are_divided_between_blocks(kind: str, tmp_path: Path, kernel_cache: Path) -> None:
    """Inputs of a span have one scale in 8 bits, and here a rank has a part of the only span.

    So what it computes is as near to the weights' floats as the whole is.
    """

    def native() -> Backend:
        return NativeBackend(library_path(cache_dir=kernel_cache), num_threads=1)

    if kind.startswith("Q"):
        path, quantization = tmp_path / "model.gguf", "gguf"
        write_gguf(path, quantization=GGMLQuantizationType[kind], untied=True)
    else:
        path, quantization = tmp_path, kind
        write_family_model(path, "llama", {"intermediate_size": 160})
    whole = some_logits(load(path, backend=native(), quantization=quantization))
    exact = some_logits(load(path, quantization="none"))
    first, *_ = on_ranks(path, 2, some_logits, dtype=torch.float32, backend=native, quantization=quantization)
    assert (first - exact).norm() < 1.3 * (whole - exact).norm() < exact.norm()


@pytest.mark.parametrize("kind", ["int4", "mixture"])
def test_ranks_on_gpus_multiply_codes_and_experts_of_their_parts(kind: str, tmp_path: Path) -> None:
    """On emulated devices, in bfloat16: as near to the float64 logits of the same weights as one device is."""
    fields: dict[str, Any] = {
        "head_dim": 64,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if kind == "mixture":
        fields |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    write_family_model(tmp_path, "qwen3" if kind == "int4" else "qwen3_moe", fields | {"intermediate_size": 256})
    quantization = "int4" if kind == "int4" else None
    whole = some_logits(load(tmp_path, dtype=torch.bfloat16, backend=fake_backend(), quantization=quantization))
    exact = some_logits(load(tmp_path, dtype=torch.float64, quantization="none"))
    first, *_ = on_ranks(
        tmp_path, 2, some_logits, dtype=torch.bfloat16, backend=fake_backend, quantization=quantization
    )
    assert (first - exact).norm() < 1.3 * (whole - exact).norm() < 0.5 * exact.norm()


def attention(num_heads: int, num_kv_heads: int) -> AttentionSpec:
    return AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=16, rope=None)


@pytest.mark.parametrize(
    "heads, size, expected",
    [
        ((9, 3), 2, [((0, 6), (0, 2)), ((6, 9), (2, 3))]),
        ((9, 3), 3, [((0, 3), (0, 1)), ((3, 6), (1, 2)), ((6, 9), (2, 3))]),
        ((8, 2), 4, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 6), (1, 2)), ((6, 8), (1, 2))]),
    ],
)
def test_heads_go_to_ranks_with_their_queries(
    heads: tuple[int, int], size: int, expected: list[tuple[tuple[int, int], tuple[int, int]]]
) -> None:
    found = [Shard(rank=rank, size=size).heads(attention(*heads)) for rank in range(size)]
    assert [tuple((each.first, each.last) for each in spans) for spans in found] == expected


@pytest.mark.parametrize("heads, size", [((9, 3), 4), ((9, 3), 6), ((4, 2), 8)])
def test_heads_that_cannot_be_shared_out_are_refused_with_what_can(heads: tuple[int, int], size: int) -> None:
    with pytest.raises(
        ConfigError, match=f"tensor_parallel_size is {size}; the model has {heads[0]} heads on {heads[1]}"
    ):
        Shard(rank=0, size=size).heads(attention(*heads))


@pytest.mark.parametrize(
    "channels, size, expected",
    [(8960, 2, [4608, 4352]), (1536, 2, [768, 768]), (96, 2, [64, 32]), (96, 4, [32, 32, 16, 16])],
)
def test_channels_go_in_pieces_that_cut_no_block(channels: int, size: int, expected: list[int]) -> None:
    spans = [Shard(rank=rank, size=size).channels(channels) for rank in range(size)]
    assert [each.size for each in spans] == expected
    assert [each.first for each in spans[1:]] == [each.last for each in spans[:-1]]
    assert (spans[0].first, spans[-1].last) == (0, channels)


def test_every_token_is_in_the_head_of_a_rank() -> None:
    spans = [Shard(rank=rank, size=3).tokens(100) for rank in range(3)]
    assert [(each.first, each.last) for each in spans] == [(0, 34), (34, 68), (66, 100)]
