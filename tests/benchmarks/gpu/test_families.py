"""Shapes of mixtures and of Gemma, what their steps read, and how rows that are far off are judged."""

from pathlib import Path

import pytest
import torch

from benchmarks.gpu.checks.families import far_rows
from benchmarks.gpu.decoding.environment import expect_modules, needed_modules
from benchmarks.gpu.families import (
    GEMMA2_2B,
    GEMMA3_1B,
    GPT_OSS_20B,
    QWEN3_30B_A3B,
    cut_to_fit,
    expert_values,
    mixture_step_bytes,
    mixture_step_flops,
    num_experts,
)
from benchmarks.gpu.models import Config, MadeUp, has_room, step_bytes, step_flops
from benchmarks.gpu.plan import ON_CPU, ON_DEVICE
from faser.engine.checkpoints.families import decoder_spec
from faser.engine.execution.models import tensors
from faser.errors import ConfigError
from faser.kernels.cuda.flashinfer.build import MODULES


@pytest.mark.parametrize(
    ("config", "billions"),
    [(QWEN3_30B_A3B, 30.53), (GPT_OSS_20B, 20.91), (GEMMA3_1B, 1.0), (GEMMA2_2B, 2.61)],
)
def test_models_have_the_published_numbers_of_parameters(config: Config, billions: float) -> None:
    """Model cards."""
    assert tensors.num_parameters(decoder_spec(config)) / 1e9 == pytest.approx(billions, abs=0.01)


def test_a_step_that_reads_all_experts_reads_all_weights() -> None:
    """Oracle: the bytes of a dense step. Planted: the embedding counted, keys without values."""
    spec = decoder_spec(QWEN3_30B_A3B)
    found = mixture_step_bytes(spec, experts=num_experts(spec), sequences=3, context=100)
    assert found == step_bytes(spec, kv_tokens=300)
    fewer = mixture_step_bytes(spec, experts=num_experts(spec) - 1, sequences=3, context=100)
    assert found - fewer == 2 * 3 * 2048 * 768


def test_layers_with_windows_read_what_these_leave() -> None:
    """Planted: all of the context in every layer; the window in a layer without one."""
    spec = decoder_spec(GPT_OSS_20B)

    def cached(context: int) -> float:
        one, none = (mixture_step_bytes(spec, experts=7, sequences=n, context=context) for n in (1, 0))
        return (one - none) / (2 * 2 * 8 * 64)

    assert cached(100) == 24 * 100
    assert cached(1024) == 12 * 1024 + 12 * 128


def test_a_row_multiplies_with_its_own_experts() -> None:
    """Oracle: the products of a dense step, less those of the experts that a row does not pass."""
    spec = decoder_spec(QWEN3_30B_A3B)
    unused = 48 * (128 - 8) * expert_values(spec)
    assert mixture_step_flops(spec, rows=5) == step_flops(spec, rows=5) - 10 * unused


def test_a_model_is_cut_to_what_a_device_has_room_for() -> None:
    for memory_bytes, layers in ((80 << 30, 48), (150 << 30, 48), (40 << 30, 20)):
        cut = cut_to_fit(QWEN3_30B_A3B, memory_bytes, sequences=128, context=1024)
        found = int(cut["num_hidden_layers"])
        assert found <= layers
        assert has_room(memory_bytes, [cut], sequences=128, context=1024)
        more = cut | {"num_hidden_layers": found + 1}
        assert found == 48 or not has_room(memory_bytes, [more], sequences=128, context=1024)
    assert cut_to_fit(GPT_OSS_20B, None, sequences=1, context=1) is GPT_OSS_20B
    with pytest.raises(ValueError, match="no room for a layer of gpt_oss"):
        cut_to_fit(GPT_OSS_20B, 1 << 30, sequences=1, context=16)


def test_made_up_biases_and_sinks_are_no_ones() -> None:
    """Ones would hide a bias of another expert, and a bias that is missing in every row alike."""
    source = MadeUp(decoder_spec(ON_CPU.mixtures[1]), "cpu", bias_std=0.5)
    stds = {name: float(source.get(name).float().std()) for name in source.names() if source.get(name).dim() == 1}
    assert all((std > 0.05) == name.endswith(("bias", tensors.SINKS)) for name, std in stds.items())
    assert any(name.endswith(tensors.SINKS) for name in stds)


def test_modules_that_a_device_needs_are_those_of_all_shapes() -> None:
    found = {each.name for each in needed_modules(ON_DEVICE)}
    assert {"prefill_64", "prefill_64_window", "prefill_128", "prefill_256", "prefill_256_window"} <= found
    assert found & {name + "_fp8" for name in MODULES} == {"prefill_128_fp8"}


def test_a_module_that_a_load_lacks_is_named(tmp_path: Path) -> None:
    """Planted: an error of FlashInfer's, which names none."""
    for each in needed_modules(ON_DEVICE):
        if each.name != "prefill_64_window":
            (tmp_path / each.own_name).mkdir()
            (tmp_path / each.own_name / f"{each.own_name}.so").touch()
    with pytest.raises(ConfigError, match=r"lacks prefill_64_window; compile .* --only prefill_64_window$"):
        expect_modules(tmp_path)


def test_a_few_rows_of_other_experts_are_no_fault_and_many_are() -> None:
    """Planted: means in place of medians; rows that are no numbers left out."""
    usual = torch.full((100,), 1e-3)
    ours = usual.clone()
    ours[:3] = 0.3
    found = far_rows(ours, usual)
    assert (found["times_reference"], found["far"], found["reference_far"]) == (1.0, 0.03, 0.0)
    ours[:30] = torch.inf
    assert far_rows(ours, usual)["far"] == 0.3
    assert far_rows(2 * usual, usual)["times_reference"] == 2.0
