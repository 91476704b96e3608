"""Worth of the constants that decide drafts: simulated throughput with each of them halved and doubled.

    python -m benchmarks exactness.constants OUT.json [--tokens 60]

Of the modules in SOURCES every number at the top of a module is changed alone, in all modules that import it, and
the scenarios of exactness.decisions_hash with the policy `faser` run again: 5 kinds under 6 conditions. A number
between 0.5 and 1, such as a share that is kept, is changed by its distance from 1. The result has tokens a second
over those with the usual constants, mean and lowest of all scenarios, and the number of scenarios whose decisions
differ. Answers are short: what the guard learns in a long run is measured by guard-regret.json.
"""

import argparse
import ast
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any

import numpy as np
from rich.progress import track

from benchmarks.exactness.decisions_hash import CHEAP, DEAR, SERIAL, Condition, Kind, scenario_hash
from benchmarks.runner import about, write_json
from faser.engine.control.speculation.acceptance import NUMBERS

CONTROL = Path(__file__).parents[2] / "faser" / "engine" / "control"
SOURCES = (
    CONTROL / "step_cost.py",
    CONTROL / "step_posterior.py",
    *sorted((CONTROL / "speculation").glob("*.py")),
)
LEFT_OUT = {"learned_file", "statistics", "drafter_watch"}  # decide nothing
NO_CHOICES = {"_TEXT", "_PLENTY", "RARE_STEPS"}  # a kind, infinity, and the default of a parameter
KINDS: tuple[Kind, ...] = (
    *(("draft_model", "faser", None, cost, SERIAL) for cost in (CHEAP, DEAR)),
    ("suffix", "faser", None, None, SERIAL),
    *(("auto", "faser", None, cost, SERIAL) for cost in (CHEAP, DEAR)),
)
CONDITIONS: tuple[Condition, ...] = tuple((chance, load, 0.5, 0.1) for chance in (0.5, 0.9) for load in (1, 8, 32))


def constants(path: Path) -> Iterator[str]:
    """Yield the names of the numbers at the top of a module, those within tuples left out."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        for target in node.targets if isinstance(node, ast.Assign) else ():
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            counted = "range(" in ast.unparse(node)  # numbers of columns or kinds
            yield from (each.id for each in names if isinstance(each, ast.Name) and not counted)


def is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and value > 0) or _is_point(value)


def _is_point(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0 and value.dtype == np.float64


def halved_and_doubled(value: Any) -> tuple[Any, Any]:
    """Return the value by half and by twice, of its own type."""
    if isinstance(value, int):
        return max(value // 2, 1), 2 * value
    distance = 1 - value if 0.5 < value < 1 else None
    found = (value / 2, value * 2) if distance is None else (1 - distance / 2, max(1 - 2 * distance, 0.0))
    return tuple(np.array(each) if _is_point(value) else each for each in found)  # type: ignore[return-value]


def set_everywhere(modules: Iterable[ModuleType], name: str, value: Any) -> None:
    """Set the constant in these modules, and among the numbers that native code is given."""
    for module in modules:
        setattr(module, name, value)
    if (key := name.strip("_").lower().replace("shift_precision", "shift_prior")) in NUMBERS:
        NUMBERS[key] = float(value)


def run(num_tokens: int) -> list[tuple[str, float]]:
    return [scenario_hash(kind, each, num_tokens=num_tokens) for kind in KINDS for each in CONDITIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=60, help="of each answer (default 60)")
    options = parser.parse_args()
    usual = run(options.tokens)
    found: dict[str, dict[str, object]] = {}
    paths = [path for path in SOURCES if path.stem not in LEFT_OUT | {"__init__"}]
    modules = [
        import_module(f"faser.{'.'.join(path.relative_to(CONTROL.parents[1]).with_suffix('').parts)}")
        for path in paths
    ]
    named = [(module, name) for module, path in zip(modules, paths, strict=True) for name in constants(path)]
    for module, name in track(named, "constants", disable=not sys.stderr.isatty()):
        value = getattr(module, name)
        if name in NO_CHOICES or not is_number(value):
            continue
        users = [each for each in modules if getattr(each, name, None) is value]
        entry: dict[str, object] = {"value": float(value)}
        for way, other in zip(("halved", "doubled"), halved_and_doubled(value), strict=True):
            set_everywhere(users, name, other)
            results = run(options.tokens)
            set_everywhere(users, name, value)
            gains = [before / after for (_, before), (_, after) in zip(usual, results, strict=True)]
            changed = sum(before != after for (before, _), (after, _) in zip(usual, results, strict=True))
            entry[way] = {"mean": round(fmean(gains), 4), "lowest": round(min(gains), 4), "changed": changed}
        found[f"{module.__name__.removeprefix('faser.engine.control.')}.{name}"] = entry
        print(name, entry, flush=True)
        write_json(options.out, {**about("exactness.constants"), "scenarios": len(usual), "constants": found})
