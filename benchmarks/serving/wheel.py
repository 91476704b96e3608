"""Measures the way from a wheel to a first answer, in an environment without a compiler, and writes it as JSON.

    python -m benchmarks.serving.wheel dist/faser-0.1.0-py3-none-manylinux_2_28_x86_64.whl OUT.json

Installs the wheel and what it requires into a new environment, asks the default model one question, and asks it
again on a second start and with every instruction set that the CPU has. pip's cache and indices are the user's.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
import zipfile
from pathlib import Path
from typing import Any

from faser.kernels.cpu.isa import runnable_isas

ROOT = Path(__file__).parents[1]
QUESTION = {
    "messages": [{"role": "user", "content": "Name three rivers of Europe."}],
    "temperature": 0,
    "max_tokens": 48,
    "logprobs": True,
}
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        home, cache = Path(folder, "environment"), Path(folder, "cache")
        record: Record = {"wheel": _contents(args.wheel), "install_s": _install(args.wheel, home)}
        record["environment_bytes"] = _bytes(home)
        for name, isa in (("first_start", None), ("second_start", None), *((isa, isa) for isa in runnable_isas())):
            print(name, flush=True)
            record[name] = _start(home, cache, isa)
            print(record[name], flush=True)
        record["compiled"] = [path.name for path in cache.rglob("*.so")]
        record["load"] = os.getloadavg()
    args.out.write_text(json.dumps(record, indent=1) + "\n")


def _contents(wheel: Path) -> Record:
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
    command = [*pip, "--constraint", str(ROOT / "constraints.txt"), str(wheel)]
    subprocess.run(command, check=True)
    return round(time.monotonic() - began_s, 1)


def _start(home: Path, cache: Path, isa: str | None) -> Record:
    """Start a server and ask it. Times are seconds since the start; hashes are of the answer."""
    kept = {name: each for name, each in os.environ.items() if not name.startswith(("FASER_", "PYTHON"))}
    variables = kept | {"PATH": str(home / "bin"), "FASER_CACHE_DIR": str(cache), "PYTHONUNBUFFERED": "1"}
    if isa is not None:
        variables["FASER_CPU_ISA"] = isa
    record: Record = {}
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


def _url(lines: Any, mark: Any, record: Record) -> str:
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


def _ask(url: str) -> Record:
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


if __name__ == "__main__":
    main()
