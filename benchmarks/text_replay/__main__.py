"""What drafts from text could bring: answers are recorded once, and drafters are replayed over them.

    python -m benchmarks.text_replay record QUESTIONS.jsonl ANSWERS.jsonl [--questions 88]
    python -m benchmarks.text_replay self-made MORE.jsonl [--count 2000]
    python -m benchmarks.text_replay ngrams MORE.jsonl OUT.npz
    python -m benchmarks.text_replay replay ANSWERS.jsonl COSTS.json OUT.json [--self-made MORE.jsonl]
    python -m benchmarks.text_replay counted ANSWERS.jsonl COSTS.json OUT.json [--kinds questions] [--most 64]
    python -m benchmarks.text_replay served QUESTIONS.jsonl OUT.json [--rounds 5] [--requests 1 4]

A recording has ordinary questions, conversations of several turns, and loops of tool calls, each at every
temperature.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from benchmarks.peers.machine import describe_machine
from benchmarks.text_replay.counted import ARMS, count_arms
from benchmarks.text_replay.recording import Model, read, write
from benchmarks.text_replay.replay import replay, top_ms
from benchmarks.text_replay.served import measure
from benchmarks.text_replay.traffic import AGENT, KINDS, QUESTIONS, TURNS, conversations
from faser.engine.checkpoints.ngram_model import LONGEST, count, save

_VOCAB_SIZE = 49152
MAX_TOKENS = {QUESTIONS: 256, TURNS: 160, AGENT: 96}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("questions_file", type=Path)
    recording.add_argument("out", type=Path)
    recording.add_argument("--questions", type=int, default=88)
    recording.add_argument("--turns", type=int, default=24)
    recording.add_argument("--agent", type=int, default=16)
    recording.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    making = commands.add_parser("self-made")
    making.add_argument("out", type=Path)
    making.add_argument("--count", type=int, default=2000)
    making.add_argument("--seed", type=int, default=0)
    serving = commands.add_parser("served")
    serving.add_argument("questions_file", type=Path)
    serving.add_argument("out", type=Path)
    serving.add_argument("--rounds", type=int, default=5)
    serving.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    counting = commands.add_parser("ngrams")
    counting.add_argument("made", type=Path)
    counting.add_argument("out", type=Path)
    playing = commands.add_parser("replay")
    playing.add_argument("--self-made", type=Path)
    in_engine = commands.add_parser("counted")
    in_engine.add_argument("--arms", nargs="+", default=list(ARMS)[:-1])
    in_engine.add_argument("--requests", type=int, nargs="+", default=[1, 4])
    in_engine.add_argument("--one-salt", action="store_true")
    in_engine.add_argument("--model")
    for each in (playing, in_engine):
        each.add_argument("answers", type=Path)
        each.add_argument("costs", type=Path, help="a file of step times, from the cache")
        each.add_argument("out", type=Path)
        each.add_argument("--kinds", nargs="+", default=KINDS)
        each.add_argument("--most", type=int, default=256, help="tokens of an answer that count")
    for each in (recording, making):
        each.add_argument("--model")
    options = parser.parse_args()
    if options.command == "ngrams":
        made = read(options.made)
        about = {"answers": len(made), "tokens": sum(len(each.tokens) for each in made)}
        save(count([(*each.prompt[-LONGEST:], *each.tokens) for each in made], about=about), options.out)
        return
    if options.command in ("replay", "counted"):
        _replay(options)
        return
    if options.command == "served":
        rows = measure(
            options.questions_file, rounds=options.rounds, concurrency=options.requests, max_tokens=MAX_TOKENS
        )
        result = {
            "machine": describe_machine(sorted(os.sched_getaffinity(0))),
            "rounds": options.rounds,
            "rows": rows,
        }
        options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
        return
    model = Model(options.model)
    try:
        if options.command == "record":
            _record(model, options)
        else:
            write(options.out, model.self_made(options.count, max_tokens=256, seed=options.seed))
    finally:
        model.close()


def _record(model: Model, options: argparse.Namespace) -> None:
    counts = {QUESTIONS: options.questions, TURNS: options.turns, AGENT: options.agent}
    for temperature in options.temperatures:
        for kind, num_talks in counts.items():
            talks = conversations(kind, options.questions_file, count=num_talks)
            write(
                options.out,
                model.converse(kind, talks, temperature=temperature, max_tokens=MAX_TOKENS[kind]),
            )


def _replay(options: argparse.Namespace) -> None:
    recorded = [each for each in read(options.answers) if each.kind in options.kinds]
    step = json.loads(options.costs.read_text("utf-8"))["roles"]["step"]
    seconds = dict(zip(step["rows"], step["seconds"], strict=True))
    result: dict[str, Any] = {
        "answers": len(recorded),
        "most_tokens": options.most,
        "tokens": sum(len(each.tokens) for each in recorded),
        "step_ms": {rows: round(1e3 * each, 2) for rows, each in seconds.items()},
    }
    if options.command == "replay":
        made = read(options.self_made) if options.self_made else []
        result["self_made_tokens"] = sum(len(each.tokens) for each in made)
        result["top_8_ms"] = {rows: top_ms(rows, _VOCAB_SIZE) for rows in (1, 4, 16)}
        result["rows"] = replay(recorded, made, seconds, options.most)
    else:
        result["salts"] = "one for all" if options.one_salt else "one for each conversation"
        result["rows"] = count_arms(
            options.model,
            recorded,
            seconds,
            arms=options.arms,
            requests=options.requests,
            most=options.most,
            one_salt=options.one_salt,
        )
    options.out.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
