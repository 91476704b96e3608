"""What early pruning gains end to end: off, on and auto in turn on one engine, by drafter and requests at once.

    python -m benchmarks.speculation.pruning OUT_DIR TARGET_DIR DRAFTER_DIR... [--prompts FILE] [--rounds 6]

Every sequence drafts --gamma tokens in every step, greedily, so that answers of the modes must be equal. Before
anything counts, answers with pruning switched on teach the engine what its looks are worth. tokens/s are medians.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.cells import Cell, markdown, share
from benchmarks.engines import Tokens, answers, model_directory, opened
from benchmarks.runner import about, command_line, interleaved, write_json
from faser.bench.prompts import read_prompts
from faser.config.engine import EngineConfig
from faser.engine.text.tokenizer import load_tokenizer
from faser.types import PruneStats, Request, SamplingParams

if TYPE_CHECKING:
    from faser.engine.build import Built

OFF, ON, AUTO = MODES = ("off", "on", "auto")
CONCURRENCIES = (1, 4, 16)
MOST_PROMPT_TOKENS = 96
_COLUMNS = ("drafter", "requests", "mode", "tokens/s", "to off", "rows left", "flagged", "false", "other answers")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """drafted, pruned: rows. flagged: tokens, wrong: of them, that were right after all."""

    answers: tuple[Tokens, ...]
    seconds: float
    drafted: int
    pruned: int
    flagged: int
    wrong: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path, help="folder for prune.json and prune.md")
    parser.add_argument("target")
    parser.add_argument("drafters", type=Path, nargs="+")
    parser.add_argument("--prompts", help="Spec-Bench's JSON lines (default: the built-in questions)")
    parser.add_argument("--gamma", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=24, help="of every answer [24]")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    read = read_prompts(options.prompts, load_tokenizer(model_directory(options.target)))
    prompts = [each.token_ids for each in read if len(each.token_ids) <= MOST_PROMPT_TOKENS][: max(CONCURRENCIES)]
    cells: list[Cell[Run]] = []
    for drafter in options.drafters:
        engine = _engine(options.target, drafter, options.gamma)
        _run(engine, prompts, ON, options.tokens, "warm")
        settings = [{"drafter": drafter.name, "requests": count} for count in CONCURRENCIES]

        def run(labels: Mapping[str, Any], mode: str, number: int, engine: "Built" = engine) -> Run:
            return _run(engine, prompts[: labels["requests"]], mode, options.tokens, str(number))

        cells += interleaved(settings, MODES, options.rounds, run)
        write_json(options.out / "prune.json", about("benchmarks.speculation.pruning") | {"cells": records(cells)})
        (options.out / "prune.md").write_text(table(cells) + "\n", encoding="utf-8")
    print(table(cells))


def _engine(target: str, drafter: Path, gamma: int) -> "Built":
    drafts = {"method": "draft_model", "model": str(drafter), "policy": "fixed", "num_speculative_tokens": gamma}
    config = EngineConfig(
        model=target,
        speculative_config=drafts,
        early_prune=ON,
        max_num_seqs=max(CONCURRENCIES),
        max_model_len=1024,
    )
    return opened(config)


def _run(built: "Built", prompts: Sequence[Tokens], mode: str, num_tokens: int, name: str) -> Run:
    assert built.pruning is not None, "the engine was built without early pruning"
    built.pruning.use(mode)
    before, began_s = built.pruning.stats, time.perf_counter()
    requests = [
        Request(
            request_id=f"{name}/{mode}/{place}",
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
        )
        for place, prompt in enumerate(prompts)
    ]
    said, seconds, after = answers(built.engine, requests), time.perf_counter() - began_s, built.pruning.stats

    def grown(field: str) -> int:
        return _count(after, field) - _count(before, field)

    return Run(
        answers=tuple(said[request.request_id] for request in requests),
        seconds=seconds,
        drafted=grown("drafted_rows"),
        pruned=grown("pruned_rows"),
        flagged=grown("flagged"),
        wrong=grown("false_prunes"),
    )


def _count(stats: PruneStats, field: str) -> int:
    return int(getattr(stats, field))


def records(cells: Sequence[Cell[Run]]) -> list[dict[str, Any]]:
    """One a cell and mode. ratio: of the medians, to off. other_answers: unlike those of off in the same round."""
    found = []
    for cell in cells:
        for mode, runs in cell.runs.items():
            drafted, flagged = sum(run.drafted for run in runs), sum(run.flagged for run in runs)
            pairs = [
                pair
                for run, off in zip(runs, cell.runs[OFF], strict=True)
                for pair in zip(run.answers, off.answers, strict=True)
            ]
            found.append(
                {
                    **cell.labels,
                    "mode": mode,
                    "tokens_per_s": [run.tokens_per_s for run in runs],
                    "median": cell.median(mode, _rate),
                    "ratio": cell.median(mode, _rate) / cell.median(OFF, _rate),
                    "drafted_rows": drafted,
                    "dropped_share": share(sum(run.pruned for run in runs), drafted),
                    "flagged": flagged,
                    "false_share": share(sum(run.wrong for run in runs), flagged),
                    "other_answers": sum(one != off for one, off in pairs),
                }
            )
    return found


def table(cells: Sequence[Cell[Run]]) -> str:
    rows = [
        (
            each["drafter"],
            str(each["requests"]),
            each["mode"],
            f"{each['median']:.1f}",
            f"{each['ratio']:.3f}",
            f"{each['dropped_share']:.1%} of {each['drafted_rows']}",
            str(each["flagged"]),
            f"{each['false_share']:.1%}",
            str(each["other_answers"]),
        )
        for each in records(cells)
    ]
    return markdown(_COLUMNS, rows)


def _rate(run: Run) -> float:
    return run.tokens_per_s


if __name__ == "__main__":
    main()
