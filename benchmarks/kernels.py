"""Measures the kernels of each CPU backend on the shapes of SmolLM2-135M and writes what it saw as JSON.

    python benchmarks/kernels.py OUT.json [--threads 2] [--rounds 15] [--sections stack] [--backends native]

`--library NAME=FILE`, once or more, adds the native backend with that compiled library, such as one from a wheel.
Backends take turns, round by round, so that a busy moment of the machine hits them alike; the median and the
minimum of the rounds are kept. Weights are random: only their bytes matter here. Every product is repeated over as
many copies of the weight as the model has layers, so that it comes from memory and not from a cache.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import chosen_isa, library_path
from faser.kernels.interface.backend import Backend
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionShape, RowLayout
from faser.kernels.torch_backend import TorchBackend

HIDDEN, INNER, LAYERS, VOCAB = 576, 1536, 30, 49152
SHAPE = AttentionShape(num_heads=9, num_kv_heads=3, head_dim=64, scale=64**-0.5)
QKV = (SHAPE.num_heads + 2 * SHAPE.num_kv_heads) * SHAPE.head_dim
PRODUCTS = {"qkv": (QKV, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
ROWS = (1, 4, 16, 64, 256)
CONTEXTS = (128, 1024, 8192)
BLOCK_SIZE = 32
STACK_CONTEXT = 128
DTYPE = torch.bfloat16
SETTLE_S = 0.005  # lets the threads of the backend that ran before fall asleep

Timed = Callable[[], object]
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line of the result. run_of: by backend, what to time; repeats: how often it does the work."""

    labels: Record
    run_of: dict[str, Timed]
    repeats: int = 1
    flop: float = 0.0
    num_bytes: float = 0.0


