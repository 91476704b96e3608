"""Tries FASER's container image for real, with podman or docker, and writes what came out.

    python -m benchmarks image [OUT.json] [--image faser:0.1.0] [--engine podman] [--trials NAME,NAME]
        [--build] [--build-flags 'FLAGS'] [--run-flags 'FLAGS']

Trials: contents (size by layer, no compiler), locked_down (read-only root, no capabilities, 2 GiB: chat, start-up
times, memory), without_network, any_user (a random user of group 0), drains (stopped while a stream runs),
stops_while_loading, least_memory; with podman also chart_pod (`podman play kube` with what the chart renders) and
compose_service (needs podman-compose and port 8000 of 127.0.0.1). Every port is bound to 127.0.0.1. The exit
status is 1 if a trial fails; the others are still made.
"""

import json
import shlex
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.image.containers import (
    PYTHON,
    Container,
    Engine,
    LongStream,
    TrialError,
    ask,
    chart_pod,
    client,
    compose_service,
    image_config,
    layers,
    started,
)
from benchmarks.runner import about, command_line, git_commit, write_json
from faser.kernels.cpu.build import Isa

Found = dict[str, Any]
_COMPILERS = ("cc", "gcc", "g++", "clang", "c++", "ld", "nvcc")
_PREBUILT = "/opt/faser/lib/python3*/site-packages/faser/kernels/cpu/native/prebuilt"
_MIB = 1 << 20
_MEMORIES_MIB = (2048, 1024, 896, 768, 640, 512)
_STREAM_TOKENS = 200
_ASK_INSIDE = """
import json, urllib.request as r
body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
url, headers = "http://127.0.0.1:%d/v1/chat/completions", {"Content-Type": "application/json"}
print(json.load(r.urlopen(r.Request(url, json.dumps(body).encode(), headers)))["choices"][0]["message"]["content"])
"""


def contents(engine: Engine, image: str) -> Found:
    """Size of the layers; no compiler, no root, one kernel library for each instruction set, labels."""
    config = image_config(engine, image)["Config"]
    _expect(config["User"] == "10001:10001", f"USER is {config['User']}")
    names = ("title", "version", "revision", "source", "licenses")
    labels = {name: config["Labels"].get(f"org.opencontainers.image.{name}") for name in names}
    _expect(None not in labels.values(), f"labels are {labels}")
    look = f"for each in {' '.join(_COMPILERS)}; do command -v $each; done; ls {_PREBUILT}"
    done = engine.attempt("run", "--rm", "--network", "none", "--entrypoint", "sh", image, "-c", look)
    said = done.stdout.split()
    _expect(not any(line.startswith("/") for line in said), f"the image has {said}")
    libraries = sorted(name.partition("-")[0] for name in said)
    _expect(set(libraries) == set(Isa), f"kernels are for {libraries}; there are {', '.join(Isa)}")
    found = layers(engine, image)
    return {
        "kernels": libraries,
        "labels": labels,
        "mib": round(sum(size for _, size in found) / _MIB),
        "layers_mib": [[text[:100], round(size / _MIB, 1)] for text, size in found],
    }


def locked_down(engine: Engine, image: str) -> Found:
    """No writable root, no capability, 2 GiB, 2 cores: a chat with OpenAI's client, the health check, two starts.

    The second start has the volume of the first.
    """
    volume = "faser-trial-data"
    engine.attempt("volume", "rm", "--force", volume)
    limits = ("--memory", "2g", "--cpus", "2", "--volume", f"{volume}:/data")
    try:
        with started(engine, image, *limits) as first:
            cold_s = first.wait_ready()
            _expect("(native)" in first.logs(), "it does not compute with its own kernels")
            answer = ask(first.url)
            at_rest = first.memory_bytes()
            _check_confined(first)
            healthy_s = _check_health(first)
            first.stop()
        with started(engine, image, *limits) as second:
            warm_s = second.wait_ready()
            ask(second.url)
            second.stop()
    finally:
        engine.attempt("volume", "rm", "--force", volume)
    return {
        "answer": answer,
        "first_start_s": round(cold_s, 1),
        "second_start_s": round(warm_s, 1),
        "memory_at_rest_mib": round(at_rest / _MIB),
        "health_check_s": round(healthy_s, 2),
    }


def _check_confined(container: Container) -> None:
    status = container.run_inside("cat", "/proc/1/status").stdout
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    _expect(int(fields["CapEff"], 16) == 0, f"capabilities are {fields['CapEff']}")
    _expect(fields["NoNewPrivs"].strip() == "1", "privileges can be gained")
    _expect(fields["Uid"].split()[0] == "10001", f"the user is {fields['Uid']}")
    for path in ("/", "/tmp", "/opt/faser", "/etc"):
        _expect(container.run_inside("touch", f"{path}/x").returncode != 0, f"{path} can be written")


def _check_health(container: Container) -> float:
    """Seconds the HEALTHCHECK's command takes."""
    described = image_config(container.engine, container.inspect("Image"))
    # Where podman has it, and where docker has it.
    check = described.get("Healthcheck") or described["Config"].get("Healthcheck")
    if check is None:
        raise TrialError("the image has no HEALTHCHECK; podman keeps it with --format docker")
    began_s = time.monotonic()
    done = container.run_inside(*check["Test"][1:])
    _expect(done.returncode == 0, f"the health check failed: {done.stderr[-300:]}")
    return time.monotonic() - began_s


