"""Which of a GPU's processors blocks run on: a probe for lanes that are to stay on their own.

A kernel whose blocks each read the number of the processor that they are on (%smid of PTX) and count it. It can be
recorded like any kernel. Numbers are the hardware's: they need be neither below the number of processors nor
without gaps. It compiles for a GPU, and has not run on one yet.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common.tensors import EXACT, expect, jit

MOST_PROCESSORS = 1024  # numbers are below that; no GPU has a quarter of it
_BLOCKS_EACH = 16  # as many as a processor holds at once, of four warps: so none is left out


@jit
def _count_blocks(counts, MOST: tl.constexpr):
    """Blocks rest for a moment, so that those which come later find this processor taken."""
    block = tl.program_id(0)
    processor = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid; nanosleep.u32 20000;", "=r,r", [block], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.atomic_add(counts + processor, 1, mask=processor < MOST)


def count_blocks(counts: Tensor, num_processors: int) -> None:
    """Add to counts[i] the number of blocks that ran on processor i, of enough for every one to get some.

    counts: [MOST_PROCESSORS] int32, on the GPU. num_processors: that the device has. On the current stream; does
    not wait. Raises EngineError for counts of another kind or place, and in Triton's interpreter.
    """
    if counts.device.type != "cuda":
        raise EngineError(f"only a GPU's blocks are somewhere; counts is on {counts.device}")
    if not isinstance(_count_blocks, triton.JITFunction):
        raise EngineError(
            "Triton's interpreter runs blocks on no processor; it is switched on by TRITON_INTERPRET"
        )
    expect("counts", counts, (MOST_PROCESSORS,), torch.int32, like=counts)
    _count_blocks[(num_processors * _BLOCKS_EACH,)](counts, MOST=MOST_PROCESSORS, num_warps=4, **EXACT)


def blocks_by_processor(stream: torch.cuda.Stream) -> dict[int, int]:
    """How many blocks of a kernel on this stream ran on each processor, by its number; waits for them.

    Raises EngineError for what is no stream of a GPU, and in Triton's interpreter.
    """
    if not isinstance(stream, torch.cuda.Stream):
        raise EngineError(f"only a GPU's blocks are somewhere; {stream!r} is no stream of a GPU")
    with torch.cuda.stream(stream):
        counts = torch.zeros(MOST_PROCESSORS, dtype=torch.int32, device=stream.device)
        count_blocks(counts, torch.cuda.get_device_properties(stream.device).multi_processor_count)
        found: list[int] = counts.tolist()
    return {processor: count for processor, count in enumerate(found) if count}


def whereabouts(stream: torch.cuda.Stream) -> set[int]:
    """Numbers of the processors that a stream's blocks run on. See blocks_by_processor."""
    return set(blocks_by_processor(stream))
