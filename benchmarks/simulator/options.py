"""The command line of the simulator, and what it becomes: a trace, a machine, the options of an engine."""

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.simulator.simulation import Machine
from benchmarks.simulator.trace import Trace, iid_trace, read_trace
from faser.config.sources import CommandParser, UsageError
from faser.engine.control.step_cost import CostModel
from faser.errors import ConfigError

PROG = "python -m benchmarks simulator"
_SYNTHETIC = "iid:"
_NO_MEMORY = {"suffix_decoding_max_cached_requests": 0}


def simulate_parser(description: str) -> CommandParser:
    parser = CommandParser(PROG, description=description)
    add = parser.add_argument
    add("MODEL", nargs="?", help="of --record and --check-live: a directory, a GGUF file, a hub id; or embedded")
    add("--help", "-h", action="store_true")
    add("--trace", help="acceptance trace, or iid:A")
    add("--cost", help="cost model, JSON")
    add("--arrivals", default="closed:1", help="a CSV of Azure's kind, poisson:RATE or closed:CLIENTS")
    add("--speed-up", type=_loads, default=[1.0], help="arrivals so many times as fast; several: 1,2,4")
    add("--scale-tokens", type=_above_zero, default=1.0, help="multiplies the lengths of the CSV")
    add("--policies", type=_list, default=["off", "fixed:3", "goodput", "survival", "faser"])
    add("--duration", type=_above_zero, help="simulated seconds in which requests arrive")
    add("--num-requests", type=_count, help="most requests")
    add("--slo-ttft-ms", type=_above_zero)
    add("--slo-tpot-ms", type=_above_zero)
    add("--max-num-seqs", type=_count, default=64)
    add("--max-num-batched-tokens", type=_count, default=256)
    add("--max-model-len", type=_count, default=8192)
    add("--kv-tokens", type=_count, help="room of the KV cache; without it, enough")
    add("--step-overhead-ms", type=_at_least_zero, default=0.2)
    add("--draft-overhead-ms", type=_at_least_zero, default=0.2)
    add("--draft-share", type=_at_least_zero, default=1.0, help="of a mixture: new experts of a draft row")
    add("--noise", type=_at_least_zero, default=0.0, help="sigma of the logarithm of times")
    add("--seed", type=int, default=0)
    add("--out", help="folder for JSON, Markdown and charts")
    add("--record", metavar="TRACE", help="record a trace with a real engine")
    add("--save-cost", metavar="COST", help="of --record: write the engine's cost model as well")
    add("--prompts", help="of --record: JSON lines with turns, or a text line each; without it, built-in ones")
    add("--num-prompts", type=_count, default=24)
    add("--output-tokens", type=_count, default=64)
    add("--temperature", type=_at_least_zero, default=0.0)
    add("--speculative-config", metavar="JSON", help="of --record and --check-live, as of faser serve")
    add("--check-live", action="store_true", help="compare with a real engine")
    add("--concurrency", type=_count, default=4, help="of --record and --check-live")
    add("--rounds", type=_count, default=3, help="of --check-live: live runs of each policy")
    return parser


def trace_of(text: str) -> Trace:
    """Read a file; iid:0.8 makes a synthetic trace, whose drafted tokens are right with this probability."""
    if not text.startswith(_SYNTHETIC):
        return read_trace(Path(text))
    value = text.removeprefix(_SYNTHETIC)
    try:
        acceptance = float(value)
    except ValueError as error:
        raise ConfigError(f"--trace is {text}; iid:A needs an acceptance A of 0 … 1") from error
    return iid_trace(acceptance)


def machine_of(asked: argparse.Namespace, costs: CostModel) -> Machine:
    return Machine(
        costs=costs,
        max_num_seqs=asked.max_num_seqs,
        max_num_batched_tokens=asked.max_num_batched_tokens,
        max_model_len=asked.max_model_len,
        kv_tokens=asked.kv_tokens,
        step_overhead_s=asked.step_overhead_ms / 1000,
        draft_overhead_s=asked.draft_overhead_ms / 1000,
        noise=asked.noise,
        draft_share=asked.draft_share,
    )


def engine_options(asked: argparse.Namespace) -> dict[str, Any]:
    """Fields of EngineConfig. Every run of a prompt must cost the same, so no prefix and no answer is kept.

    --speculative-config may keep answers; then a trace holds only for an engine with the same past.
    """
    try:
        speculative = {} if asked.speculative_config is None else json.loads(asked.speculative_config)
        if not isinstance(speculative, dict):
            raise ValueError("it must be an object")
    except ValueError as error:
        raise UsageError([f"--speculative-config is {asked.speculative_config}; not JSON: {error}"]) from error
    return {
        "model": asked.MODEL,
        "speculative_config": _NO_MEMORY | speculative,
        "max_num_seqs": asked.max_num_seqs,
        "max_num_batched_tokens": asked.max_num_batched_tokens,
        "enable_prefix_caching": False,
    }


def _list(text: str) -> list[str]:
    return [each for each in text.split(",") if each]


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number above 0")
    return value


def _at_least_zero(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"it is {text}; it must be a number from 0 on")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {text}; it must be at least 1")
    return value


def _loads(text: str) -> list[float]:
    return [_above_zero(each) for each in _list(text)]
