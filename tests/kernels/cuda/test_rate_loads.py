"""What a GPU is given to do while its parts are measured, tried on the CPU: it is what its numbers say."""

from pathlib import Path

import pytest
import torch

from faser.kernels.cuda.green_contexts import GreenContextError
from faser.kernels.cuda.rate_loads import CudaRateLoads, copy_tensor_bytes, rate_loads
from tests.kernels.cuda.fake_memory import FakeMemory

CPU = torch.device("cpu")
MIB = 1 << 20


class Bindings:
    """torch's, as far as they are asked for. told: every number of idle processors; cleared: how often."""

    def __init__(self) -> None:
        self.told: list[int | None] = []
        self.cleared = 0

    def _set_sm_carveout_experimental(self, idle: int | None) -> None:
        self.told.append(idle)

    def _cuda_clearCublasWorkspaces(self) -> None:
        self.cleared += 1


def loads_of(bindings: object = None, **sizes: int) -> CudaRateLoads:
    return CudaRateLoads(CPU, 132, sizes.get("tensor_bytes", 4096), side=sizes.get("side", 64), bindings=bindings)


def bytes_of(tensor: torch.Tensor) -> int:
    """Of its memory: pytest would print all of that."""
    return tensor.untyped_storage().nbytes()


def test_a_copy_reads_one_tensor_and_writes_another() -> None:
    """Caught: bytes of one tensor only, a copy onto itself, which caches would keep."""
    loads = loads_of(tensor_bytes=1 << 16)
    loads.copy()
    assert loads.copy_bytes == 2 << 16
    assert torch.equal(loads._target, loads._source + 1)
    assert loads._source.data_ptr() != loads._target.data_ptr()


def test_a_product_is_one_and_counts_both_operations() -> None:
    """In the type that models have, of numbers that are not zero."""
    loads = loads_of(side=64)
    loads.product(132)
    assert loads.product_operations == 2 * 64**3
    assert loads._out.dtype == torch.bfloat16
    wanted = loads._one.float() @ loads._other.float()
    torch.testing.assert_close(loads._out.float(), wanted, rtol=0.02, atol=0.1)
    assert wanted.abs().mean() > 1


def test_products_are_told_of_processors_that_are_not_there_and_nobody_later() -> None:
    bindings = Bindings()
    loads = loads_of(bindings)
    loads.product(120)
    loads.product(132)
    loads.copy()
    assert bindings.told == [12, None]


def test_workspaces_are_cleared_when_loads_are_told_to_forget() -> None:
    bindings = Bindings()
    loads = loads_of(bindings)
    loads.forget()
    assert bindings.cleared == 1
    loads.close()
    assert bindings.cleared == 2


def test_a_torch_without_such_bindings_measures_all_the_same() -> None:
    loads = loads_of(object())
    loads.product(8)
    loads.forget()
    assert torch.equal(loads._out, loads._one @ loads._other)
    loads.close()
    assert bytes_of(loads._out) == 0


def test_torch_can_clear_workspaces() -> None:
    """Read in its stubs: this build has no CUDA, and so not the function."""
    stubs = Path(torch.__file__).parent / "_C" / "__init__.pyi"
    assert "def _cuda_clearCublasWorkspaces() -> None" in stubs.read_text()


def test_closed_loads_hold_no_memory_whoever_knows_them() -> None:
    loads = loads_of()
    known = loads._source
    loads.close()
    assert bytes_of(known) == bytes_of(loads._out) == 0


def test_numbers_of_others_are_what_they_would_have_been() -> None:
    """Only a first start measures; answers must not tell. Caught: tensors drawn from torch's own generator."""
    torch.manual_seed(7)
    wanted = torch.rand(4)
    torch.manual_seed(7)
    loads_of()
    assert torch.equal(torch.rand(4), wanted)


def test_where_there_is_room_tensors_are_larger_than_any_cache() -> None:
    assert copy_tensor_bytes(100 << 30) == 256 * MIB
    assert copy_tensor_bytes(2 * (96 + 512) * MIB) == 256 * MIB


@pytest.mark.parametrize("free", [448, 449, 500, 639, 800, 1215])
def test_where_there_is_little_half_of_it_is_left(free: int) -> None:
    size = copy_tensor_bytes(free * MIB)
    assert 64 * MIB <= size < 256 * MIB
    assert 2 * size + 96 * MIB <= free * MIB // 2
    assert size % MIB == 0


@pytest.mark.parametrize("free", [0, 100, 447])
def test_where_there_is_too_little_both_numbers_are_named(free: int) -> None:
    with pytest.raises(GreenContextError, match=f"takes 448 MiB of free memory; there are {free}$"):
        copy_tensor_bytes(free * MIB)


def test_what_torch_keeps_has_uniforms_back_before_and_afterwards() -> None:
    """Caught: a count of free memory that leaves out what torch only keeps, memory that stays with torch."""
    memory = FakeMemory(total_bytes=400 * MIB, kept=300 * MIB)
    with pytest.raises(GreenContextError, match="there are 400"), rate_loads(CPU, 132, memory):
        pass
    memory = FakeMemory(total_bytes=448 * MIB, kept=300 * MIB)
    with rate_loads(CPU, 132, memory) as loads:
        assert loads.copy_bytes == 128 * MIB
        memory.kept = 200 * MIB
    assert memory.kept == 0
    assert bytes_of(loads._source) == 0
