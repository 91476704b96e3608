"""Holds the kernels of a wheel against those that this machine's compiler makes of the same sources, as JSON.

    python -m benchmarks.kernels.wheel dist/faser-0.1.0-py3-none-manylinux_2_28_x86_64.whl OUT.json

Products of one thread, in turn; times are the thread's own, so other programs disturb them little. `equal` says
whether every bit of the results is.
"""

import argparse
import json
import statistics
import tempfile
import time
import zipfile
from pathlib import Path
from typing import Any

import torch

from faser.config.environment import cache_dir
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path, prebuilt_name
from faser.kernels.cpu.isa import Isa, runnable_isas

SIZES = ((3072, 576), (576, 1536))
ROWS = (1, 6, 64, 256)
DTYPES = (torch.bfloat16, torch.float32)
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(args.wheel) as wheel:
        found = {isa: _compare(isa, _extract(wheel, isa, Path(folder)), args.rounds) for isa in runnable_isas()}
    args.out.write_text(json.dumps(found, indent=1) + "\n")


def _extract(wheel: zipfile.ZipFile, isa: Isa, folder: Path) -> Path:
    (name,) = [name for name in wheel.namelist() if name.endswith(f"/{prebuilt_name(isa)}")]
    return Path(wheel.extract(name, folder))


def _compare(isa: Isa, library: Path, rounds: int) -> list[Record]:
    here = library_path(isa, cache_dir=cache_dir() / "kernels", prebuilt_dir=library / "none")
    arms = {"wheel": NativeBackend(library, num_threads=1), "here": NativeBackend(here, num_threads=1)}
    found = []
    for dtype in DTYPES:
        for columns, depth in SIZES:
            weight = (torch.randn(columns, depth) * depth**-0.5).to(dtype)
            packed = {name: backend.pack(weight) for name, backend in arms.items()}
            for rows in ROWS:
                x = torch.randn(rows, depth).to(dtype)
                outs = {name: torch.empty(rows, columns, dtype=dtype) for name in arms}
                times: dict[str, list[float]] = {name: [] for name in arms}
                repeats = max(1, 200 // rows)
                for _ in range(rounds):
                    for name, backend in arms.items():
                        began_s = time.thread_time()
                        for _ in range(repeats):
                            backend.linear(x, packed[name], outs[name])
                        times[name].append((time.thread_time() - began_s) / repeats)
                record: Record = {"dtype": str(dtype), "columns": columns, "depth": depth, "rows": rows}
                record |= {f"{name}_us": round(statistics.median(each) * 1e6, 1) for name, each in times.items()}
                record["equal"] = torch.equal(outs["wheel"], outs["here"])
                print(isa, record, flush=True)
                found.append(record)
    return found


if __name__ == "__main__":
    main()
