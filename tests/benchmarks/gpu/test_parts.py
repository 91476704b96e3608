"""Parts of the bench programs for a GPU: made-up weights, floors, loops over steps, medians, distributions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gpu.checks.tokens import LEAST_P, exact_distribution, verified
from benchmarks.gpu.decoding.clocks import Clocks
from benchmarks.gpu.decoding.policies import arms_of, in_order, rows_of, synthetic
from benchmarks.gpu.decoding.vllm_arm import asked
from benchmarks.gpu.models import (
    LLAMA_1B,
    LLAMA_8B,
    LOGIT_STD,
    QWEN3_8B,
    QWEN3_600M,
    MadeUp,
    floor_s,
    has_room,
    own_head,
    step_bytes,
    write_shape,
)
from benchmarks.gpu.plan import ON_CPU, ON_DEVICE, Plan, fitting
from benchmarks.gpu.steps import ClosedLoop, HostClock, batch_of, greedy, made_up_prompts
from faser.engine.checkpoints.families.architecture import DecoderSpec
from faser.engine.checkpoints.files import read_model_config
from faser.engine.contract.plan import SequenceDelta
from faser.engine.execution.models import tensors
from faser.errors import EngineError
from faser.types.answer import FinishReason
from faser.types.request import Request


def spec_of(config: dict[str, object], directory: Path) -> DecoderSpec:
    return read_model_config(write_shape(directory, config)).spec


def test_models_have_the_published_numbers_of_parameters(tmp_path: Path) -> None:
    """Model cards: 8.03 and 1.24 billion."""
    large, small = spec_of(LLAMA_8B, tmp_path / "8b"), spec_of(LLAMA_1B, tmp_path / "1b")
    assert tensors.num_parameters(large) == 8_030_261_248
    assert tensors.num_parameters(small) == 1_235_814_400


def test_a_step_reads_the_weights_once_without_the_embedding_and_the_cache_of_all_sequences(
    tmp_path: Path,
) -> None:
    """Planted: the embedding counted, keys without values."""
    large, small = spec_of(LLAMA_8B, tmp_path / "8b"), spec_of(LLAMA_1B, tmp_path / "1b")
    assert step_bytes(large, kv_tokens=0) == 2 * (8_030_261_248 - 128256 * 4096)
    assert step_bytes(small, kv_tokens=0) == 2 * 1_235_814_400
    assert step_bytes(large, kv_tokens=3) - step_bytes(large, kv_tokens=0) == 3 * 131072
    products = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    assert step_bytes(large, kv_tokens=3) - step_bytes(large, kv_tokens=3, product_bytes=1) == products


def test_a_floor_is_the_longer_of_moving_and_computing(tmp_path: Path) -> None:
    spec = spec_of(LLAMA_8B, tmp_path)
    moving = floor_s(spec, rows=1, kv_tokens=1024, bytes_s=4.3e12, flops_s=780e12)
    assert moving == pytest.approx(3.52e-3, rel=0.01)
    computing = floor_s(spec, rows=320, kv_tokens=0, bytes_s=4.3e12, flops_s=780e12)
    assert computing == pytest.approx(320 * 0.0192e-3, rel=0.01)
    eight = floor_s(spec, rows=1, kv_tokens=1024, bytes_s=4.3e12, flops_s=780e12, product_bytes=1)
    assert eight == pytest.approx(1.90e-3, rel=0.01)
    computing = floor_s(spec, rows=320, kv_tokens=0, bytes_s=1e15, flops_s=780e12, product_bytes=1)
    assert computing == pytest.approx(160 * 0.0192e-3, rel=0.01)


def test_phases_count_the_head_that_the_draft_model_of_overlap_has_of_its_own() -> None:
    """Planted: the tied head of the model whose sizes it has, 0.3 GB less."""
    one = replace(ON_DEVICE, overlap_batches=(1,), policy_batches=(1,), overlap_drafts=(("0.6B", QWEN3_600M),))

    def fits(memory_bytes: int) -> bool:
        try:
            fitting(one, memory_bytes)
        except ValueError:
            return False
        return True

    low, high = 8 << 30, 80 << 30
    while high - low > 1 << 20:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    assert has_room(high, (QWEN3_8B, own_head(QWEN3_600M)), sequences=1, context=1024)
    assert not has_room(low, (QWEN3_8B, own_head(QWEN3_600M)), sequences=1, context=1024)


def test_made_up_weights_are_those_of_their_seed_and_place_alone(tmp_path: Path) -> None:
    spec = spec_of(ON_CPU.target, tmp_path)
    one, other = MadeUp(spec, "cpu", seed=1), MadeUp(spec, "cpu", seed=1)
    names = one.names()
    first = {name: one.get(name) for name in names}
    assert all(torch.equal(first[name], other.get(name)) for name in reversed(names))
    assert not torch.equal(first[tensors.HEAD], MadeUp(spec, "cpu", seed=2).get(tensors.HEAD))
    shapes = {name: tuple(each.shape) for name, each in first.items()}
    assert shapes == tensors.tensor_shapes(spec)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_made_up_weights_spread_as_said(tmp_path: Path, tied: bool) -> None:
    spec = spec_of(ON_CPU.target | {"tie_word_embeddings": tied, "hidden_size": 256}, tmp_path)
    head = MadeUp(spec, "cpu").get(tensors.EMBEDDING if tied else tensors.HEAD).float()
    normed = torch.randn(50, 256, generator=torch.Generator().manual_seed(1))
    assert float((normed @ head.T).std()) == pytest.approx(LOGIT_STD, rel=0.05)


def test_made_up_prompts_share_no_block() -> None:
    prompts = made_up_prompts(40, 64, 512)
    blocks = [prompt[at : at + 16] for prompt in prompts for at in range(0, 64, 16)]
    assert len(set(blocks)) == len(blocks)
    assert prompts == made_up_prompts(40, 64, 512)
    assert prompts[0] != made_up_prompts(40, 64, 512, seed=1)[0]


def test_a_bare_batch_ends_at_its_context_and_gives_every_sequence_its_own_blocks() -> None:
    batch = batch_of(sequences=3, rows_each=2, context=33, num_blocks=9, block_size=16, vocab_size=100)
    assert batch.layout.positions.tolist() == [31, 32] * 3
    assert batch.layout.seq_len.tolist() == [33] * 3
    assert batch.layout.query_start.tolist() == [0, 2, 4, 6]
    assert sorted(batch.layout.block_table.flatten().tolist()) == list(range(9))
    assert batch.last_rows.tolist() == [1, 3, 5]


class CountingEngine:
    """Every running request gets `each` tokens a step; the one named in `ends` ends in its third step."""

    def __init__(self, each: int = 1, ends: str | None = None) -> None:
        self.running: dict[str, int] = {}
        self._each = each
        self._ends = ends

    def add(self, request: Request) -> None:
        self.running[request.request_id] = 0

    def abort(self, request_id: str) -> None:
        del self.running[request_id]

    def has_work(self) -> bool:
        return bool(self.running)

    def step(self) -> tuple[SequenceDelta, ...]:
        deltas = []
        for name in self.running:
            self.running[name] += 1
            over = name == self._ends and self.running[name] == 3
            deltas.append(
                SequenceDelta(
                    request_id=name,
                    index=0,
                    token_ids=(7,) * self._each,
                    finish_reason=FinishReason.LENGTH if over else None,
                )
            )
        return tuple(deltas)


def loop_over(engine: CountingEngine, tick_s: float = 1.0) -> ClosedLoop:
    """Every look at the clock is tick_s later than the one before."""
    now = iter(np.arange(0.0, 1000.0, tick_s).tolist())
    return ClosedLoop(engine, HostClock(), lambda: next(now))  # type: ignore[arg-type]


def test_a_look_counts_the_tokens_and_the_time_of_its_own_steps() -> None:
    """Planted: no warm steps, one step too many."""
    engine = CountingEngine(each=3)
    loop = loop_over(engine)
    loop.start([(1,), (2,)], greedy)
    loop.warm()
    assert set(engine.running.values()) == {4}
    steps = loop.look(seconds=100.0, steps=5)
    assert steps.num_tokens == 5 * 2 * 3
    assert steps.host_s == (1.0,) * 5
    assert steps.wall_s == 5.0
    assert len(steps.device_s) == 5
    assert steps.tokens_per_s == 6.0


def test_a_look_ends_with_its_time_after_one_step_at_least() -> None:
    loop = loop_over(CountingEngine())
    loop.start([(1,)], greedy)
    assert len(loop.look(seconds=2.5).host_s) == 3
    assert len(loop.look(seconds=0.0).host_s) == 1


def test_sequences_that_are_not_kept_are_dropped_and_the_last_stop_leaves_nothing() -> None:
    engine = CountingEngine()
    loop = loop_over(engine)
    loop.start([(1,), (2,), (3,)], greedy)
    loop.keep_first(1)
    assert list(engine.running) == ["0-0"]
    loop.stop()
    assert not engine.running
    loop.start([(1,)], greedy)
    assert list(engine.running) == ["1-0"]


def test_a_sequence_that_ends_while_it_is_measured_is_an_error() -> None:
    loop = loop_over(CountingEngine(ends="0-1"))
    loop.start([(1,), (2,)], greedy)
    with pytest.raises(EngineError, match="0-1 ended while it was measured: length"):
        loop.look(seconds=10.0)


def turn(policy: str, round_: int, rate: float, sequences: int = 1) -> dict[str, object]:
    return {
        "acceptance": 0.8,
        "sequences": sequences,
        "round": round_,
        "policy": policy,
        "tokens_per_s": rate,
        "gamma": 1.0,
        "accepted": 0.5,
    }


def test_ratios_are_to_policy_off_of_the_same_round_and_their_median_counts() -> None:
    """Planted: off of the first round for all of them."""
    turns = [
        *(turn("off", round_, rate) for round_, rate in enumerate((100.0, 50.0, 10.0))),
        *(turn("faser", round_, rate) for round_, rate in enumerate((150.0, 150.0, 20.0))),
        turn("off", 0, 1000.0, sequences=8),
        turn("faser", 0, 500.0, sequences=8),
    ]
    rows = {(row["sequences"], row["policy"]): row for row in rows_of(turns)}
    assert rows[1, "faser"]["times_off"] == 2.0
    assert rows[1, "faser"]["tokens_per_s"] == 150.0
    assert rows[1, "off"]["times_off"] == 1.0
    assert rows[8, "faser"]["times_off"] == 0.5
    assert rows[1, "faser"]["rounds"] == 3


def test_off_is_first_and_last_in_every_round_and_ratios_are_to_the_mean_of_both() -> None:
    """Planted: the last turn of off alone; every round in the same order."""
    orders = [[arm.name for arm in in_order(arms_of(ON_DEVICE), round_)] for round_ in range(2)]
    assert orders[0] == ["off", "fixed:1", "fixed:3", "fixed:5", "goodput", "faser", "off"]
    assert orders[1] == ["off", "fixed:3", "fixed:5", "goodput", "faser", "fixed:1", "off"]
    rows = {
        row["policy"]: row
        for row in rows_of([turn("off", 0, 90.0), turn("faser", 0, 150.0), turn("off", 0, 110.0)])
    }
    assert rows["faser"]["times_off"] == 1.5
    assert (rows["off"]["times_off"], rows["off"]["rounds"]) == (1.0, 1)


class Nvml:
    """NVML's bindings, as far as they are used here."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = "sm", "memory", "celsius"

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return f"device {index}"

    def nvmlDeviceGetClockInfo(self, device: str, kind: str) -> int:
        return {("device 0", "sm"): 1980, ("device 0", "memory"): 3201}[device, kind]

    def nvmlDeviceGetPowerUsage(self, device: str) -> int:
        return {"device 0": 512_700}[device]

    def nvmlDeviceGetTemperature(self, device: str, kind: str) -> int:
        return {("device 0", "celsius"): 41}[device, kind]


