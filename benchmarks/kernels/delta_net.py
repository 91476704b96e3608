"""Times the gated delta nets of the native kernels, layer by layer, by rows and sequences.

    python -m benchmarks kernels.delta_net OUT.json [--threads 2] [--rounds 9] [--heads 16x32x128] [--layers 24]
        [--library FILE]

Each sequence decodes on: a step has its next row, and drafts behind that. `refused` drafts are all taken back by
the next step; `accepted` ones all stay, so that the state takes in as many rows. `verification` says what drafts
cost beyond a step of one row, in both cases: where refused ones cost no more than accepted ones, a rollback is
free. Steps take turns, round by round; medians are kept. Layers have states of their own, which come from memory.
--heads: key heads x value heads x channels of a head; the defaults are those of Qwen3.5-4B.
"""

import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.runner import about, command_line, timed_turns, write_json
from faser.engine.execution.runner.state_cache import StateCache
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import chosen_isa, library_path
from faser.kernels.interface.delta_net import CHUNK, DeltaNet, DeltaShape, StateShape
from faser.kernels.interface.shapes import RowLayout

# Sequences, rows of each, and whether all but the first one of these are refused.
DRAFTED_ROWS = (2, 4, 8)
STEPS = (
    (1, 1, False),
    *((1, rows, refused) for rows in DRAFTED_ROWS for refused in (False, True)),
    (4, 1, False),
    (16, 1, False),
)
PROMPT_ROWS = 256
KERNEL = 4


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--heads", default="16x32x128")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--library", type=Path, help="compiled kernels; else those of this CPU, compiled now")
    args = parser.parse_args()
    k_heads, v_heads, channels = map(int, args.heads.split("x"))
    shape = DeltaShape(
        num_k_heads=k_heads, num_v_heads=v_heads, k_head_dim=channels, v_head_dim=channels, kernel=KERNEL
    )
    with tempfile.TemporaryDirectory() as cache, torch.inference_mode():
        native = NativeBackend(args.library or library_path(cache_dir=Path(cache)), num_threads=args.threads)
        steps = [Steps(native, shape, *step, layers=args.layers) for step in (*STEPS, (1, PROMPT_ROWS, False))]
        # As many steps in a turn as a chunk has rows: the state is written once in that many.
        seconds = timed_turns({each.name: each.turn for each in steps}, args.rounds)
    micros = {name: 1e6 * statistics.median(each) / CHUNK / args.layers for name, each in seconds.items()}
    for name, each in micros.items():
        print(f"{name}: {each:.1f} us a layer", flush=True)
    report = {
        **about("kernels.delta_net"),
        "isa": chosen_isa(),
        "threads": args.threads,
        "rounds": args.rounds,
        "heads": args.heads,
        "layers": args.layers,
        "state_bytes_a_sequence": args.layers * 4 * v_heads * channels**2,
        "times": [{"step": name, "us_a_layer": round(each, 1)} for name, each in micros.items()],
        "verification": [_verification(rows, micros) for rows in DRAFTED_ROWS],
    }
    write_json(args.out, report)


def _verification(rows: int, micros: Mapping[str, float]) -> dict[str, Any]:
    """micros: of a layer, by the names of steps."""
    one = micros[step_name(1, 1, False)]
    more = {refused: micros[step_name(1, rows, refused)] - one for refused in (False, True)}
    return {
        "drafts": rows - 1,
        "us_more_than_one_row_if_accepted": round(more[False], 1),
        "us_more_than_one_row_if_refused": round(more[True], 1),
    }


def step_name(sequences: int, rows: int, refused: bool) -> str:
    drafts = num_drafts(rows)
    behind = f", {drafts} drafts {'refused' if refused else 'accepted'}" if drafts else ""
    return f"{sequences} sequences of {rows} rows{behind}"


def num_drafts(rows: int) -> int:
    """All rows but the first one; of a prompt none."""
    return rows - 1 if rows < PROMPT_ROWS else 0


class Steps:
    """Steps of one kind, one after the other."""

    def __init__(
        self, native: NativeBackend, shape: DeltaShape, sequences: int, rows: int, refused: bool, *, layers: int
    ) -> None:
        self._native, self._shape, self._layers = native, shape, layers
        self._sequences, self._rows, self._refused = sequences, rows, refused
        self._drafts = num_drafts(rows)
        self.name = step_name(sequences, rows, refused)
        most = StateShape(
            layers=(shape,) * layers, num_slots=sequences, most_drafts=self._drafts, dtype=torch.bfloat16
        )
        self._cache = StateCache(native, most)
        self._net = DeltaNet(
            conv=torch.randn(KERNEL, shape.channels) / 2,
            decay=-torch.rand(shape.num_v_heads),
            dt_bias=torch.randn(shape.num_v_heads),
            norm=torch.ones(shape.v_head_dim),
            eps=1e-6,
        )
        self._start = 0
        self._qkv = torch.randn(sequences * rows, shape.columns).bfloat16()
        self._rates = torch.randn(sequences * rows, 2 * shape.num_v_heads)
        self._out = torch.empty(sequences * rows, shape.q_size, dtype=torch.bfloat16)

    def turn(self) -> None:
        for _ in range(CHUNK):
            self._step()

    def _step(self) -> None:
        ends = torch.full((self._sequences,), self._start + self._rows, dtype=torch.int32)
        layout = RowLayout(
            query_start=torch.arange(self._sequences + 1, dtype=torch.int32) * self._rows,
            seq_len=ends,
            positions=torch.empty(0, dtype=torch.int32),
            block_table=torch.empty(0, dtype=torch.int32),
            slots=range(self._sequences),
            num_drafts=[self._drafts] * self._sequences,
        )
        step = self._cache.begin(layout)
        for layer in range(self._layers):
            self._native.delta_net(self._qkv, self._rates, self._shape, self._net, layer, step, self._out)
        self._start += 1 if self._refused else self._rows
