"""Time of a whole step that verifies drafts of one sequence, next to a step of one row, with weights as stored.

    python -m benchmarks.kernels.verified_steps MODEL.gguf OUT.json [--rows 1 2 4 8] [--rounds 9]

A step has the sequence's next row and behind it rows - 1 drafts, all of which are refused, and logits of all rows.
Steps begin after CONTEXT tokens; those of other numbers of rows take turns, STEPS at a time. Medians over rounds.
"""

import statistics
from pathlib import Path

import numpy as np
import torch

from benchmarks.runner import about, command_line, timed_turns, write_json
from faser.config.environment import cache_dir
from faser.engine.execution.models.layers import mixer_shapes
from faser.engine.execution.models.loader import load_decoder
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.runner.runner import Runner
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import chosen_isa, library_path
from faser.kernels.interface.delta_net import StateShape
from faser.kernels.interface.kv_cache import KvShape

CONTEXT, STEPS = 128, 16
_BLOCK_SIZE, _MOST_POSITIONS = 32, 8192


class VerifiedSteps:
    """Steps of one number of rows, on a model that others use too, in a slot of their own."""

    def __init__(self, runner: Runner, table: BlockTable, slot: int, rows: int) -> None:
        self._runner, self._table, self._slot, self._rows = runner, table, slot, rows
        self._start = 0
        self._run(CONTEXT, 0)
        self._start = CONTEXT

    def turn(self) -> None:
        for _ in range(STEPS):
            self._run(self._rows, self._rows - 1)
            self._runner.logits(range(self._rows))
            self._start += 1

    def _run(self, rows: int, drafts: int) -> None:
        starts, counts = (np.array([each], np.int32) for each in (self._start, rows))
        token_ids = np.arange(rows) * 37 % self._runner.vocab_size
        self._runner.forward(self._table.lay_out([self._slot], starts, counts, token_ids, num_drafts=[drafts]))


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    backend = NativeBackend(library_path(cache_dir=cache_dir() / "kernels"), num_threads=args.threads)
    decoder = load_decoder(
        args.model,
        backend,
        torch.bfloat16,
        max_model_len=_MOST_POSITIONS,
        max_rows=CONTEXT,
        quantization="gguf",
        progress=lambda *_: None,
    )
    count, blocks = len(args.rows), -(-(CONTEXT + (args.rounds + 1) * STEPS + max(args.rows)) // _BLOCK_SIZE)
    kv = KvShape(
        heads=decoder.spec.kv_heads, num_blocks=count * blocks, block_size=_BLOCK_SIZE, dtype=torch.bfloat16
    )
    states = StateShape(
        layers=mixer_shapes(decoder.spec),
        num_slots=count,
        most_drafts=max(args.rows) - 1,
        dtype=torch.bfloat16,
    )
    runner = Runner(decoder, backend, kv, states=states if decoder.spec.has_states else None)
    table = BlockTable(count, blocks)
    for slot in range(count):
        table.append(slot, tuple(range(slot * blocks, (slot + 1) * blocks)))
    arms = {rows: VerifiedSteps(runner, table, slot, rows) for slot, rows in enumerate(args.rows)}
    seconds = timed_turns({str(rows): each.turn for rows, each in arms.items()}, args.rounds)
    found = {rows: statistics.median(each) / STEPS for rows, each in seconds.items()}
    one = found[str(args.rows[0])]
    times = [
        {"rows": int(rows), "step_ms": round(1e3 * each, 3), "times_the_first": round(each / one, 3)}
        for rows, each in found.items()
    ]
    write_json(
        args.out,
        {
            **about("benchmarks.kernels.verified_steps"),
            "model": args.model.name,
            "isa": chosen_isa(),
            "threads": args.threads,
            "times": times,
        },
    )
    for each in times:
        print(each)


if __name__ == "__main__":
    main()