@dataclass(slots=True)
class Stack:
    """All layers and the vocabulary head with random weights, as the decoder runs them."""

    backend: Backend
    layers: list[dict[str, Any]] = field(init=False)
    head: Any = field(init=False)
    norm: Tensor = field(init=False)
    angles: Tensor = field(init=False)
    buffers: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.layers = [
            {name: self.backend.pack(_random(*size) * size[1] ** -0.5) for name, size in PRODUCTS.items()}
            for _ in range(LAYERS)
        ]
        self.head = self.backend.pack(_random(VOCAB, HIDDEN))
        self.norm = torch.ones(HIDDEN, dtype=DTYPE)
        turns = torch.randn(16384, SHAPE.head_dim // 2)
        self.angles = torch.cat((turns.cos(), turns.sin()), -1)
        widths = {
            "hidden": HIDDEN,
            "normed": HIDDEN,
            "mixed": HIDDEN,
            "qkv": QKV,
            "gate_up": 2 * INNER,
            "inner": INNER,
        }
        self.buffers = {name: torch.zeros(max(ROWS), width, dtype=DTYPE) for name, width in widths.items()}
        self.buffers["logits"] = torch.zeros(max(ROWS), VOCAB)

    def step(self, layout: RowLayout, cache: Any, token_ids: Tensor) -> Tensor:
        backend = self.backend
        hidden, normed, mixed, qkv, gate_up, inner, logits = (
            self.buffers[name][: len(token_ids)]
            for name in ("hidden", "normed", "mixed", "qkv", "gate_up", "inner", "logits")
        )
        plan = backend.plan(layout, BLOCK_SIZE)
        backend.embed(token_ids, self.head, hidden)
        for number, layer in enumerate(self.layers):
            backend.rms_norm(hidden, self.norm, 1e-5, normed)
            backend.linear(normed, layer["qkv"], qkv)
            queries = backend.rope_append(qkv, self.angles, cache, number, SHAPE, plan)
            backend.attend(queries, cache, number, SHAPE, plan, mixed)
            backend.linear(mixed, layer["out"], hidden, residual=hidden)
            backend.rms_norm(hidden, self.norm, 1e-5, normed)
            backend.linear(normed, layer["gate_up"], gate_up)
            backend.silu_mul(gate_up, inner)
            backend.linear(inner, layer["down"], hidden, residual=hidden)
        backend.rms_norm(hidden, self.norm, 1e-5, normed)
        return backend.linear(normed, self.head, logits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--backends", nargs="*", default=["native", "torch"], choices=["native", "torch"])
    parser.add_argument("--library", action="append", default=[], metavar="NAME=FILE")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        native = NativeBackend(library_path(cache_dir=Path(cache)), num_threads=args.threads)
        backends: dict[str, Backend] = {"native": native, "torch": TorchBackend()}
        chosen = {name: backends[name] for name in args.backends}
        for name, _, file in (each.partition("=") for each in args.library):
            chosen[name] = NativeBackend(Path(file), num_threads=args.threads)
        results: Record = {"machine": _machine(args.threads), "read_gb_s": _bandwidth()}
        print(f"read bandwidth {results['read_gb_s']:.1f} GB/s")
        for name in args.sections:
            results[name] = [_measure(case, args.rounds) for case in SECTIONS[name](chosen)]
    args.out.write_text(json.dumps(results, indent=1) + "\n")


def _measure(case: Case, rounds: int) -> Record:
    """Time every backend of a case in turn, rounds times; print and return the line."""
    seconds: dict[str, list[float]] = {name: [] for name in case.run_of}
    for number in range(rounds + 1):
        for name, run in case.run_of.items():
            time.sleep(SETTLE_S)
            began = time.perf_counter()
            run()
            elapsed = (time.perf_counter() - began) / case.repeats
            if number > 0:  # the first round warms
                seconds[name].append(elapsed)
    record: Record = dict(case.labels)
    for name, times in seconds.items():
        median, least = statistics.median(times), min(times)
        record[name] = {"median_us": round(median * 1e6, 1), "min_us": round(least * 1e6, 1)}
        if case.num_bytes:
            record[name]["gb_s"] = round(case.num_bytes / median / 1e9, 1)
        if case.flop:
            record[name]["gflop_s"] = round(case.flop / median / 1e9, 1)
    print(" ".join(f"{key}={value}" for key, value in record.items()))
    return record


def _product_cases(backends: dict[str, Backend]) -> Iterable[Case]:
    for name, (columns, depth) in {**PRODUCTS, "head": (VOCAB, HIDDEN)}.items():
        copies = 1 if name == "head" else LAYERS
        weights = [_random(columns, depth) for _ in range(copies)]
        packed = {key: [backend.pack(weight) for weight in weights] for key, backend in backends.items()}
        for rows in ROWS:
            x, out = _random(rows, depth), torch.empty(rows, columns, dtype=DTYPE)

            def run(key: str, x: Tensor = x, out: Tensor = out, packed: dict[str, list[Any]] = packed) -> None:
                for weight in packed[key]:
                    backends[key].linear(x, weight, out)

            yield Case(
                labels={"product": name, "rows": rows},
                run_of={key: _bind(run, key) for key in backends},
                repeats=copies,
                flop=2.0 * rows * columns * depth,
                num_bytes=2.0 * columns * depth,
            )


def _attention_cases(backends: dict[str, Backend]) -> Iterable[Case]:
    for rows_each, sequences in ((1, 1), (1, 16), (256, 1)):
        for context in CONTEXTS:
            layout, kv = _layout(sequences, rows_each, context, num_layers=1)
            qkv = _random(sequences * rows_each, QKV)
            ready = {}
            for key, backend in backends.items():
                cache, plan = backend.allocate_kv(kv), backend.plan(layout, BLOCK_SIZE)
                ready[key] = (cache, plan, torch.empty(len(qkv), SHAPE.num_heads * SHAPE.head_dim, dtype=DTYPE))
            queries = qkv[:, : SHAPE.num_heads * SHAPE.head_dim]

            def run(key: str, queries: Tensor = queries, ready: dict[str, Any] = ready) -> None:
                cache, plan, out = ready[key]
                backends[key].attend(queries, cache, 0, SHAPE, plan, out)

            seen = context - (rows_each - 1) / 2
            yield Case(
                labels={"attention_sequences": sequences, "rows_each": rows_each, "context": context},
                run_of={key: _bind(run, key) for key in backends},
                flop=4.0 * sequences * rows_each * seen * SHAPE.num_heads * SHAPE.head_dim,
                num_bytes=4.0 * sequences * context * SHAPE.num_kv_heads * SHAPE.head_dim,
            )


def _stack_cases(backends: dict[str, Backend]) -> Iterable[Case]:
    stacks = {key: Stack(backend) for key, backend in backends.items()}
    for rows in ROWS:
        layout, kv = _layout(rows, 1, STACK_CONTEXT, num_layers=LAYERS)
        caches = {key: backend.allocate_kv(kv) for key, backend in backends.items()}
        token_ids = torch.randint(VOCAB, (rows,))

        def run(
            key: str, layout: RowLayout = layout, caches: dict[str, Any] = caches, ids: Tensor = token_ids
        ) -> None:
            stacks[key].step(layout, caches[key], ids)

        yield Case(
            labels={"stack_rows": rows, "context": STACK_CONTEXT},
            run_of={key: _bind(run, key) for key in backends},
            flop=2.0 * rows * 134.5e6,
            num_bytes=2.0 * 134.5e6,
        )


SECTIONS: dict[str, Callable[[dict[str, Backend]], Iterable[Case]]] = {
    "products": _product_cases,
    "attention": _attention_cases,
    "stack": _stack_cases,
}


def _layout(sequences: int, rows_each: int, context: int, *, num_layers: int) -> tuple[RowLayout, KvShape]:
    """`sequences` sequences of `context` tokens whose last rows_each are this step's, in shuffled blocks."""
    blocks_each = -(-context // BLOCK_SIZE)
    layout = RowLayout(
        query_start=torch.arange(sequences + 1, dtype=torch.int32) * rows_each,
        seq_len=torch.full((sequences,), context, dtype=torch.int32),
        positions=torch.arange(context - rows_each, context, dtype=torch.int32).repeat(sequences),
        block_table=torch.randperm(sequences * blocks_each).to(torch.int32).view(sequences, blocks_each),
    )
    return layout, KvShape(
        num_layers=num_layers,
        num_blocks=sequences * blocks_each,
        block_size=BLOCK_SIZE,
        num_kv_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        dtype=DTYPE,
    )


def _bandwidth() -> float:
    """Best of several reads of 512 MiB by all threads of torch, GB/s."""
    memory = torch.ones(128 << 20)
    num_bytes = memory.numel() * memory.itemsize
    times = []
    for _ in range(8):
        began = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - began)
    return num_bytes / min(times) / 1e9


def _machine(threads: int) -> Record:
    return {"isa": chosen_isa(), "machine": platform.machine(), "threads": threads, "torch": torch.__version__}


def _random(*size: int) -> Tensor:
    return torch.randn(size).to(DTYPE)


def _bind(run: Callable[..., None], key: str) -> Timed:
    return lambda: run(key)


if __name__ == "__main__":
    main()
