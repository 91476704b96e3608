"""Time of a decoding step with LoRA adapters on every linear layer, beside the same step without.

    python -m benchmarks kernels.adapters MODEL OUT.json [--rounds 40] [--quantization none int8]

Arms of one number of rows take turns, round by round: without adapters; all rows with one; each row with one of
eight, in turn. Medians of the rounds are kept, and the medians of the ratios within a round. Adapters have random
weights. Each row is one of a sequence with 128 tokens before it. OUT.svg is the picture.
"""

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.steps import BLOCK_SIZE, CONTEXT
from benchmarks.runner import about, command_line, write_json
from benchmarks.spec_bench.chart import line_chart
from faser.config.environment import cache_dir
from faser.engine.execution.models.adapted import AdapterSizes
from faser.engine.execution.models.loader import load_decoder
from faser.kernels.cpu.backend import NativeBackend
from faser.kernels.cpu.build import library_path
from faser.kernels.interface.kv_cache import KvShape
from faser.kernels.interface.shapes import RowLayout
from faser.optional import or_else

_NUM_ADAPTERS = 8
_ROWS, _RANKS = (1, 4, 16), (8, 16, 64)

Record = dict[str, Any]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rows", type=int, nargs="*", default=list(_ROWS))
    parser.add_argument("--ranks", type=int, nargs="*", default=list(_RANKS))
    parser.add_argument("--quantization", nargs="*", default=["none"])
    parser.add_argument("--library", type=Path, help="compiled kernels other than those of this tree")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    library = args.library or library_path(cache_dir=cache_dir() / "kernels")
    steps = []
    with torch.inference_mode():
        for quantization in args.quantization:
            model = _Model(args.model, library, args.threads, quantization, max(args.rows))
            for rank in args.ranks:
                model.load_adapters(rank)
                steps += [
                    {"weights": quantization, "rank": rank, "rows": rows} | model.measured(rows, args.rounds)
                    for rows in args.rows
                ]
    record = {**about("kernels.adapters"), "model": args.model.name, "threads": args.threads, "steps": steps}
    write_json(args.out, record)
    args.out.with_suffix(".svg").write_text(picture(record), encoding="utf-8")


def picture(record: Record) -> str:
    """Draw what adapters add to a step, by its rows, as SVG."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for step in record["steps"]:
        weights = "bf16" if step["weights"] == "none" else step["weights"]
        for arm, ratio in step["ratio"].items():
            points = lines.setdefault(f"{weights} r={step['rank']}, {arm}", [])
            points.append((step["rows"], round(100 * (ratio - 1), 1)))
    title = f"One adapter for all rows, or eight in turn, over a decoding step of {record['model']} without"
    return or_else(line_chart(title, "rows", "time added, %", lines, doubling=True), "")


class _Model:
    """A decoder with room for adapters, on the native backend."""

    def __init__(self, path: Path, library: Path, threads: int, quantization: str, most_rows: int) -> None:
        self._backend = NativeBackend(library, num_threads=threads)
        self._decoder = load_decoder(
            path,
            self._backend,
            torch.bfloat16,
            max_model_len=CONTEXT + 1,
            max_rows=most_rows,
            quantization=quantization,
            progress=lambda *_: None,
            adapters=AdapterSizes(slots=_NUM_ADAPTERS, max_rank=max(_RANKS)),
        )
        self._blocks_each = CONTEXT // BLOCK_SIZE + 1
        self._cache: Any = self._backend.allocate_kv(
            KvShape(
                heads=self._decoder.spec.kv_heads,
                num_blocks=most_rows * self._blocks_each,
                block_size=BLOCK_SIZE,
                dtype=torch.bfloat16,
            )
        )

    def load_adapters(self, rank: int) -> None:
        generator, adapters = torch.Generator().manual_seed(rank), self._backend.adapters

        def random(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator) * 0.02

        for product in self._decoder.adapted:
            for slot in range(_NUM_ADAPTERS):
                parts = tuple(
                    each.low_rank(random(rank, each.shape[1]), random(each.shape[0], rank))
                    for each in product.parts
                )
                adapters.set(product.room, slot, adapters.pack(product.room, parts))

    def measured(self, rows: int, rounds: int) -> Record:
        arms = {"none": None, "one": [0] * rows, "eight": [row % _NUM_ADAPTERS for row in range(rows)]}
        for slots in arms.values():
            self._step(rows, slots)
        times = {name: [0.0] * rounds for name in arms}
        for number in range(rounds):
            for name, slots in arms.items():
                times[name][number] = self._step(rows, slots)
        ratios = {
            name: statistics.median(of / base for of, base in zip(times[name], times["none"], strict=True))
            for name in ("one", "eight")
        }
        return {
            "step_ms": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
            "ratio": {name: round(each, 3) for name, each in ratios.items()},
        }

    def _step(self, rows: int, adapters: list[int] | None) -> float:
        """Seconds of a step."""
        decoder = self._decoder
        layout = RowLayout(
            query_start=torch.arange(rows + 1).int(),
            seq_len=torch.full((rows,), CONTEXT + 1).int(),
            positions=torch.full((rows,), CONTEXT).int(),
            block_table=torch.arange(rows * self._blocks_each).view(rows, -1).int(),
            adapters=None if adapters is None else torch.tensor(adapters).int(),
        )
        ids = torch.arange(rows) * 37 % decoder.spec.vocab_size
        began = time.perf_counter()
        plan: Any = self._backend.plan(layout, BLOCK_SIZE)
        adapted = decoder.adapter_rows(layout)
        hidden = decoder.embed(ids)
        decoder.run_layers(hidden, 0, decoder.spec.num_layers, self._cache, plan, adapted=adapted)
        decoder.logits(hidden)
        return time.perf_counter() - began
