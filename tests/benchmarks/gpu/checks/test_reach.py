"""Checks reach what they are about: a kernel, a replay or an answer that is wrong is found.

The device is emulated, so nothing here needs a GPU.
"""

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from benchmarks.gpu.checks.answers import parted, replayed, same_again
from benchmarks.gpu.checks.checks import memory_checked
from benchmarks.gpu.checks.models import main as one_step
from benchmarks.gpu.checks.tokens import edited, verification
from benchmarks.gpu.plan import ON_DEVICE, Plan
from benchmarks.gpu.steps import Tokens
from faser.engine.execution.runner.graph_runner import GraphRunner
from faser.engine.execution.runner.graph_sizes import GraphSizes
from faser.engine.execution.sampling.kernels import TorchSamplingKernels
from faser.kernels.interface.sampling import SamplingMetadata
from faser.types.arrays import Ints, Words
from faser.types.engine import ModelInfo
from tests.checkpoints import VOCAB_SIZE
from tests.engine.execution.runner.test_graph_runner import BLOCK_SIZE, NUM_BLOCKS, WIDTH, Side, write_heads_of_64
from tests.kernels.cuda.fake_device import FakeAccelerator
from tests.kernels.cuda.fake_graph import fake_backend

ROOT = Path(__file__).parents[4]
SHAPES = ((1, 1), (2, 1), (2, 3))
INFO = ModelInfo(
    max_model_len=BLOCK_SIZE * WIDTH,
    vocab_size=VOCAB_SIZE,
    eos_token_ids=(),
    dtype="bfloat16",
    device="cpu",
    backend="flashinfer",
    block_size=BLOCK_SIZE,
    num_blocks=NUM_BLOCKS,
    kv_cache_bytes=0,
    kv_cache_dtype="bfloat16",
    weight_bytes=0,
    num_parameters=0,
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(out=tmp_path, dry_run=True)


class DrawsAnother(TorchSamplingKernels):
    """Draws the token beside the right one."""

    def draw(self, logits: Tensor, rows: Ints, best: Ints, metadata: SamplingMetadata, noise: Words) -> Ints:
        return (super().draw(logits, rows, best, metadata, noise) + 1) % logits.shape[1]


def test_accepted_tokens_are_those_of_the_devices_kernels(plan: Plan) -> None:
    backend = fake_backend()
    assert verification(plan, backend)["ok"]
    backend.sampling_kernels = DrawsAnother()
    found = verification(plan, backend)
    assert not found["ok"]
    assert found["other_verdicts"]["coupled"] > 0


def test_logits_are_edited_on_the_device_as_on_the_host(plan: Plan) -> None:
    assert edited(plan, fake_backend())["ok"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_heads_of_64(tmp_path_factory.mktemp("heads-of-64"))


def graph_runner(side: Side, *rows: int) -> GraphRunner:
    sizes = GraphSizes.default(
        max_rows=16, max_sequences=2, max_drafts=2, max_blocks_each=WIDTH, requested=rows or None
    )
    return side.graph_runner(sizes)


def test_a_replay_has_the_bits_of_the_step_that_it_records(checkpoint: Path) -> None:
    found = replayed(graph_runner(Side(checkpoint)), INFO, SHAPES, context=20)
    assert found["ok"], found
    assert [each["other_bits"] for name, each in found["found"].items() if "12 tokens" in name] == [0, 0, 0]


@pytest.mark.parametrize("row", [0, 1])
def test_a_buffer_that_somebody_writes_to_between_two_graphs_is_found(checkpoint: Path, row: int) -> None:
    """Planted: one number of one row; row 1 is no row of a step of one sequence."""
    accelerator = FakeAccelerator()
    side = Side(checkpoint, fake_backend(accelerator))
    runner = graph_runner(side)

    def written(_recorder: object) -> None:
        side.decoder.hidden[row].add_(0.5)

    accelerator.on_replay = written
    found = replayed(runner, INFO, SHAPES, context=20)
    assert not found["ok"]
    assert bool(found["found"]["1 x 1, 12 tokens"]["other_bits"]) is (row == 0)
    assert found["found"]["2 x 1, 12 tokens"]["other_bits"]


def test_a_step_without_a_graph_of_its_size_is_no_check_of_replays(checkpoint: Path) -> None:
    """Planted: two eager steps compared; a padded one taken for one of its size."""
    assert not replayed(graph_runner(Side(checkpoint), 1, 4), INFO, ((2, 1),), context=20)["ok"]
    assert not replayed(graph_runner(Side(checkpoint)), INFO, ((2, 8),), context=20)["ok"]


def test_the_same_engine_has_to_say_the_same_again() -> None:
    """Planted: a bound below one."""
    expected = {"greedy": [tuple(range(100))] * 3, "T 0.8": [tuple(range(100))] * 3}
    assert same_again(expected, expected)["ok"]
    late = {**expected, "T 0.8": [*expected["T 0.8"][:2], (*range(99), 0)]}
    assert not same_again(late, expected)["ok"]


def test_answers_may_part_at_near_ties_only() -> None:
    """Planted: every difference excused; none excused; likelihoods asked behind the wrong tokens."""
    expected: list[Tokens] = [(1, 2, 3, 4)] * 4
    found: list[Tokens] = [(1, 2, 3, 4), (1, 9, 9, 9), (1, 9, 9, 9), (1, 8, 9, 9)]
    asked: list[Tokens] = []

    def ask(tokens: Tokens) -> Mapping[int, float]:
        asked.append(tokens)
        return {2: -1.0, 9: -1.3, 8: -2.0}

    assert parted(found, expected, [(7,)] * 4, ask) == {
        "ok": False,
        "same": 0.25,
        "near_ties": 2,
        "together": pytest.approx(13 / 16, abs=1e-4),
    }
    assert asked == [(7, 1)] * 3
    assert parted(found[:3], expected[:3], [(7,)] * 3, ask)["ok"]


CHECKER = """#!/bin/sh
echo "Device not supported" > /dev/{where}
exit {status}
"""


@pytest.mark.parametrize(("where", "status", "ok"), [("null", 0, True), ("null", 9, False), ("stdout", 1, None)])
def test_a_memory_checker_that_finds_something_fails_and_one_that_refuses_the_device_is_skipped(
    plan: Plan, where: str, status: int, ok: bool | None
) -> None:
    """Planted: a refusal taken for a fault; a fault taken for a refusal."""
    tool = plan.out / "checker"
    tool.write_text(CHECKER.format(where=where, status=status))
    tool.chmod(0o755)
    found = memory_checked(plan, 10.0, lambda _: str(tool))
    assert found["ok"] is ok
    assert ("skipped" in found) is (ok is None)


def test_a_memory_checker_that_is_not_there_is_skipped_by_name(plan: Plan) -> None:
    found = memory_checked(plan, 10.0, lambda _: None)
    assert found == {"ok": None, "skipped": "compute-sanitizer is not there"}


def test_logits_of_the_step_under_the_memory_checker_are_finite(
    plan: Plan, capfd: pytest.CaptureFixture[str]
) -> None:
    one_step(plan.out, dry_run=True)
    assert capfd.readouterr().out == "1 216 rows\n"


def test_own_tests_are_few_files_none_of_which_compiles_every_kernel() -> None:
    """Planted: the whole folder, whose tests of compilation take longer than a run."""
    files = ON_DEVICE.own_tests
    assert len(files) <= 6
    assert all((ROOT / each).is_file() for each in files)
    assert not {"test_compilation.py", "test_variants.py", "test_launcher.py"} & {
        Path(each).name for each in files
    }
