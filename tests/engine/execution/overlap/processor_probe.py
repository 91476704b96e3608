"""Which of a GPU's processors blocks run on: a probe that shows whether a lane stays on its own processors.

Each block of the kernel reads the number of its processor (%smid of PTX) and counts itself there. A CUDA graph can
capture it like any kernel. The numbers are the hardware's: they may exceed the number of processors and have gaps.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from faser.errors import EngineError
from faser.kernels.cuda.triton.common import EXACT, expect, jit

MOST_PROCESSORS = 1024  # all numbers are below; no GPU has a quarter of that many
_BLOCKS_EACH = 16  # as many blocks of four warps as a processor holds at once, so that every processor gets some


@jit
def _count_blocks(counts, MOST: tl.constexpr):  # type: ignore[no-untyped-def]
    """Blocks sleep for a moment, so that later blocks find this processor occupied."""
    block = tl.program_id(0)
    processor = tl.inline_asm_elementwise(
        "mov.u32 $0, %smid; nanosleep.u32 20000;", "=r,r", [block], dtype=tl.int32, is_pure=False, pack=1
    )
    tl.atomic_add(counts + processor, 1, mask=processor < MOST)


def count_blocks(counts: Tensor, num_processors: int) -> None:
    """Launch enough blocks for every processor, and add to counts[i] how many of them ran on processor i.

    counts: [MOST_PROCESSORS] int32, on the GPU. num_processors: of the device. Launches on the current stream;
    does not wait. Raises EngineError for other counts, and in Triton's interpreter.
    """
    if counts.device.type != "cuda":
        raise EngineError(f"only blocks on a GPU have a processor; counts is on {counts.device}")
    if not isinstance(_count_blocks, triton.JITFunction):
        raise EngineError("Triton's interpreter runs blocks on no processor; TRITON_INTERPRET switches it on")
    expect("counts", counts, (MOST_PROCESSORS,), torch.int32, like=counts)
    _count_blocks[(num_processors * _BLOCKS_EACH,)](counts, MOST=MOST_PROCESSORS, num_warps=4, **EXACT)


def blocks_by_processor(stream: torch.cuda.Stream) -> dict[int, int]:
    """Launch the kernel on this stream; the number of blocks that ran on each processor, by its number. Waits.

    Raises EngineError for anything but a stream of a GPU, and in Triton's interpreter.
    """
    if not isinstance(stream, torch.cuda.Stream):
        raise EngineError(f"only blocks on a GPU have a processor; {stream!r} is no stream of a GPU")
    with torch.cuda.stream(stream):
        counts = torch.zeros(MOST_PROCESSORS, dtype=torch.int32, device=stream.device)
        count_blocks(counts, torch.cuda.get_device_properties(stream.device).multi_processor_count)
        found: list[int] = counts.tolist()
    return {processor: count for processor, count in enumerate(found) if count}


def processors_of(stream: torch.cuda.Stream) -> set[int]:
    """Numbers of the processors that run blocks of this stream. See blocks_by_processor."""
    return set(blocks_by_processor(stream))
