"""Does speculation cost anything where it is off? Decode steps of two checkouts, in turn.

    python -m benchmarks.speed.off_tax BASE_CHECKOUT OUT.json [--rounds 4] [--blocks 10] [--rows 1,16]

The embedded model with its settings for no speculation; timed are steps that only decode. The checkouts take
turns: see benchmarks/speed/checkouts.
"""

import json

from benchmarks.runner import about, git_commit, write_json
from benchmarks.speed.checkouts import compare, options_of

BAR = 0.01
PROMPT_TOKENS = 64
RUN = """
from faser.engine.build import build_engine
from faser.types import Request, SamplingParams
try:
    from faser.config.engine import EngineConfig
    from faser.config.environment import cache_dir
    from faser.engine.checkpoints.source import resolve
except ImportError:  # a version with the modules' first places
    from faser.config import EngineConfig, cache_dir
    from faser.engine.models.source import resolve

knows = "speculative_config" in EngineConfig.__dataclass_fields__
off = {"speculative_config": {"policy": "off"}} if knows else {}
quiet = lambda *_: None
built = build_engine(EngineConfig(**off), resolve(None, cache_dir(), progress=quiet), quiet)
engine = built[0] if isinstance(built, tuple) else built.engine
for count in map(int, ARGUMENTS[0].split(",")):
    for i in range(count):
        prompt = tuple(1000 + 7 * i + j for j in range(PROMPT_TOKENS))
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
        engine.add(Request(request_id=f"{count}/{i}", prompt_token_ids=prompt, sampling=sampling, arrival_s=i))
    for _ in range(20):
        engine.step()
    measure(str(count), engine.step)
    for i in range(count):
        engine.abort(f"{count}/{i}")
    engine.step()
"""


def main() -> None:
    parser = options_of(__doc__, rounds=4, blocks=10, steps=8)
    parser.add_argument("--rows", default="1,16")
    options = parser.parse_args()
    found = compare(RUN.replace("PROMPT_TOKENS", str(PROMPT_TOKENS)), options, options.rows)
    result = {
        **about("benchmarks.speed.off_tax"),
        "base": git_commit(options.base),
        "bar": BAR,
        "rows_ms": found,
    }
    write_json(options.out, result)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
