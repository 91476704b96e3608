"""Tries FASER's container image for real, with podman or docker, and writes what came out.

    python -m benchmarks.image [OUT.json] [--image faser:0.1.0] [--engine podman] [--trials NAME,NAME]
        [--build] [--build-flags 'FLAGS'] [--run-flags 'FLAGS']

Trials: contents (size by layer, no compiler), locked_down (read-only root, no capabilities, 2 GiB: chat, start-up
times, memory), without_network, any_user (a random user of group 0), drains (stopped while a stream runs),
stops_while_loading, least_memory; with podman also chart_pod (`podman play kube` with what the chart renders) and
compose_service (needs podman-compose and port 8000 of 127.0.0.1). Every port is bound to 127.0.0.1. The exit
status is 1 if a trial fails; the others are still made.
"""

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.image.containers import Engine, TrialError
from benchmarks.image.pod import chart_pod, compose_service
from benchmarks.image.trials import TRIALS, Found
from benchmarks.peers.machine import describe_machine, git_commit

OUT = Path("benchmarks/results/image.json")
_BY_PODMAN = {"chart_pod": chart_pod, "compose_service": compose_service}
_ALL = TRIALS | _BY_PODMAN


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--image", default="localhost/faser:0.1.0")
    parser.add_argument("--engine", default="podman")
    parser.add_argument("--trials", help=f"of {', '.join(_ALL)}")
    parser.add_argument("--build", action="store_true", help="build the image first, from this checkout")
    parser.add_argument("--build-flags", default="", help="such as '--build-arg PIP_FIND_LINKS=…'")
    parser.add_argument("--run-flags", default="", help="further flags of every run")
    options = parser.parse_args(arguments)
    engine = Engine(program=options.engine, flags=tuple(shlex.split(options.run_flags)))
    if options.build:
        build(engine, options.image, shlex.split(options.build_flags))
    names = options.trials.split(",") if options.trials else [*TRIALS, *(_BY_PODMAN if engine.is_podman else ())]
    unknown = sorted(set(names) - set(_ALL))
    if unknown:
        parser.error(f"--trials names {', '.join(unknown)}; there are {', '.join(_ALL)}")
    results = {name: tried(name, _ALL[name], engine, options.image) for name in names}
    document = {
        "command": shlex.join(["python", "-m", "benchmarks.image", *arguments]),
        "commit": git_commit(),
        "machine": describe_machine(sorted(os.sched_getaffinity(0))),
        "engine": engine.call("--version"),
        "load_average": [round(each, 1) for each in os.getloadavg()],
        "trials": results,
    }
    options.out.write_text(json.dumps(document, indent=1) + "\n")
    return 0 if all(each["held"] for each in results.values()) else 1


def build(engine: Engine, image: str, flags: Sequence[str]) -> None:
    """docker's format keeps HEALTHCHECK, which podman leaves out otherwise."""
    chosen = ("--format", "docker") if engine.is_podman else ()
    revision = ("--build-arg", f"REVISION={git_commit()}")
    engine.call("build", *chosen, *revision, *flags, "--tag", image, str(Path.cwd()), timeout_s=3600)


def tried(name: str, trial: Callable[[Engine, str], Found], engine: Engine, image: str) -> dict[str, Any]:
    """What the trial found, with `held`: whether all that it checks is so."""
    began_s = time.monotonic()
    try:
        outcome: dict[str, Any] = {"held": True, **trial(engine, image)}
    except TrialError as error:
        outcome = {"held": False, "error": str(error)}
    seconds = round(time.monotonic() - began_s, 1)
    print(f"{name:<20} {'holds' if outcome['held'] else 'FAILS'} {seconds:6.1f} s", flush=True)
    for key, value in outcome.items():
        if key != "held":
            print(f"    {key}: {json.dumps(value, ensure_ascii=False)[:400]}", flush=True)
    return outcome | {"seconds": seconds}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
