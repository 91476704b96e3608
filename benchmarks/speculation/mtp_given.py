"""Gain of an MTP layer at a given acceptance: its passes run, and drafts are accepted at given rates.

    python -m benchmarks speculation.mtp_given MODEL.gguf OUT.json [--rates 0.699,0.428,0.244]
        [--concurrency 1,4,16] [--rounds 3] [--tokens 48]

MODEL.gguf: of benchmarks.models.random_gguf with --mtp. An engine with default flags but for the rates (MTP
alone, 32,768 rows of the vocabulary) against one without drafts, in turns, as `faser bench spec` runs them. Rates
0: default flags, and drafts are accepted as the model says.

Seconds are CPU time of one thread, so that other programs on the machine count little; the policy itself reads the
clock on the wall, and on a busy machine what it decides is worse than on a quiet one.

The default rates are the survival that was published for mixed text, .74, .48 and .29 (ml-explore/mlx-lm, pull
request 990), times .944 a position for 32,768 rows. Times are measured, acceptance is given.
"""

import json
import time
from pathlib import Path
from typing import Any

from benchmarks.runner import about, command_line, write_json
from faser.cli.bench.comparison import Comparison, Load, Measured
from faser.cli.bench.drafters import built_arms, policies_of, wanted_drafters
from faser.cli.bench.prompts import fitting_prompts, read_prompts
from faser.engine.text.tokenizer import load_tokenizer

RATES = "0.699,0.428,0.244"
FLAGS = ("--num-threads", "1", "--max-model-len", "1024", "--kv-cache-memory", "512MiB")
MOST_PROMPT_TOKENS = 60


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rates", default=RATES)
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48, help="of an answer")
    options = parser.parse_args()
    rates = [float(each) for each in options.rates.split(",")]
    loads = [Load(temperature=0.0, concurrency=int(each)) for each in options.concurrency.split(",")]
    given: dict[str, Any] = {"method": "mtp", "draft_vocab_size": 32_768}
    given |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    drafters = wanted_drafters(
        "mtp_given",
        [str(options.model), *FLAGS],
        max(each.concurrency for each in loads),
        named=["mtp 2"] if any(rates) else ["default"],
        configs=[json.dumps(given)] if any(rates) else [],
        acceptance=None,
    )
    arms, directory = built_arms(drafters, policies_of(None, drafters))
    prompts = fitting_prompts(read_prompts(None, load_tokenizer(directory)), MOST_PROMPT_TOKENS)
    comparison = Comparison(
        arms=arms,
        prompts=prompts,
        output_tokens=options.tokens,
        rounds=options.rounds,
        ignore_eos=True,
        now=time.process_time,
    )
    head = {**about("speculation.mtp_given"), "rates": rates if any(rates) else None}
    cells = []
    for load in loads:
        cells.append(_cell(comparison.under(load, lambda _run: None)[1]))
        write_json(options.out, {**head, "cells": cells}, show=True)


def _cell(measured: Measured) -> dict[str, Any]:
    decoding = measured.decoding
    assert decoding is not None, "answers have more than one token"
    verified = sum(run.verified for run in measured.runs)
    return {
        "concurrency": measured.load.concurrency,
        "decoding_over_off": decoding.rounded(3),
        "whole_over_off": measured.whole.rounded(3),
        "off_tokens_per_cpu_s": [round(run.tokens_per_s, 2) for run in measured.off],
        "draft_tokens": round(sum(run.gamma_mean for run in measured.runs) / len(measured.runs), 2),
        "accepted": round(sum(run.accepted for run in measured.runs) / verified, 3) if verified else None,
        "differing": measured.differing,
        "answers": measured.num_answers,
    }
