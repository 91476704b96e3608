"""Time of a whole step by part, with weights as a GGUF file stores them, and of the same file in bfloat16.

    python -m benchmarks kernels.steps MODEL.gguf OUT.json [--rounds 9] [--rows 1 4 16] [--prompts 256 1024]
        [--llama-bench FILE] [--library NAME=FILE]

A step of --rows decodes a row of each of N sequences, with 128 tokens before them; one of --prompts reads N tokens
of a prompt at once. Arms take turns, round by round, so that a busy moment of the machine hits them
alike; medians and minima of the rounds are kept. `parts` are of rounds of their own, in which every operation is
timed as it is called: products by their outputs x inputs, `else` is what lies between the calls. The floor of a
step is the time that reading its weights takes at the read bandwidth measured in the same run; `of_peak` compares
all products of a step with what the same cores do in registers. --library, once or more, adds arms with that
compiled library for the GGUF file. --llama-bench runs llama.cpp's own benchmark on the same file, before and after
the rest.
"""

import argparse
import ctypes
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.kernels.products import read_bandwidth
from benchmarks.runner import about, command_line, write_json
from faser.config.environment import cache_dir
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import (
    LOW_BIT_INSTRUCTIONS,
    Isa,
    chosen_isa,
    find_compiler,
    library_path,
    runnable_isas,
)
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.forward import SeparateBlocks, SeparateLayers
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout

_CHAINS = 16  # independent sums: more than latency times instructions a cycle
_SOURCE = """
#include <immintrin.h>
#define UNROLLED _Pragma("GCC unroll 32")
extern "C" int bytes(long n, int seed) {
    __m512i a = _mm512_set1_epi32(seed), b = _mm512_set1_epi32(seed + 1), s[CHAINS];
    UNROLLED for (int i = 0; i < CHAINS; i++) s[i] = _mm512_set1_epi32(i);
    for (long k = 0; k < n; k++) {
        UNROLLED for (int i = 0; i < CHAINS; i++) {
            s[i] = _mm512_dpbusd_epi32(s[i], a, b);
            asm volatile("" : "+v"(s[i]));
        }
    }
    UNROLLED for (int i = 1; i < CHAINS; i++) s[0] = _mm512_add_epi32(s[0], s[i]);
    return _mm512_reduce_add_epi32(s[0]);
}
extern "C" int halves(long n, int seed) {
    __m512bh a = (__m512bh)_mm512_set1_epi32(seed), b = (__m512bh)_mm512_set1_epi32(seed + 1);
    __m512 s[CHAINS];
    UNROLLED for (int i = 0; i < CHAINS; i++) s[i] = _mm512_set1_ps(float(i));
    for (long k = 0; k < n; k++) {
        UNROLLED for (int i = 0; i < CHAINS; i++) {
            s[i] = _mm512_dpbf16_ps(s[i], a, b);
            asm volatile("" : "+v"(s[i]));
        }
    }
    UNROLLED for (int i = 1; i < CHAINS; i++) s[0] = _mm512_add_ps(s[0], s[i]);
    return int(_mm512_reduce_add_ps(s[0]));
}
"""
_OPERATIONS = {"bytes": 2 * 64, "halves": 2 * 32}  # of one instruction: multiplications and additions
_REPEATS = 400_000


def register_peaks(threads: int, tries: int = 7) -> dict[str, float]:
    """int8 and bfloat16: 10^9 operations a second of all threads in registers, the best of the tries.

    A loop of independent vpdpbusd (and one of vdpbf16ps) with 512-bit vectors. Empty: no such CPU.
    """
    compiler = find_compiler()
    if compiler is None or Isa.AVX512_BF16 not in runnable_isas():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "peak.cpp", Path(folder) / "peak.so"
        source.write_text(_SOURCE)
        flags = ("-O3", "-shared", "-fPIC", f"-DCHAINS={_CHAINS}", "-mavx512f", "-mavx512vnni", "-mavx512bf16")
        subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        return {
            name: round(
                max(_rate(getattr(loaded, function), _OPERATIONS[function], threads) for _ in range(tries))
            )
            for name, function in (("int8", "bytes"), ("bfloat16", "halves"))
        }


