"""From a wheel to a first answer in an environment without a compiler, and its kernels against this machine's own.

    python -m benchmarks serving.wheel dist/faser-0.1.0-py3-none-manylinux_2_28_x86_64.whl OUT.json [--rounds 10]

Installs the wheel and what it requires into a new environment, asks the default model one question, and asks it
again on a second start and with every instruction set that the CPU has. pip's cache and indices are the user's.
Then products by the wheel's kernels are held against those that the compiler here makes of the same sources.
"""

import hashlib
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import CHECKOUT, Json, command_line, write_json
from faser.config.environment import cache_dir
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import Isa, library_path, prebuilt_name, runnable_isas

QUESTION = {
    "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
    "temperature": 0,
    "max_tokens": 48,
    "logprobs": True,
}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int, default=10, help="of products [10]")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, cache = Path(folder, "environment"), Path(folder, "cache")
        record: Json = {"wheel": _contents(args.wheel), "install_s": _install(args.wheel, home)}
        record["environment_bytes"] = _bytes(home)
        for name, isa in (("first_start", None), ("second_start", None), *((isa, isa) for isa in runnable_isas())):
            print(name, flush=True)
            record[name] = _start(home, cache, isa)
            print(record[name], flush=True)
        record["compiled"] = [path.name for path in cache.rglob("*.so")]
        record["load"] = os.getloadavg()
        with zipfile.ZipFile(args.wheel) as opened:
            record["kernels"] = {
                isa: _compare(isa, _extract(opened, isa, Path(folder)), args.rounds) for isa in runnable_isas()
            }
    write_json(args.out, record)


def _contents(wheel: Path) -> Json:
    with zipfile.ZipFile(wheel) as opened:
        libraries = {
            info.filename.rpartition("/")[2]: {"bytes": info.file_size, "compressed": info.compress_size}
            for info in opened.infolist()
            if info.filename.endswith(".so")
        }
    return {"name": wheel.name, "bytes": wheel.stat().st_size, "libraries": libraries}


def _install(wheel: Path, home: Path) -> float:
    """Seconds that pip takes."""
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    began_s = time.monotonic()
    pip = [str(home / "bin/python"), "-m", "pip", "install", "--quiet"]
    command = [*pip, "--constraint", str(CHECKOUT / "constraints.txt"), str(wheel)]
    subprocess.run(command, check=True)
    return round(time.monotonic() - began_s, 1)


def _start(home: Path, cache: Path, isa: str | None) -> Json:
    """Start a server and ask it. Times are seconds since the start; hashes are of the answer."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith(("FASER_", "PYTHON"))}
    variables = kept | {"PATH": str(home / "bin"), "FASER_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    if isa is not None:
        variables["FASER_CPU_ISA"] = isa
    record: Json = {}
    began_s = time.monotonic()

    def mark(name: str) -> None:
        record.setdefault(name, round(time.monotonic() - began_s, 1))

    command = [str(home / "bin/faser"), "serve", "--port", "0"]
    with subprocess.Popen(
        command, env=variables, cwd="/", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout is not None
        try:
            record |= _ask(_url(server.stdout, mark, record))
            mark("answered_s")
        finally:
            server.terminate()
    return record


def _url(lines: Any, mark: Any, record: Json) -> str:
    """Reads a server's lines until it is ready."""
    said = []
    for line in lines:
        said.append(line)
        if found := re.search(r"native kernels: (.*)", line):
            mark("kernels_s")
            record["kernels"] = found[1].strip()
        if line.startswith("measuring step times"):
            mark("measuring_s")
        if found := re.search(r"ready at (http://\S+)", line):
            mark("ready_s")
            return found[1]
    raise SystemExit("".join(said))


def _ask(url: str) -> Json:
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(QUESTION).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        (choice,) = json.load(response)["choices"]
    pairs = [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]]
    return {
        "answer": choice["message"]["content"][:60],
        "tokens_hash": _hash([token for token, _ in pairs]),
        "logprobs_hash": _hash(pairs),
    }


def _hash(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def _bytes(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*"))


def _extract(wheel: zipfile.ZipFile, isa: Isa, folder: Path) -> Path:
    (name,) = [name for name in wheel.namelist() if name.endswith(f"/{prebuilt_name(isa)}")]
    return Path(wheel.extract(name, folder))


def _compare(isa: Isa, library: Path, rounds: int) -> list[Json]:
    """Products of one thread, in turn, by the wheel's kernels and by those that this machine's compiler makes.

    Times are the thread's own, so other programs disturb them little. `equal`: whether every bit of the results
    is.
    """
    here = library_path(isa, cache_dir=cache_dir() / "kernels", prebuilt_dir=library / "none")
    arms = {"wheel": NativeBackend(library, num_threads=1), "here": NativeBackend(here, num_threads=1)}
    found = []
    for dtype, (columns, depth) in itertools.product((torch.bfloat16, torch.float32), ((3072, 576), (576, 1536))):
        weight = (torch.randn(columns, depth) * depth**-0.5).to(dtype)
        packed = {name: backend.pack(weight) for name, backend in arms.items()}
        for rows in (1, 6, 64, 256):
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
            record: Json = {"dtype": str(dtype), "columns": columns, "depth": depth, "rows": rows}
            record |= {f"{name}_us": round(statistics.median(each) * 1e6, 1) for name, each in times.items()}
            record["equal"] = torch.equal(outs["wheel"], outs["here"])
            print(isa, record, flush=True)
            found.append(record)
    return found
