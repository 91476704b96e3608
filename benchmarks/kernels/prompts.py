"""Compare reading a prompt with its matrix products alone, by model, instruction set, length and threads.

    python -m benchmarks.kernels.prompts OUT.json MODEL.gguf [MODEL.gguf ...] [--weights gguf none]
        [--isas avx512bf16 avx2] [--threads 1 2] [--lengths 128 512 1500 4000] [--layers 6] [--rounds 5]

A prompt is read as the server reads it: in chunks of --chunk rows, over blocks of 16 tokens, with one row of
logits at the end. Three arms take turns, chunk by chunk: the model as it is served; its products alone, each
called with as many rows and the same weights; and the model with every operation timed by itself. The fastest of
the rounds of each chunk counts, and the chunks are added up, so that a busy moment of the machine changes nothing.
One thread is timed by its CPU time, several by the wall clock.

`speed` is the time of the products alone over the time of the prompt: 1.0 means that everything else is free.
`host` is Python around the one call for all layers. GFLOP/s of products and of attention, whose time includes its
softmax, say how much of the loss is arithmetic.

--weights: gguf, as the file stores them; none, in bfloat16. --layers: only the first ones are timed, and count for
all of them.
"""

import copy
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.kernels.steps import TimedBackend
from benchmarks.runner import about, command_line, write_json
from faser.config.environment import cache_dir
from faser.engine.execution.models.decoder import Decoder
from faser.engine.execution.models.loader import load_decoder
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import Isa, chosen_isa, library_path
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionShape, PackedLinear, RowLayout

BLOCK_SIZE = 16
_PARTS = {
    "rms_norm": "norms",
    "gate": "gate",
    "rope_append": "rope, cache",
    "attend": "attention",
    "embed": "embed",
}
_COLUMNS = ("products", "attention", "norms", "gate", "rope, cache", "embed", "host")

Record = dict[str, Any]
Seconds = dict[str, float]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--weights", nargs="+", choices=("gguf", "none"), default=["gguf", "none"])
    parser.add_argument("--isas", type=Isa, nargs="+", default=[chosen_isa(), Isa.AVX2])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 512, 1500, 4000])
    parser.add_argument("--chunk", type=int, default=256, help="rows of a step [256]")
    parser.add_argument("--layers", type=int, help="only the first ones [all]")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    found: Record = {
        **about("benchmarks.kernels.prompts"),
        "chunk": args.chunk,
        "rounds": args.rounds,
        "cells": [],
    }
    table = args.out.with_suffix(".md")
    with torch.inference_mode():
        for model in args.models:
            for weights in args.weights:
                for isa in args.isas:
                    for threads in args.threads:
                        setting = {"model": model.stem if model.stem != "model" else model.parent.name}
                        setting |= {"weights": weights, "isa": str(isa), "threads": threads}
                        reader = _Reader(model, isa, threads, weights, args)
                        for length in args.lengths:
                            found["cells"].append(cell := {**setting, **reader.measured(length, args.rounds)})
                            print(_row(cell), flush=True)
                            write_json(args.out, found)
                            table.write_text(_table(found["cells"]), encoding="utf-8")


