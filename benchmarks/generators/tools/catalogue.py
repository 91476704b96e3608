"""RUNS: every run of every load generator, in the order in which they are made."""

from benchmarks.generators.tools import aiperf, guidellm, lm_eval, vllm_bench
from benchmarks.generators.tools.tool import Run

RUNS: tuple[Run, ...] = (*vllm_bench.runs(), *guidellm.runs(), *aiperf.runs(), *lm_eval.runs())