def without_network(engine: Engine, image: str) -> Found:
    """With no network but its own loopback, and an empty volume: a chat from inside."""
    with started(engine, image, "--network", "none") as container:
        deadline = time.monotonic() + 180
        while container.run_inside(PYTHON, "-c", _ASK_INSIDE % container.port).returncode != 0:
            _expect(time.monotonic() < deadline and container.running, f"not ready: {container.logs()[-400:]}")
            time.sleep(0.5)
        return {"answer": container.run_inside(PYTHON, "-c", _ASK_INSIDE % container.port).stdout.strip()}


def any_user(engine: Engine, image: str) -> Found:
    """Ask as a random user of group 0, as OpenShift has it, with a volume; count the files in /data."""
    with started(engine, image, "--user", "1000650000:0") as container:
        container.wait_ready()
        ask(container.url)
        files = container.run_inside("find", "/data", "-type", "f").stdout.split()
        _expect(bool(files), "nothing was written to /data")
        return {"files": len(files)}


def drains(engine: Engine, image: str) -> Found:
    """Stopped while a stream runs: the stream ends whole, a newcomer is asked to retry, the exit status is 0."""
    with started(engine, image, "--memory", "2g") as container:
        container.wait_ready()
        stream = LongStream(container.url, _STREAM_TOKENS)
        reader = stream.start()
        refused: list[tuple[int, str | None]] = []
        newcomer = threading.Thread(target=_knock, args=(container.url, refused))
        newcomer.start()
        status, seconds = container.stop()
        reader.join()
        newcomer.join()
        stream.check_whole()
        _expect(status == 0, f"the exit status is {status}")
        _expect(bool(refused) and refused[0][0] == 503, f"newcomers got {refused}")
        return {
            "tokens": stream.tokens,
            "exit_status": status,
            "stop_s": round(seconds, 1),
            "newcomer": refused[0],
        }


def _knock(url: str, refused: list[tuple[int, str | None]]) -> None:
    """The first refusal of /ready after the signal, then what a request gets."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/ready").status_code == 503:
                body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
                got = httpx.post(f"{url}/v1/chat/completions", json=body)
                refused.append((got.status_code, got.headers.get("Retry-After")))
                return
        except httpx.TransportError:
            return
        time.sleep(0.02)


def stops_while_loading(engine: Engine, image: str, after_s: tuple[float, ...]) -> Found:
    """Stopped so many seconds after it was started, before it is ready: the exit status is 0, at once."""
    found = []
    for seconds in after_s:
        with started(engine, image) as container:
            time.sleep(max(0.0, container.began_s + seconds - time.monotonic()))
            ready = container.status("/ready") == 200
            signalled_s = time.monotonic() - container.began_s
            status, took_s = container.stop()
            _expect(status == 0, f"{signalled_s:.2f} s after the start: status {status} after {took_s:.1f} s")
            found.append({"after_s": round(signalled_s, 2), "took_s": round(took_s, 2), "was_ready": ready})
    _expect(not all(each["was_ready"] for each in found), "it was always ready before the signal")
    return {"stops": found}


def least_memory(engine: Engine, image: str) -> Found:
    """The smallest limit with which a chat is answered and the container stays up."""
    least = None
    for limit in _MEMORIES_MIB:
        try:
            with started(engine, image, "--memory", f"{limit}m", "--memory-swap", f"{limit}m") as container:
                container.wait_ready()
                ask(container.url)
                asked = client(container.url)
                (model,) = asked.models.list().data
                words = "The quick brown fox jumps over the lazy dog. " * 60
                asked.completions.create(model=model.id, prompt=words, max_tokens=32)
                tokens = next(line for line in container.logs().splitlines() if "KV tokens" in line)
                least = {"mib": limit, "said": tokens}
        except Exception as error:  # the container ended, or a connection broke
            return {"least": least, "fails_mib": limit, "error": str(error)[-400:]}
    return {"least": least}


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise TrialError(otherwise)


TRIALS: dict[str, Callable[[Engine, str], Found]] = {
    "contents": contents,
    "locked_down": locked_down,
    "without_network": without_network,
    "any_user": any_user,
    "drains": drains,
    "stops_while_loading": lambda engine, image: stops_while_loading(
        engine, image, (0.4, 0.6, 1.0, 1.5, 2.0, 3.0, 4.0)
    ),
    "least_memory": least_memory,
}


OUT = Path("benchmarks/results/image.json")
_BY_PODMAN = {"chart_pod": chart_pod, "compose_service": compose_service}
_ALL = TRIALS | _BY_PODMAN


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
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
        **about("image", arguments),
        "engine": engine.call("--version"),
        "trials": results,
    }
    write_json(options.out, document)
    return 0 if all(each["held"] for each in results.values()) else 1


def build(engine: Engine, image: str, flags: Sequence[str]) -> None:
    """docker's format keeps HEALTHCHECK, which podman leaves out otherwise."""
    chosen = ("--format", "docker") if engine.is_podman else ()
    revision = ("--build-arg", f"REVISION={git_commit()}")
    engine.call("build", *chosen, *revision, *flags, "--tag", image, str(Path.cwd()), timeout_s=3600)


def tried(name: str, trial: Callable[[Engine, str], Found], engine: Engine, image: str) -> dict[str, Any]:
    """Run a trial; return its findings, with `held`: whether all that it checks is so."""
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