def test_clocks_are_those_of_the_first_device() -> None:
    assert Clocks(None).read() == {}
    assert Clocks(Nvml()).read() == {"sm_mhz": 1980, "memory_mhz": 3201, "watts": 513, "celsius": 41}


def test_nvml_has_the_names_that_clocks_use() -> None:
    pynvml = pytest.importorskip("pynvml")
    assert {name for name in dir(Nvml) if name.lower().startswith("nvml")} <= set(dir(pynvml))


def test_a_policy_without_an_off_in_its_round_has_no_ratio() -> None:
    assert rows_of([turn("faser", 0, 1.0)])[0]["times_off"] is None


def test_given_rates_are_those_of_tokens_that_pass_one_by_one() -> None:
    config = synthetic(Path("draft"), cap=3, acceptance=0.5)
    assert config["synthetic_acceptance_rates"] == [0.5, 0.25, 0.125]


def test_vllm_gets_the_acceptance_prompts_and_batches_of_the_policies(tmp_path: Path) -> None:
    plan = Plan(out=tmp_path)
    found = asked(plan, 3)
    speculative = found["engine"]["speculative_config"]
    wanted = synthetic(tmp_path / "models" / "draft", cap=3, acceptance=0.8)
    assert speculative == wanted
    assert found["batches"] == (32, 1, 128, 8)
    assert found["prompts"] == made_up_prompts(128, 1024, 151936)
    assert found["engine"]["compilation_config"] == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 4, 8, 32, 128, 512],
    }
    assert "speculative_config" not in asked(plan, None)["engine"]


