"""Does speculation cost anything where it is off? Decode steps of two checkouts, run in turn.

    python -m benchmarks.speed.off_tax BASE_CHECKOUT OUT.json [--pairs 12] [--rows 1,16] [--steps 120]

BASE_CHECKOUT: a checkout of another version. Every run is a process of its
own that imports faser from one of the two, builds the embedded model with its settings for no speculation, and
times steps that only decode. Runs alternate, the first of each pair too; a pair's ratio is this version's median
step over the base's.
"""

import json
from pathlib import Path

from benchmarks.runner import (
    about,
    checkout_pairs,
    command_line,
    git_commit,
    run_program,
    summarise_pairs,
    write_json,
)

BAR = 0.01
PROMPT_TOKENS = 64
RUN = """
import json, statistics, sys, time
from faser.engine.build import build_engine
from faser.types import Request, SamplingParams
try:
    from faser.config.engine import EngineConfig
    from faser.config.environment import cache_dir
    from faser.engine.checkpoints.source import resolve
except ImportError:  # a version with the modules' first places
    from faser.config import EngineConfig, cache_dir
    from faser.engine.models.source import resolve

steps, rows = int(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")]
knows = "speculative_config" in EngineConfig.__dataclass_fields__
off = {"speculative_config": {"policy": "off"}} if knows else {}
quiet = lambda *_: None
built = build_engine(EngineConfig(**off), resolve(None, cache_dir(), progress=quiet), quiet)
engine = built[0] if isinstance(built, tuple) else built.engine
found = {}
for count in rows:
    for i in range(count):
        prompt = tuple(1000 + 7 * i + j for j in range(PROMPT_TOKENS))
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        engine.add(Request(request_id=f"{count}/{i}", prompt_token_ids=prompt, sampling=sampling, arrival_s=i))
    for _ in range(20):
        engine.step()
    seconds = []
    for _ in range(steps):
        began_s = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began_s)
    for i in range(count):
        engine.abort(f"{count}/{i}")
    engine.step()
    found[count] = 1000 * statistics.median(seconds)
print(json.dumps(found))
"""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("base", type=Path, help="checkout of another version")
    parser.add_argument("out", type=Path)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--steps", type=int, default=120)
    options = parser.parse_args()
    program = RUN.replace("PROMPT_TOKENS", str(PROMPT_TOKENS))

    def median_ms(checkout: Path) -> dict[str, float]:
        found: dict[str, float] = run_program(program, checkout, str(options.steps), options.rows)
        return found

    pairs = checkout_pairs(options.base, options.pairs, median_ms)
    result = {
        **about("benchmarks.speed.off_tax"),
        "base": git_commit(options.base),
        "bar": BAR,
        "rows_ms": {rows: summarise_pairs(pairs, rows) for rows in options.rows.split(",")},
        "pairs_ms": pairs,
    }
    write_json(options.out, result)
    print(json.dumps(result["rows_ms"], indent=2))


if __name__ == "__main__":
    main()
