"""Measures products with low-bit weights next to bfloat16 ones and torch's own, and writes what it saw as JSON.

    python -m benchmarks kernels.products OUT.json [--threads 2] [--rounds 9] [--size 1536x1536] [--rows 1 4 16]
        [--base LIBRARY]

Arms take turns, round by round, so that a busy moment of the machine hits them alike; medians and minima of the
rounds are kept. Weights are random: only their bytes matter. Every product is repeated over as many copies of the
weight as fill 256 MB, so that it comes from memory and not from a cache; where many rows make computing the limit,
over fewer.

torch's arms: `int4` is `_weight_int4pack_mm_for_cpu` in groups of 32; `int8` is a product of bytes (`_int_mm`)
that neither quantises its input nor applies scales, hence less than a layer needs.

--base: the compiled library of another version, or of another instruction set. Then the arms are the products of
both; `times_base` is the median over rounds of what this one takes over what that one does.
"""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.runner import about, command_line, timed_turns, write_json
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import LOW_BIT_INSTRUCTIONS, chosen_isa, library_path
from faser.kernels.interface.low_bit.formats import FORMATS
from faser.kernels.interface.low_bit.rows import LowBitRows, block_rows

FORMATS_TIMED = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0")
TOTAL_BYTES = 256 << 20
BASE = ", base"
PAUSE_S = 0.005  # in which the threads of the arm before stop to wait actively
FEW_ROWS = 8  # up to which reading weights is the limit

Run = Callable[[int], object]  # multiplies by one copy of the weight


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--size", default="1536x1536", help="outputs x inputs of the weight")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--base", type=Path, help="a compiled library, to compare with")
    args = parser.parse_args()
    columns, depth = (int(each) for each in args.size.split("x"))
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        native = NativeBackend(library_path(cache_dir=Path(cache)), num_threads=args.threads)
        arms: dict[str, Any] = {
            name: _Native(native, _random_blocks(name, columns, depth)) for name in FORMATS_TIMED
        }
        wide = (torch.randn(columns, depth) * 0.02).bfloat16()
        arms["bfloat16"] = _Native(native, wide)
        if args.base is None:
            arms |= {"torch int4": _TorchInt4(columns, depth), "torch int8": _TorchInt8(columns, depth)}
        else:
            base = NativeBackend(args.base, num_threads=args.threads)
            arms |= {name + BASE: _Native(base, _random_blocks(name, columns, depth)) for name in FORMATS_TIMED}
            arms["bfloat16" + BASE] = _Native(base, wide)
        found: dict[str, Any] = {
            **about("kernels.products"),
            "instructions": LOW_BIT_INSTRUCTIONS[chosen_isa()],
            "threads": args.threads,
            "size": args.size,
            "read_gb_s": round(read_bandwidth(args.threads, TOTAL_BYTES), 1),
            "rows": [_measured(arms, rows, args.rounds, 2.0 * columns * depth) for rows in args.rows],
        }
    write_json(args.out, found)


class _Native:
    """A weight [N, K] on the native backend, in bfloat16 or in blocks."""

    def __init__(self, backend: NativeBackend, weight: torch.Tensor | LowBitRows) -> None:
        self.num_bytes = weight.nbytes if isinstance(weight, torch.Tensor) else weight.num_bytes
        self._backend = backend
        self._columns, self._depth = weight.shape
        self._packed = [backend.pack(weight) for _ in range(_copies(self.num_bytes))]

    def __len__(self) -> int:
        return len(self._packed)

    def run(self, rows: int) -> Run:
        x, out = _activations(rows, self._depth), torch.empty(rows, self._columns, dtype=torch.bfloat16)
        return lambda copy: self._backend.linear(x, self._packed[copy], out)


class _TorchInt4:
    """4-bit codes with a scale and a zero point in bfloat16 for every 32 values; activations stay in bfloat16."""

    def __init__(self, columns: int, depth: int) -> None:
        self.num_bytes = columns * depth // 2 + columns * depth // 32 * 4
        codes = torch.randint(0, 16, (columns, depth), dtype=torch.int32)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        self._packed = [packed.clone() for _ in range(_copies(self.num_bytes))]
        self._scales = (torch.rand(depth // 32, columns, 2) * 0.02).bfloat16()
        self._depth = depth

    def __len__(self) -> int:
        return len(self._packed)

    def run(self, rows: int) -> Run:
        x = _activations(rows, self._depth)
        return lambda copy: torch.ops.aten._weight_int4pack_mm_for_cpu(x, self._packed[copy], 32, self._scales)


class _TorchInt8:
    def __init__(self, columns: int, depth: int) -> None:
        self.num_bytes = columns * depth
        weight = torch.randint(-127, 128, (columns, depth), dtype=torch.int8)
        self._weights = [weight.clone() for _ in range(_copies(self.num_bytes))]
        self._depth = depth

    def __len__(self) -> int:
        return len(self._weights)

    def run(self, rows: int) -> Run:
        x = torch.randint(-127, 128, (rows, self._depth), dtype=torch.int8)
        return lambda copy: torch._int_mm(x, self._weights[copy].t())


def _random_blocks(name: str, columns: int, depth: int) -> LowBitRows:
    """Bytes below 60 make half floats below one."""
    found = FORMATS[name]
    size = (columns, depth // found.values * found.num_bytes)
    return block_rows(name, np.random.default_rng(0).integers(0, 60, size, np.uint8), depth)


def _copies(num_bytes: int) -> int:
    return max(1, TOTAL_BYTES // num_bytes)


def _activations(rows: int, depth: int) -> torch.Tensor:
    return torch.randn(rows, depth).bfloat16()


def _measured(arms: dict[str, Any], rows: int, rounds: int, flop: float) -> dict[str, Any]:
    def repeated(name: str) -> Callable[[], None]:
        run = arms[name].run(rows)

        def work() -> None:
            for copy in range(copies[name]):
                run(copy)

        return work

    copies = {
        name: len(arm) if rows <= FEW_ROWS else max(1, len(arm) * FEW_ROWS // rows) for name, arm in arms.items()
    }
    seconds = timed_turns({name: repeated(name) for name in arms}, rounds, pause_s=PAUSE_S)
    record: dict[str, Any] = {"rows": rows}
    for name, each in seconds.items():
        times = [whole / copies[name] for whole in each]
        median = statistics.median(times)
        record[name] = {
            "median_us": round(median * 1e6, 1),
            "min_us": round(min(times) * 1e6, 1),
            "gb_s": round(arms[name].num_bytes / median / 1e9, 1),
            "gop_s": round(flop * rows / median / 1e9, 1),
        }
        if base := seconds.get(name + BASE):
            ratios = [mine / theirs for mine, theirs in zip(each, base, strict=True)]
            record[name]["times_base"] = round(statistics.median(ratios), 3)
    print(" ".join(f"{key}={value}" for key, value in record.items()), flush=True)
    return record


def read_bandwidth(threads: int, num_bytes: int) -> float:
    """GB/s at which all threads together read num_bytes, more than caches hold; the best of a few tries."""
    torch.set_num_threads(threads)
    words = torch.zeros(num_bytes // 4, dtype=torch.float32)
    best = float("inf")
    for _ in range(8):
        began = time.perf_counter()
        words.sum()
        best = min(best, time.perf_counter() - began)
    return num_bytes / best / 1e9
