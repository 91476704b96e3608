"""Measures FASER and its peers in turn on the same prompts, and writes what was found.

All servers are started once; only the one under measurement runs, the others are frozen. A round visits
every concurrency, and there every system; which system comes first moves on by one from round to round.
Every number of a round is thus taken within minutes of the ones it is compared with.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.peers import report
from benchmarks.peers.llamacpp import PRECISIONS
from benchmarks.peers.load import Exchange, Target, run_load
from benchmarks.peers.report import Measurement, check_same_work, measure
from benchmarks.peers.setup import DEFAULT_DIRECTORY, bfloat16_model
from benchmarks.peers.systems import SYSTEMS, Conditions, System, build_system, describe_systems
from benchmarks.prompts import Prompt, load_prompts, take
from benchmarks.runner import PROMPTS_VARIABLE, about, command_line, end_servers_on_sigterm, write_json
from benchmarks.servers import Server, busy_s, free_port

_START_TIMEOUT_S = 900.0
_LOAD_TIMEOUT_S = 900.0
_LLAMACPP = tuple(f"llamacpp-{precision}" for precision in PRECISIONS)
_PEERS = ("faser", "faser-off", "vllm", "transformers", "transformers-generate", *_LLAMACPP)
_PEERS_HELP = f"of {', '.join(SYSTEMS)}; default: %(default)s"
_WAKE_TOKENS = 8
_WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A started server and the way to ask it. most_at_once: the greatest concurrency it is measured at."""

    server: Server
    target: Target
    most_at_once: int | None

    def takes(self, concurrency: int) -> bool:
        return self.most_at_once is None or concurrency <= self.most_at_once


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work that every system is given. requests: number of requests by concurrency."""

    prompts: tuple[Prompt, ...]
    requests: dict[int, int]
    rounds: int
    output_tokens: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; returns 0 whatever was measured."""
    given = _parser().parse_args(arguments)
    end_servers_on_sigterm()
    cores = tuple(sorted(os.sched_getaffinity(0))[: given.cores])
    os.sched_setaffinity(0, cores)  # clients and servers inherit it
    conditions = Conditions(
        model=given.model or bfloat16_model(given.directory),
        cores=cores,
        max_model_len=given.max_model_len,
        max_num_seqs=max(given.concurrency),
        directory=given.directory,
        faser_python=Path(sys.executable),
        extra_arguments={"faser": given.faser_args, "vllm": given.vllm_args, "llamacpp": given.llamacpp_args},
    )
    work = Work(
        prompts=load_prompts(given.prompts),
        requests={concurrency: max(4, 2 * concurrency) for concurrency in given.concurrency},
        rounds=given.rounds,
        output_tokens=given.output_tokens,
    )
    systems = [build_system(name, conditions) for name in given.peers]
    head = {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        **about("peers.run", arguments or sys.argv[1:], cores),
        "systems": describe_systems(systems),
        "requests": work.requests,
        "prompts": given.prompts.name,
    }
    measurements = _measure_all(systems, work, given.directory / "logs")
    print(report.table(measurements))
    write_json(given.out, report.document(measurements, head))
    title = f"Output tokens/s, {work.output_tokens} tokens an answer, bf16, {len(cores)} cores"
    given.out.with_suffix(".svg").write_text(report.chart(measurements, title), "utf-8")
    return 0


def _measure_all(systems: Sequence[System], work: Work, log_directory: Path) -> list[Measurement]:
    log_directory.mkdir(parents=True, exist_ok=True)
    measurements: list[Measurement] = []
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_started(system, log_directory)) for system in systems]
        for one in running:
            began_s = time.monotonic()
            _warm_up(one, work)
            print(f"{one.target.name} is warm after {time.monotonic() - began_s:.0f} s", flush=True)
        for round in range(work.rounds):
            measurements += _round(running, work, round)
            check_same_work(measurements)
    return measurements


def _round(running: Sequence[Running], work: Work, round: int) -> Iterator[Measurement]:
    first = round % len(running)
    in_turn = [*running[first:], *running[:first]]
    for concurrency, count in work.requests.items():
        start = round * sum(work.requests.values())
        texts = [prompt.text for prompt in take(work.prompts, start, count)]
        for one in in_turn:
            if one.takes(concurrency):
                yield _measure_one(one, [entry.server for entry in running], texts, work, concurrency, round)