def _rate(function: "ctypes._NamedFuncPointer", operations: int, threads: int) -> float:
    others = [
        threading.Thread(target=function, args=(ctypes.c_long(_REPEATS), number)) for number in range(threads - 1)
    ]
    began = time.perf_counter()
    for each in others:
        each.start()
    function(ctypes.c_long(_REPEATS), 1)
    for each in others:
        each.join()
    return threads * _REPEATS * _CHAINS * operations / (time.perf_counter() - began) / 1e9


CONTEXT = 128  # tokens before a decoded row
BLOCK_SIZE = 32
TIMED = ("embed", "linear", "rms_norm", "gate", "rope_append", "attend")
READ_BYTES = 256 << 20

Record = dict[str, Any]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 2, 3, 4, 6, 7, 8, 12, 13, 16, 32, 64])
    parser.add_argument("--prompts", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--library", action="append", default=[], metavar="NAME=FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    most = max((*args.rows, *args.prompts))
    ours = library_path(cache_dir=cache_dir() / "kernels")
    others = dict(each.split("=", 1) for each in args.library)
    with torch.inference_mode():
        arms = {"bfloat16": _Arm(args.model, ours, args.threads, "none", most)}
        arms["as stored"] = _Arm(args.model, ours, args.threads, "gguf", most)
        arms |= {name: _Arm(args.model, Path(path), args.threads, "gguf", most) for name, path in others.items()}
        found: Record = {
            **about("kernels.steps"),
            "model": args.model.name,
            "weight_mb": {name: round(arm.weight_bytes / 1e6, 1) for name, arm in arms.items()},
            "instructions": LOW_BIT_INSTRUCTIONS[chosen_isa()],
            "threads": args.threads,
            "read_gb_s": round(read_bandwidth(args.threads, READ_BYTES), 1),
            "peak_gop_s": register_peaks(args.threads),
        }
        llama = [_llama(args.llama_bench, args.model, args)]
        found["decoding"] = [_measured(arms, rows, CONTEXT, args.rounds, found) for rows in args.rows]
        found["prompts"] = [_measured(arms, rows, None, args.rounds, found) for rows in args.prompts]
        llama += [_llama(args.llama_bench, args.model, args)]
    if args.llama_bench is not None:
        found["llama.cpp tok/s"] = {key: [each[key] for each in llama] for key in llama[0]}
    write_json(args.out, found)


class _Arm:
    """A model on the native backend, twice: as it is served, and with every operation timed."""

    def __init__(self, path: Path, library: Path, threads: int, quantization: str, most_rows: int) -> None:
        self._backend = NativeBackend(library, num_threads=threads)
        self._timed = TimedBackend(self._backend)
        self._decoders = [
            _load(path, backend, quantization, most_rows) for backend in (self._backend, self._timed)
        ]
        spec = self._decoders[0].spec
        self.weight_bytes = self._decoders[0].weight_bytes
        attention = spec.attention
        layer = spec.hidden_size * (attention.q_size * 2 + 2 * attention.kv_size + 3 * spec.feed_forward.size)
        self.layers_flop, self.head_flop = 2 * layer * spec.num_layers, 2 * spec.vocab_size * spec.hidden_size
        self._cache: Any = self._backend.allocate_kv(
            KvShape(
                heads=spec.kv_heads,
                num_blocks=most_rows * (CONTEXT // BLOCK_SIZE + 1),
                block_size=BLOCK_SIZE,
                dtype=torch.bfloat16,
            )
        )

    def step(self, rows: int, context: int | None) -> float:
        """Seconds of a step."""
        return self._run(self._decoders[0], rows, context)

    def parts(self, rows: int, context: int | None) -> dict[str, float]:
        """Seconds by operation, of a step of the same kind."""
        self._timed.seconds.clear()
        whole = self._run(self._decoders[1], rows, context)
        found = dict(self._timed.seconds)
        return found | {"else": whole - sum(found.values())}

    def _run(self, decoder: Decoder, rows: int, context: int | None) -> float:
        layout, kept = _layout(rows, context)
        ids = torch.arange(rows) * 37 % decoder.spec.vocab_size
        began = time.perf_counter()
        plan: Any = self._backend.plan(layout, BLOCK_SIZE)
        hidden = decoder.embed(ids)
        hidden = decoder.run_layers(hidden, 0, decoder.spec.num_layers, self._cache, plan)
        decoder.logits(hidden[-kept:])
        return time.perf_counter() - began


class TimedBackend:
    """A native backend whose operations are timed; without units of several operations."""

    def __init__(self, backend: NativeBackend, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.blocks = SeparateBlocks(cast(Backend, self))
        self.layers = SeparateLayers(cast(Backend, self), self.blocks)
        self._backend, self._clock = backend, clock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        return self._timing(name, found) if name in TIMED else found

    def _timing(self, name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **more: Any) -> Any:
            kind = f"{arguments[1].columns}x{arguments[1].depth}" if name == "linear" else name
            began = self._clock()
            found = operation(*arguments, **more)
            self.seconds[kind] += self._clock() - began
            return found

        setattr(self, name, run)
        return run


def _load(path: Path, backend: Any, quantization: str, most_rows: int) -> Decoder:
    return load_decoder(
        path,
        backend,
        torch.bfloat16,
        max_model_len=max(most_rows, CONTEXT + 1),
        max_rows=most_rows,
        max_logit_rows=min(most_rows, 64),
        quantization=quantization,
        progress=lambda *_: None,
    )


def _layout(rows: int, context: int | None) -> tuple[RowLayout, int]:
    """A row each of `rows` sequences after `context` tokens, or a prompt of `rows` tokens; rows with logits."""
    if context is None:
        starts, positions = torch.tensor([0, rows]), torch.arange(rows)
        blocks = torch.arange(-(-rows // BLOCK_SIZE))[None]
    else:
        starts, positions = torch.arange(rows + 1), torch.full((rows,), context)
        blocks = torch.arange(rows * (context // BLOCK_SIZE + 1)).view(rows, -1)
    layout = RowLayout(
        query_start=starts.int(),
        seq_len=(positions[starts[1:] - 1] + 1).int(),
        positions=positions.int(),
        block_table=blocks.int(),
    )
    return layout, len(starts) - 1


def _measured(
    arms: dict[str, _Arm], rows: int, context: int | None, rounds: int, machine: Record
) -> dict[str, Record | int]:
    steps: dict[str, list[float]] = {name: [] for name in arms}
    parts: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    repeats = max(1, 32 // rows) if context is not None else 1
    for number in range(rounds + 1):
        for name, arm in arms.items():
            for _ in range(repeats):
                seconds = arm.step(rows, context)
                if number > 0:  # the first round warms
                    steps[name].append(seconds)
        for name, arm in arms.items():
            parts[name].append(arm.parts(rows, context))
    record: dict[str, Record | int] = {"rows": rows}
    for name, arm in arms.items():
        record[name] = _summary(arm, steps[name], parts[name][1:], rows, context, machine)
        print(rows, name, record[name], flush=True)
    return record


def _summary(
    arm: _Arm, steps: list[float], parts: list[dict[str, float]], rows: int, context: int | None, machine: Record
) -> Record:
    fastest = min(steps)
    least = {key: min(each[key] for each in parts) for key in parts[0]}
    found: Record = {
        "median_ms": round(statistics.median(steps) * 1e3, 3),
        "min_ms": round(fastest * 1e3, 3),
        "tok_s": round(rows / fastest, 1),
        "of_floor": round(fastest * machine["read_gb_s"] * 1e9 / arm.weight_bytes, 2),
        "parts_min_ms": {key: round(seconds * 1e3, 3) for key, seconds in least.items()},
    }
    flop = rows * arm.layers_flop + (rows if context is not None else 1) * arm.head_flop
    seconds = sum(time for key, time in least.items() if key[0].isdigit())
    found["products_gop_s"] = round(flop / seconds / 1e9)
    if (peak := machine["peak_gop_s"].get("int8")) is not None:
        found["of_peak"] = round(flop / seconds / 1e9 / peak, 3)
    return found


def _llama(program: Path | None, model: Path, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a second by llama-bench's own account: of one sequence, and of prompts."""
    if program is None:
        return {}
    prompts = ",".join(str(length) for length in args.prompts)
    command = [str(program), "-m", str(model), "-t", str(args.threads), "-n", "64", "-p", prompts, "-o", "json"]
    done = subprocess.run([*command, "-r", "3"], capture_output=True, text=True, check=True)
    return {
        f"prompt {each['n_prompt']}" if each["n_prompt"] else "decoding": round(max(each["samples_ts"]), 1)
        for each in json.loads(done.stdout)
    }
