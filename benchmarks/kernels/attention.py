"""Times attention over keys and values in bfloat16 and in int8, at contexts of 1,024 to 8,192 tokens.

    python -m benchmarks kernels.attention OUT.json [--threads 2] [--rounds 9] [--heads 9x3x64 12x2x128]
        [--library FILE]

Kinds of step: one row, eight rows of as many sequences, and 256 rows that read a prompt. Each is run over as many
layers as have 256 MiB of keys and values in bfloat16, so that these come from memory. Types take turns, round by
round; medians are kept. `append` is what rotating queries and keys and storing keys and values takes. --heads:
query heads x KV heads x head size; the defaults are those of SmolLM2-135M and Qwen2.5-1.5B.
"""

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import about, command_line, timed_turns, write_json
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import chosen_isa, library_path
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import AttentionShape, RowLayout

CONTEXTS = (1024, 2048, 4096, 8192)
STEPS = ((1, 1), (8, 1), (1, 256))  # sequences, rows of each
BLOCK_SIZE = 16
CACHE_BYTES = 256 << 20
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--heads", nargs="+", default=["9x3x64", "12x2x128"])
    parser.add_argument("--contexts", nargs="+", type=int, default=list(CONTEXTS))
    parser.add_argument("--library", type=Path, help="compiled kernels; else those of this CPU, compiled now")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        native = NativeBackend(args.library or library_path(cache_dir=Path(cache)), num_threads=args.threads)
        found = []
        for heads in args.heads:
            num_heads, num_kv_heads, head_dim = map(int, heads.split("x"))
            shape = AttentionShape(
                num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, scale=head_dim**-0.5
            )
            for sequences, rows in STEPS:
                for context in args.contexts:
                    record = {"heads": heads, "sequences": sequences, "rows": rows, "context": context}
                    record |= _measure(native, shape, sequences, rows, context, args.rounds)
                    print(" ".join(f"{key}={value}" for key, value in record.items()), flush=True)
                    found.append(record)
    report = {
        **about("kernels.attention"),
        "isa": chosen_isa(),
        "threads": args.threads,
        "rounds": args.rounds,
        "times_us_a_layer": found,
    }
    write_json(args.out, report)


def _measure(
    native: NativeBackend, shape: AttentionShape, sequences: int, rows: int, context: int, rounds: int
) -> dict[str, Any]:
    """Microseconds a layer, and how many times as long bfloat16 takes."""
    blocks_each = -(-context // BLOCK_SIZE)
    layout = RowLayout(
        query_start=torch.arange(sequences + 1, dtype=torch.int32) * rows,
        seq_len=torch.full((sequences,), context, dtype=torch.int32),
        positions=torch.arange(context - rows, context, dtype=torch.int32).repeat(sequences),
        block_table=torch.randperm(sequences * blocks_each).to(torch.int32).view(sequences, blocks_each),
    )
    layer_bytes = _kv(shape, sequences * blocks_each, 1, torch.bfloat16).total_bytes
    layers = max(1, CACHE_BYTES // layer_bytes)
    plan = native.plan(layout, BLOCK_SIZE)
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    turns = torch.randn(context, shape.head_dim // 2)
    angles = torch.cat((turns.cos(), turns.sin()), -1)
    qkv = torch.randn(sequences * rows, width).bfloat16()
    out = torch.empty(len(qkv), shape.num_heads * shape.head_dim, dtype=torch.bfloat16)
    queries = qkv[:, : shape.num_heads * shape.head_dim]
    caches = {}
    for name, dtype in DTYPES.items():
        caches[name] = native.allocate_kv(_kv(shape, sequences * blocks_each, layers, dtype))
        _fill(native, caches[name], shape, layout, layers, width)

    def attend(name: str) -> None:
        for layer in range(layers):
            native.attend(queries, caches[name], layer, shape, plan, out)

    def append(name: str) -> None:
        for layer in range(layers):
            native.rope_append(qkv, angles, caches[name], layer, shape, plan)

    record: dict[str, Any] = {}
    for label, run in (("attend", attend), ("append", append)):
        seconds = timed_turns({name: partial(run, name) for name in DTYPES}, rounds)
        times = {name: statistics.median(each) / layers for name, each in seconds.items()}
        record |= {f"{label}_{name}": round(1e6 * seconds, 2) for name, seconds in times.items()}
        record[f"{label}_gain"] = round(times["bfloat16"] / times["int8"], 3)
    return record


def _fill(
    native: NativeBackend, cache: Any, shape: AttentionShape, layout: RowLayout, layers: int, width: int
) -> None:
    """Random keys and values everywhere, the same in each layer."""
    lengths = layout.seq_len
    whole = RowLayout(
        query_start=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
        seq_len=lengths,
        positions=torch.cat([torch.arange(int(length)) for length in lengths]).int(),
        block_table=layout.block_table,
    )
    plan = native.plan(whole, BLOCK_SIZE)
    qkv = torch.randn(int(lengths.sum()), width).bfloat16()
    for layer in range(layers):
        native.rope_append(qkv, None, cache, layer, shape, plan)


def _kv(shape: AttentionShape, num_blocks: int, num_layers: int, dtype: torch.dtype) -> KvShape:
    return KvShape(
        heads=((shape.num_kv_heads, shape.head_dim),) * num_layers,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )
