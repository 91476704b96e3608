"""A program for any Python that has FASER: its kernels, and their tokens with log probabilities, as JSON.

python answers.py CHECKPOINT
"""

import json
import sys

from faser.config.environment import cache_dir
from faser.kernels.cpu.build import find_library
from faser.offline import LLM
from faser.types.sampling import SamplingParams

PROMPTS = ("one two three", "the quick brown fox jumps over the lazy dog " * 8)


def answers(checkpoint: str) -> dict[str, object]:
    """Of greedy and of seeded sampling, in both of the kernels' dtypes; log probabilities with every digit."""
    library = find_library(cache_dir=cache_dir() / "kernels")
    sampling = (
        SamplingParams(max_tokens=24, temperature=0, logprobs=3),
        SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=7, logprobs=3),
    )
    found = []
    for dtype in ("bfloat16", "float32"):
        with LLM(checkpoint, backend="native", dtype=dtype, num_threads=2, kv_cache_memory=64 << 20) as model:
            for each in sampling:
                for generation in model.generate(PROMPTS, each):
                    (sample,) = generation.outputs
                    found.append([dtype, sample.token_ids, repr(sample.logprobs)])
    return {"isa": library.isa, "origin": library.origin, "answers": found}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(answers(sys.argv[1])) + "\n")
