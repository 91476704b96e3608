"""Complete four prompts as one batch: `python examples/generate.py [MODEL]`."""

import sys

from faser import LLM, SamplingParams

prompts = [
    "The capital of France is",
    "The three primary colors are",
    "Water boils at",
    {"prompt": "The opposite of hot is"},
]
sampling_params = SamplingParams(temperature=0.0, max_tokens=24, stop=["\n"])

with LLM(model=sys.argv[1] if len(sys.argv) > 1 else None) as llm:
    for output in llm.generate(prompts, sampling_params=sampling_params):
        print(f"{output.prompt!r} -> {output.outputs[0].text!r}")
