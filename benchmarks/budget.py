"""Print the lines of code of each area, and fail where one has more than its budget.

    python -m benchmarks.budget [CHECKOUT]

budget.toml names the areas, folders of the checkout, and their lines: those that hold more than blanks, comments
and docstrings. A file belongs to the innermost area above it.
"""

import argparse
import ast
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from benchmarks.house import lines_of_code

FILE = "budget.toml"
_NATIVE = (".cpp", ".h")


def lines_by_area(checkout: Path, areas: Mapping[str, int]) -> Counter[str]:
    """Count the lines of code of each area. Raises ValueError for a file of faser/ that is in none."""
    listed = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    found: Counter[str] = Counter()
    for name in listed.splitlines():
        file = Path(name)
        if file.suffix not in (".py", *_NATIVE) or not (checkout / file).exists():
            continue
        area = next((str(each) for each in file.parents if str(each) in areas), None)
        if area is not None:
            found[area] += _count((checkout / file).read_text(encoding="utf-8"), native=file.suffix in _NATIVE)
        elif file.parts[0] == "faser":
            raise ValueError(f"{name} is in no area of {FILE}; add one")
    return found


def _count(text: str, *, native: bool) -> int:
    if native:
        lines = [line.strip() for line in text.splitlines()]
        return sum(bool(line) and not line.startswith("//") for line in lines)
    return len(lines_of_code(text, ast.parse(text)))


def table(found: Mapping[str, int], areas: Mapping[str, int]) -> str:
    """One line for each area, and the sum of faser/."""
    rows = [(area, found.get(area, 0), budget) for area, budget in areas.items()]
    of_package = [row for row in rows if row[0].split("/")[0] == "faser"]
    rows.append(("faser/ in all", sum(row[1] for row in of_package), sum(row[2] for row in of_package)))
    width = max(len(row[0]) for row in rows)
    head = f"{'lines of code':{width}}     now  budget"
    return "\n".join([head, *(f"{area:{width}} {lines:7,} {budget:7,}" for area, lines, budget in rows)])


def excesses(found: Mapping[str, int], areas: Mapping[str, int]) -> list[str]:
    """One sentence for each area that is over its budget."""
    return [
        f"{area} has {found[area]:,} lines of code; its budget is {budget:,}: remove some, or raise the budget in "
        f"{FILE} and say in the commit what for and with which figure"
        for area, budget in areas.items()
        if found.get(area, 0) > budget
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, nargs="?", default=Path())
    checkout = parser.parse_args().checkout
    areas: dict[str, int] = tomllib.loads((checkout / FILE).read_text(encoding="utf-8"))
    found = lines_by_area(checkout, areas)
    print(table(found, areas))
    over = excesses(found, areas)
    print(*over, sep="\n", end="\n" if over else "", file=sys.stderr)
    return bool(over)


if __name__ == "__main__":
    sys.exit(main())