class _Reader:
    """A model that reads prompts in three ways: as served, its products alone, and operation by operation."""

    def __init__(self, path: Path, isa: Isa, threads: int, weights: str, args: Any) -> None:
        torch.set_num_threads(threads)
        library = library_path(isa, cache_dir=cache_dir() / "kernels")
        self._clock = time.thread_time if threads == 1 else time.perf_counter
        self._backend, self._rows = NativeBackend(library, num_threads=threads), args.chunk
        self._timed = TimedBackend(self._backend, self._clock)
        most = max(args.lengths)
        self._decoder = load_decoder(
            path,
            self._backend,
            torch.bfloat16,
            max_model_len=most,
            max_rows=args.chunk,
            max_logit_rows=1,
            quantization=weights,
            progress=lambda *_: None,
        )
        self._slow = _timed_twin(self._decoder, self._timed)
        spec = self._decoder.spec
        self._layers = min(args.layers or spec.num_layers, spec.num_layers)
        shape = KvShape(
            heads=spec.kv_heads, num_blocks=-(-most // BLOCK_SIZE), block_size=BLOCK_SIZE, dtype=torch.bfloat16
        )
        self._cache: Any = self._backend.allocate_kv(shape)
        self._products = _Products(self._decoder, self._backend, self._layers, args.chunk)

    def measured(self, length: int, rounds: int) -> Record:
        chunks = [(start, min(self._rows, length - start)) for start in range(0, length, self._rows)]
        sums: defaultdict[str, float] = defaultdict(float)
        for start, rows in chunks:
            for name, seconds in self._least(start, rows, start + rows == length, rounds).items():
                sums[name] += seconds
        spec, ends, head = self._decoder.spec, sums.pop("ends"), sums.pop("head")
        times = spec.num_layers / self._layers
        prompt = ends + (sums.pop("prompt") - ends) * times
        alone = head + (sums.pop("alone") - head) * times
        parts = {name: seconds * times for name, seconds in sums.items()}
        products = head + (sums["products"] - head) * times
        parts |= {"products": products, "embed": sums["embed"], "host": ends - sums["embed"] - head}
        pairs = sum(2 * heads * size for heads, size in self._products.attention) * times * length * (length + 1)
        return {
            "length": length,
            "prompt_ms": round(prompt * 1e3, 2),
            "products_alone_ms": round(alone * 1e3, 2),
            "speed": round(alone / prompt, 3),
            "products_gflop_s": round(2 * self._products.weights * times * length / (alone - head) / 1e9),
            "attention_gflop_s": round(pairs / parts["attention"] / 1e9),
            "parts_ms": {name: round(seconds * 1e3, 2) for name, seconds in parts.items()},
        }

    def _least(self, start: int, rows: int, is_last: bool, rounds: int) -> Seconds:
        """Read one chunk in all ways, round by round, and return the least time of each way and part."""
        least: Seconds = {}
        for number in range(rounds + 1):
            seen = {
                "prompt": self._took(lambda: self._read(self._decoder, start, rows, is_last)),
                "ends": self._took(lambda: self._read(self._decoder, start, rows, is_last, layers=0)),
                "alone": self._took(lambda: self._products.run(rows, is_last)),
                "head": self._took(self._products.run_head) if is_last else 0.0,
                **self._by_part(start, rows, is_last),
            }
            if number > 0:  # the first round warms
                least = {name: min(seconds, least.get(name, seconds)) for name, seconds in seen.items()}
        return least

    def _took(self, run: Callable[[], object]) -> float:
        began = self._clock()
        run()
        return self._clock() - began

    def _by_part(self, start: int, rows: int, is_last: bool) -> Seconds:
        self._timed.seconds.clear()
        self._read(self._slow, start, rows, is_last)
        found: defaultdict[str, float] = defaultdict(float)
        for name, seconds in self._timed.seconds.items():
            found[_PARTS.get(name, "products")] += seconds
        return found

    def _read(self, decoder: Decoder, start: int, rows: int, is_last: bool, layers: int | None = None) -> None:
        positions = torch.arange(start, start + rows, dtype=torch.int32)
        layout = RowLayout(
            query_start=torch.tensor([0, rows], dtype=torch.int32),
            seq_len=torch.tensor([start + rows], dtype=torch.int32),
            positions=positions,
            block_table=torch.arange(-(-(start + rows) // BLOCK_SIZE), dtype=torch.int32)[None],
        )
        ids = torch.arange(start, start + rows) * 37 % decoder.spec.vocab_size
        plan: Any = self._backend.plan(layout, BLOCK_SIZE)
        last = self._layers if layers is None else layers
        hidden = decoder.run_layers(decoder.embed(ids), 0, last, self._cache, plan)
        if is_last:
            decoder.logits(hidden[-1:])


class _Products:
    """All products of a model with packed weights, in order; their inputs are random."""

    def __init__(self, decoder: Decoder, backend: NativeBackend, layers: int, rows: int) -> None:
        self._backend = backend
        self._linears: list[PackedLinear] = []
        self.attention: list[tuple[int, int]] = []  # heads and their size, of each layer
        for layer in decoder._stack.layers[:layers]:
            assert layer.qkv is not None
            assert isinstance(layer.shape, AttentionShape), "models with delta nets are not measured"
            self._linears += [layer.qkv.linear, *layer.feed_forward.products]
            self.attention.append((layer.shape.num_heads, layer.shape.head_dim))
        assert decoder._head is not None
        self._head = decoder._head.linear
        self.weights = sum(each.columns * each.depth for each in self._linears)
        generator = torch.Generator().manual_seed(0)
        depths = {each.depth for each in (*self._linears, self._head)}
        widths = {each.columns for each in self._linears}
        self._x = {depth: torch.randn(rows, depth, generator=generator).bfloat16() for depth in depths}
        self._out = {width: torch.empty(rows, width, dtype=torch.bfloat16) for width in widths}
        self._logits = torch.empty(1, self._head.columns)

    def run(self, rows: int, with_head: bool) -> None:
        for each in self._linears:
            self._backend.linear(self._x[each.depth][:rows], cast(Any, each), self._out[each.columns][:rows])
        if with_head:
            self.run_head()

    def run_head(self) -> None:
        self._backend.linear(self._x[self._head.depth][:1], cast(Any, self._head), self._logits)


def _timed_twin(decoder: Decoder, timed: TimedBackend) -> Decoder:
    """Return the decoder over another backend; it shares weights and buffers."""
    twin = copy.copy(decoder)
    twin._backend, twin._blocks, twin._layers = cast(Any, timed), timed.blocks, timed.layers
    return twin


def _row(cell: Record) -> str:
    names = ("model", "weights", "isa", "threads", "length", "speed", "prompt_ms", "products_alone_ms")
    rates = f"GFLOP/s {cell['products_gflop_s']}, attention {cell['attention_gflop_s']}"
    parts = (f"{name} {cell['parts_ms'][name]:.1f}" for name in _COLUMNS)
    return ", ".join((*(str(cell[name]) for name in names), rates, *parts))


def _table(cells: list[Record]) -> str:
    names = ["model", "weights", "ISA", "threads", "tokens", "speed", "ms", "products alone", *_COLUMNS]
    names += ["GFLOP/s of products", "of attention"]
    lines = [f"| {' | '.join(names)} |", "| --- " * len(names) + "|"]
    for cell in cells:
        values = [cell[name] for name in ("model", "weights", "isa", "threads", "length")]
        values += [f"{cell['speed']:.2f}", *(f"{cell[name]:.0f}" for name in ("prompt_ms", "products_alone_ms"))]
        values += [f"{cell['parts_ms'][name]:.1f}" for name in _COLUMNS]
        values += [cell["products_gflop_s"], cell["attention_gflop_s"]]
        lines.append(f"| {' | '.join(map(str, values))} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
