"""Cost of choosing tokens, by the sampler and for drafts: natively, by tensor operations, and as it was before.

    python -m benchmarks.kernels.sampling OUT.json [--base CHECKOUT] [--rows 1,4,16,64] [--vocab 49152]
        [--seconds 0.4] [--threads 2]

Times the sampling of a step without drafts, its Python included, over a vocabulary in which one token of 4,000
stands out, on one torch thread, and what a pass of a draft model adds to sample its tokens. Each figure is
the least of many calls, divided by the rows: microseconds a row. --base also times the sampler of another
checkout, natively and by tensor operations.
"""

import argparse
import json
from pathlib import Path

from benchmarks.runner import CHECKOUT, about, command_line, run_program, write_json

RUN = """
import json, sys, time
import numpy as np
import torch
from faser.config.environment import cache_dir
from faser.engine.contract.plan import SequenceStart
from faser.engine.execution.drafting.samplers import DraftRows, SampleAndMatchDraftSampler
from faser.engine.execution.sampling.sampler import Sampler
from faser.types import SamplingParams

try:
    from faser.engine.execution.sampling.parameters import SamplingState
    from faser.engine.execution.sampling.rows import DraftLayout
    from faser.engine.execution.sampling.verify import SampleAndMatch
    NEW = True
except ImportError:  # a version whose sampler samples by itself
    from faser.engine.execution.sampling.parameters import SamplingState
    NEW = False

VOCAB = int(sys.argv[4])
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "temperature .8, top_p .95": {"temperature": 0.8, "top_p": 0.95},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "min_p .05": {"temperature": 1.0, "min_p": 0.05},
}
threads, counts, seconds = int(sys.argv[1]), [int(each) for each in sys.argv[2].split(",")], float(sys.argv[3])
torch.set_num_threads(1)
choice = None
if threads:
    from faser.kernels.factory import make_backend
    backend = make_backend("native", "cpu", num_threads=threads, cache_dir=cache_dir() / "kernels")
    choice = backend.sampling_kernels


def sampler(count):
    if not NEW:
        made = Sampler(count, VOCAB, (0,), "cpu", choice)
        return made, lambda logits, position: made.sample(logits, list(range(count)), [position] * count)
    made = Sampler(count, VOCAB, (0,), choice)
    verifier = SampleAndMatch(made)

    def sample(logits, position):
        verifier.verify(logits, DraftLayout.plain(np.arange(count), np.full(count, position)), None)

    return made, sample


def draft(count):
    slots = np.arange(count)
    starts = SamplingState(count)
    made = SampleAndMatchDraftSampler(starts, kernels=choice)

    def choose(logits, position):
        at = np.full(count, position)
        made.choose(logits, DraftRows(slots=slots, positions=at, draft_starts=at))

    return starts, choose


@torch.inference_mode()
def least(make, count, wanted, rng):
    made, call = make(count)
    for slot in range(count):
        sampling = SamplingParams(max_tokens=9, **wanted)
        made.start(SequenceStart(slot=slot, sampling=sampling, seed=slot, prompt_len=2, token_ids=(1, 2)))
    given = torch.randn(count, VOCAB, generator=rng) * 2.5
    given += (torch.rand(count, VOCAB, generator=rng) < 2.5e-4) * 8
    logits, position, found = given.clone(), 2, float("inf")
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or position < 7:
        logits.copy_(given)
        position += 1
        began = time.perf_counter_ns()
        call(logits, position)
        found = min(found, time.perf_counter_ns() - began)
    return round(found / 1000 / count, 1)


rng, found = torch.Generator().manual_seed(0), {}
for prefix, make in {"": sampler, "draft, ": draft}.items():
    for name, wanted in KINDS.items():
        found[prefix + name] = {str(count): least(make, count, wanted, rng) for count in counts}
print(json.dumps(found))
"""


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", type=Path, help="checkout of another version, with native kernels")
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--vocab", type=int, default=49152, help="tokens (default 49152)")
    parser.add_argument("--seconds", type=float, default=0.4, help="of each figure (default 0.4)")
    parser.add_argument("--threads", type=int, default=2, help="of the native kernels (default 2)")
    options = parser.parse_args()
    result: dict[str, object] = {
        **about("benchmarks.kernels.sampling"),
        "unit": "us a row, least of many calls",
        "native": _measured(CHECKOUT, options.threads, options),
        "native, one thread": _measured(CHECKOUT, 1, options),
        "torch": _measured(CHECKOUT, 0, options),
    }
    if options.base is not None:
        result["base"] = _measured(options.base, options.threads, options)
        result["base, torch"] = _measured(options.base, 0, options)
    write_json(options.out, result)
    print(json.dumps(result, indent=2))


def _measured(checkout: Path, threads: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Microseconds a row, by kind of request and number of rows. threads: 0 is by tensor operations."""
    found: dict[str, dict[str, float]] = run_program(
        RUN, checkout, str(threads), options.rows, str(options.seconds), str(options.vocab)
    )
    return found


if __name__ == "__main__":
    main()