def test_a_law_cuts_in_the_order_of_the_documentation() -> None:
    """min_p 0.3 leaves three tokens, top_k two of them, top_p one of those."""
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3]))
    assert exact_distribution(logits, 1.0, 0.0, 0, 1.0) == pytest.approx([0.1, 0.4, 0.2, 0.3])
    assert exact_distribution(logits, 1.0, 0.3, 0, 1.0) == pytest.approx([0.0, 4 / 9, 2 / 9, 3 / 9])
    assert exact_distribution(logits, 1.0, 0.3, 2, 1.0) == pytest.approx([0.0, 4 / 7, 0.0, 3 / 7])
    assert exact_distribution(logits, 1.0, 0.3, 2, 0.5) == pytest.approx([0.0, 1.0, 0.0, 0.0])
    assert exact_distribution(logits, 0.0, 0.0, 0, 1.0).tolist() == [0.0, 1.0, 0.0, 0.0]


def test_counts_of_right_verdicts_are_likely_and_under_another_law_they_are_not(tmp_path: Path) -> None:
    """Planted: a distribution of the drafts that is not the one they were drawn from."""
    plan = Plan(out=tmp_path, dry_run=True)
    right, wrong = verified(plan, 6000), verified(plan, 6000, temperature=1.0)
    assert all(each["p_value"] > LEAST_P for each in right.values())
    assert all(each["p_value"] < LEAST_P for each in wrong.values())
    assert 0.2 < right["rejection"]["accepted"] < 0.9
