"""Estimates of a model on a GPU that is not there, held against what a load and a step really take.

Oracle: the bytes of packed weights and of buffers of loaded tiny models, and the memory that the sampler's tensors
take at once. Bugs these tests have been seen to catch: the head counted where it is tied, the copy of the logits
left out, keys without values.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from faser.config.engine import EngineConfig
from faser.config.speculation import SpeculationConfig
from faser.engine.checkpoints.files import read_model_config
from faser.engine.execution.models.decoder import Buffers
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.startup.estimate import GpuEstimate, estimate, sampler_bytes, weight_bytes
from faser.engine.execution.startup.warm_up import WarmUp
from faser.errors import ConfigError
from faser.kernels.cuda.low_bit import CudaLowBit
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.torch_backend import TorchBackend
from tests.checkpoints import write_tiny_checkpoint
from tests.engine.checkpoints.family_models import write_family_model
from tests.engine.checkpoints.fp8_checkpoints import FP8_DYNAMIC, stored_weights, tiny_weights, write_pair
from tests.engine.checkpoints.low_bit_checkpoints import Kind
from tests.engine.checkpoints.low_bit_checkpoints import write_pair as write_pair_in_4_bits
from tests.engine.execution.startup.test_warm_up import peak_of
from tests.kernels.cuda.fake_graph import fake_backend

GIB = 1 << 30
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma3_text": {"head_dim": 32, "tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "qwen3_5_text": {"head_dim": 16, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
}


def loaded_bytes(directory: Path, dtype: torch.dtype) -> int:
    decoder = load_decoder(
        directory, TorchBackend(), dtype, max_model_len=64, max_rows=8, progress=lambda _done, _total: None
    )
    return decoder.weight_bytes


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_are_those_that_a_load_packs(tmp_path: Path, family: str) -> None:
    write_family_model(tmp_path, family, FAMILIES[family])
    model, expected = read_model_config(tmp_path), loaded_bytes(tmp_path, torch.bfloat16)
    found = weight_bytes(EngineConfig(), model, torch.bfloat16)
    assert found == pytest.approx(expected, rel=0.03)  # norms and convolutions are kept in float32


def test_weights_in_eight_bits_take_one_byte_and_a_scale_a_row(tmp_path: Path) -> None:
    stored = stored_weights(tiny_weights(), by_channel=True)
    quantised, plain = write_pair(tmp_path, FP8_DYNAMIC, stored)
    model, config = read_model_config(quantised), EngineConfig()
    found = weight_bytes(config, model, torch.bfloat16)
    assert found == pytest.approx(loaded_bytes(quantised, torch.bfloat16), rel=0.01)
    as_floats = weight_bytes(config, read_model_config(plain), torch.bfloat16)
    assert found < 0.8 * as_floats  # the embedding stays in 16 bits
    rounded = EngineConfig(quantization="fp8", device="cuda", backend="torch")
    assert weight_bytes(rounded, read_model_config(plain), torch.bfloat16) == found


def test_codes_of_integers_stay_as_they_are_stored(tmp_path: Path) -> None:
    kind = Kind(layout="awq", group_size=128)
    quantised, _ = write_pair_in_4_bits(tmp_path, kind, hidden_size=128, intermediate_size=512)
    decoder = load_decoder(
        quantised, fake_backend(), torch.float16, max_model_len=64, max_rows=8, progress=lambda _done, _total: None
    )
    products = [each.attention_out for each in decoder._weights.layers]
    assert {type(each) for each in products} == {CudaLowBit}
    one = weight_bytes(EngineConfig(), read_model_config(quantised), torch.float16)
    none = weight_bytes(EngineConfig(quantization="none"), read_model_config(quantised), torch.float16)
    values = sum(each.parts[0].codes.numel() * 2 for each in products)
    held = sum(each.num_bytes for each in products)
    assert held / values == pytest.approx(4.4 / 8, rel=0.01)
    assert 0.25 < one / none < 0.5


@pytest.mark.parametrize("rows", [8, 32])
def test_the_sampler_takes_no_more_and_hardly_less(rows: int) -> None:
    logits = torch.zeros(rows, 16384)
    warm_up = WarmUp(TorchBackend(), logits, SpeculationConfig(), verifies=True, drafts=False)
    peak = peak_of(lambda: warm_up.run(rows))
    assert 0.8 * sampler_bytes(rows, 16384) <= peak <= sampler_bytes(rows, 16384)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), dtype=torch.bfloat16)


def estimated(directory: Path, total_bytes: int, **settings: Any) -> GpuEstimate:
    return estimate(EngineConfig(**settings), read_model_config(directory), total_bytes)


def test_parts_add_up_to_what_is_granted_and_rows_follow_from_the_gpu(tiny: Path) -> None:
    small, large = (estimated(tiny, size * GIB) for size in (24, 80))
    assert (small.step_rows, large.step_rows, large.max_num_seqs) == (2048, 8192, 256)
    for found in (small, large):
        parts = found.step_bytes + found.weights + found.states + found.left_bytes
        assert parts == found.granted_bytes == int(0.9 * found.total_bytes)
    spec = read_model_config(tiny).spec
    buffers = Buffers.allocate(spec, torch.bfloat16, torch.device("cpu"), max_rows=2048, max_logit_rows=1024)
    tensors = [each for each in map(buffers.__getattribute__, Buffers.__slots__) if isinstance(each, torch.Tensor)]
    angles = 4 * 2048 * 16
    assert small.buffers == sum(each.nbytes for each in tensors) + angles


def test_contexts_and_sequences_follow_from_what_is_left(tiny: Path) -> None:
    spec = read_model_config(tiny).spec
    block = KvShape(heads=spec.kv_heads, num_blocks=1, block_size=16, dtype=torch.bfloat16).block_bytes
    roomy = estimated(tiny, 80 * GIB)
    assert roomy.kv_token == block // 16
    assert (roomy.longest_context, roomy.sequences(2048), roomy.sequences(2049)) == (2048, 256, 0)
    taken = roomy.granted_bytes - roomy.left_bytes
    short = estimated(tiny, 64 * GIB, gpu_memory_utilization=(taken + 3000 * block // 16) / (64 * GIB) + 1e-12)
    assert short.longest_context == 2048
    assert (short.sequences(1000), short.sequences(2000)) == (3, 1)
    tight = estimated(tiny, 64 * GIB, gpu_memory_utilization=taken / (64 * GIB))
    assert tight.left_bytes <= 0
    assert (tight.longest_context, tight.sequences(1)) == (0, 0)
    eight_bits = estimated(tiny, 80 * GIB, kv_cache_dtype="fp8", device="cuda")
    assert eight_bits.kv_token == roomy.kv_token // 2


def test_a_context_that_the_model_does_not_have_is_refused(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="--max-model-len is 4096; this model has at most 2048 positions"):
        estimated(tiny, 24 * GIB, max_model_len=4096)


def test_states_of_sequences_and_snapshots_are_counted(tmp_path: Path) -> None:
    write_family_model(tmp_path, "qwen3_5_text", FAMILIES["qwen3_5_text"])
    few, many = (estimated(tmp_path, 80 * GIB, max_num_seqs=count) for count in (8, 64))
    assert 0 < few.states < many.states
    assert estimated(tmp_path, 80 * GIB, max_num_seqs=8, state_snapshot_memory=0).states < few.states
