"""Times the gated delta nets of the native kernels, layer by layer, by rows and sequences.

    python -m benchmarks.kernels.delta_net OUT.json [--threads 2] [--rounds 9] [--heads 16x32x128] [--layers 24]
        [--library FILE]

Each sequence decodes on: a step has its next row, and drafts behind that. `refused` drafts are all taken back by
the next step, which is what a rollback costs; `accepted` ones all stay, so that the state grows by as many rows.
Steps take turns, round by round; medians are kept. Layers have states of their own, which come from memory.
--heads: key heads x value heads x channels of a head; the defaults are those of Qwen3.5-4B.
"""

import statistics
import tempfile
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
STEPS = ((1, 1, False), (1, 2, False), (1, 2, True), (1, 4, False), (1, 4, True), (4, 1, False), (16, 1, False))
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
    found: list[dict[str, Any]] = []
    for each in steps:
        micros = 1e6 * statistics.median(seconds[each.name]) / CHUNK / args.layers
        found.append({"step": each.name, "us_a_layer": round(micros, 1)})
        print(f"{each.name}: {micros:.1f} us a layer", flush=True)
    report = {
        **about("benchmarks.kernels.delta_net"),
        "isa": chosen_isa(),
        "threads": args.threads,
        "rounds": args.rounds,
        "heads": args.heads,
        "layers": args.layers,
        "state_bytes_a_sequence": args.layers * 4 * v_heads * channels**2,
        "times": found,
    }
    write_json(args.out, report)


class Steps:
    """Steps of one kind, one after the other."""

    def __init__(
        self, native: NativeBackend, shape: DeltaShape, sequences: int, rows: int, refused: bool, *, layers: int
    ) -> None:
        self._native, self._shape, self._layers = native, shape, layers
        self._sequences, self._rows, self._refused = sequences, rows, refused
        self._drafts = rows - 1 if 1 < rows < PROMPT_ROWS else 0
        drafts = f", {self._drafts} drafts {'refused' if refused else 'accepted'}" if self._drafts else ""
        self.name = f"{sequences} sequences of {rows} rows{drafts}"
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


if __name__ == "__main__":
    main()