def _measure_one(
    one: Running, servers: Sequence[Server], texts: Sequence[str], work: Work, concurrency: int, round: int
) -> Measurement:
    with one.server.awake():
        salt = f"{round}/{concurrency}"
        _ask(one, texts[:1], _WAKE_TOKENS, concurrency=1, salt=f"wake/{salt}")
        foreign_before_s = busy_s(servers)
        exchanges = _ask(one, texts, work.output_tokens, concurrency=concurrency, salt=salt)
        foreign_s = busy_s(servers) - foreign_before_s
    found = measure(
        exchanges, system=one.target.name, round=round, concurrency=concurrency, foreign_s=max(0.0, foreign_s)
    )
    print(
        f"round {round + 1}, {concurrency} at a time: {found.system} {found.output_tokens_per_s:.1f} tokens/s, "
        f"others {found.foreign_cores:.2f} cores",
        flush=True,
    )
    return found


def _warm_up(one: Running, work: Work) -> None:
    """One unmeasured answer for every client of every concurrency: shapes are compiled, caches are allocated."""
    with one.server.awake():
        for concurrency in filter(one.takes, work.requests):
            texts = [prompt.text for prompt in take(work.prompts, 0, concurrency)]
            _ask(one, texts, _WARM_UP_TOKENS, concurrency=concurrency, salt=f"warm-up/{concurrency}")


def _ask(one: Running, texts: Sequence[str], output_tokens: int, *, concurrency: int, salt: str) -> list[Exchange]:
    return run_load(
        one.target.salted(salt),
        texts,
        concurrency=concurrency,
        output_tokens=output_tokens,
        timeout_s=_LOAD_TIMEOUT_S,
    )


@contextlib.contextmanager
def _started(system: System, log_directory: Path) -> Iterator[Running]:
    base_url = f"http://127.0.0.1:{free_port()}"
    with Server(system.recipe(base_url, log_directory / f"{system.name}.log")) as server:
        took_s = server.wait_until_healthy(_START_TIMEOUT_S)
        print(f"{system.name} is up after {took_s:.0f} s", flush=True)
        server.freeze()
        yield Running(server=server, target=system.target(base_url), most_at_once=system.most_at_once)


def _parser() -> argparse.ArgumentParser:
    parser = command_line(__doc__)
    prompts = os.environ.get(PROMPTS_VARIABLE)
    parser.add_argument(
        "--prompts",
        type=Path,
        default=prompts and Path(prompts),
        required=not prompts,
        help=f"question.jsonl of Spec-Bench; default: ${PROMPTS_VARIABLE}",
    )
    parser.add_argument("--model", type=Path, help="checkpoint directory; default: what `faser pull` fetches")
    parser.add_argument("--peers", type=_names, default=",".join(_PEERS), help=_PEERS_HELP)
    parser.add_argument("--concurrency", type=_numbers, default="1,4,16", help="default: %(default)s")
    parser.add_argument("--rounds", type=_positive, default=5, help="default: %(default)s")
    parser.add_argument("--output-tokens", type=_answer_length, default=128, help="default: %(default)s")
    parser.add_argument("--max-model-len", type=_positive, default=2048, help="default: %(default)s")
    parser.add_argument("--cores", type=_core_count, default="2", help="how many to use; default: %(default)s")
    parser.add_argument("--faser-args", default="", help="more flags for `faser serve`, as one string")
    parser.add_argument("--vllm-args", default="", help="more flags for `vllm serve`, as one string")
    parser.add_argument("--llamacpp-args", default="", help="more flags for `llama-server`, as one string")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, default=Path("benchmarks/results/peers-cpu.json"), help="default: %(default)s"
    )
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(SYSTEMS)):
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(SYSTEMS)}")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(_positive(number) for number in text.split(","))


def _positive(text: str) -> int:
    return _integer(text, low=1)


def _answer_length(text: str) -> int:
    """At least two tokens: there is no time per token after the first one otherwise."""
    return _integer(text, low=2)


def _core_count(text: str) -> int:
    return _integer(text, low=1, high=len(os.sched_getaffinity(0)))


def _integer(text: str, *, low: int, high: int | None = None) -> int:
    if int(text) < low:
        raise argparse.ArgumentTypeError(f"{text}: must be at least {low}")
    if high is not None and int(text) > high:
        raise argparse.ArgumentTypeError(f"{text}: must be at most {high}")
    return int(text)
