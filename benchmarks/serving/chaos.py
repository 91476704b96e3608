"""A server under mixed load: hostile clients, and engines that are killed and hang.

    python -m benchmarks serving.chaos [OUT.json] [--minutes 10] [--clients 64] [--seed 0] [--kills 3] [--hangs 1]
        [--model MODEL] [--server-args 'FLAGS']

Starts `faser serve` on loopback with a small KV cache. Every client does one thing after the other, by chance:
waits for an answer or a stream, leaves one, disconnects, stalls in the middle of a body, sends nonsense, megabytes
of prompt or headers, or asks the probes. Meanwhile engines are killed (SIGKILL) and frozen (SIGSTOP), in the first
half of the time. Choices follow from the seed; moments do not.

Promised, and checked: every request of a client that behaves ends in tokens or in a well-formed error, which is
never a 500; /health stays 200; the server is ready again within 30 s after a kill (after a
hang: plus --engine-timeout); no block, task, thread or descriptor is held at the end; the memory of both
processes is flat within 5 % after warm-up (the front-end's: in the second half; the engine's: in its last life);
SIGTERM ends it with status 0. The exit status is 1 if a promise is broken. OUT.json and a picture, OUT.svg, are
written either way.
"""

import asyncio
import contextlib
import random
import shlex
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.runner import about, command_line, portable, write_json
from benchmarks.servers import WatchedServer
from benchmarks.serving.chaos_clients import ACTIONS, ERROR, Violation, Visit, act, answer, http_client
from benchmarks.serving.chaos_report import HANG, KILL, Outcome, broken_promises, document, picture, strike, watch

OUT = Path("benchmarks/results/chaos.json")
_DEFAULT_MODEL_FLAGS = ("--max-model-len", "2048", "--kv-cache-memory", "192MiB")
_MOST_VIOLATIONS = 50  # that are noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """flags: of the server, the model included."""

    seconds: float
    clients: int
    seed: int
    kills: int
    hangs: int
    flags: tuple[str, ...]
    engine_timeout_s: float = 10.0

    @property
    def server_flags(self) -> tuple[str, ...]:
        restarts = ("--engine-restarts", str(self.kills + self.hangs))
        return (*self.flags, *restarts, "--engine-timeout", f"{self.engine_timeout_s:g}")

    @property
    def faults(self) -> list[tuple[float, str]]:
        """(second, kind), in the first half of the time; the hangs come before the last kill."""
        kinds = [*(KILL,) * (self.kills - 1), *(HANG,) * self.hangs, *(KILL,) * min(1, self.kills)]
        return [(self.seconds * (0.1 + 0.4 * i / len(kinds)), kind) for i, kind in enumerate(kinds)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_line(__doc__)
    parser.add_argument("out", type=Path, nargs="?", default=OUT)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--hangs", type=int, default=1)
    parser.add_argument("--model", help="else the default one")
    parser.add_argument("--server-args", default=shlex.join(_DEFAULT_MODEL_FLAGS))
    options = parser.parse_args(arguments)
    wanted = Wanted(
        seconds=60 * options.minutes,
        clients=options.clients,
        seed=options.seed,
        kills=options.kills,
        hangs=options.hangs,
        flags=(*([options.model] if options.model else []), *shlex.split(options.server_args)),
    )
    outcome = run(wanted)
    head = {
        **about("serving.chaos", arguments),
        "server": portable(shlex.join(["faser", "serve", *wanted.server_flags])),
        "seconds": wanted.seconds,
        "clients": wanted.clients,
        "seed": wanted.seed,
    }
    write(options.out, head, outcome)
    broken = broken_promises(outcome)
    print(
        "\n".join(broken) or f"{outcome.counts.total()} requests, {len(outcome.faults)} faults: all promises kept"
    )
    return 1 if broken else 0


def run(wanted: Wanted) -> Outcome:
    """Start a server, run the load and the faults, and stop it."""
    with tempfile.TemporaryDirectory() as folder, WatchedServer(Path(folder), wanted.server_flags) as server:
        server.wait_until_healthy(route="/ready")
        asyncio.run(_warm_up(server, wanted))
        outcome = Outcome(before=server.idle_holdings(), engine_timeout_s=wanted.engine_timeout_s)
        asyncio.run(_chaos(server, wanted, outcome))
        outcome.after = server.idle_holdings()
        outcome.exit_status = server.end()
        if outcome.exit_status != 0 or outcome.violations:
            print(server.log[-20_000:], file=sys.stderr)
    return outcome


def write(out: Path, head: dict[str, Any], outcome: Outcome) -> None:
    write_json(out, document(head, outcome))
    out.with_suffix(".svg").write_text(picture(outcome), encoding="utf-8")


async def _warm_up(server: WatchedServer, wanted: Wanted) -> None:
    """Ask for as many answers at once as there will be clients: pools have their size then."""
    async with http_client(server.url) as http:
        visits = [
            Visit(http=http, address=server.address, rng=random.Random(f"{wanted.seed}/warm-up/{number}"))
            for number in range(wanted.clients)
        ]
        await asyncio.gather(*map(answer, visits))


async def _chaos(server: WatchedServer, wanted: Wanted, outcome: Outcome) -> None:
    began_s = time.monotonic()
    async with http_client(server.url) as http, _cancelled_at_end(watch(server, began_s, outcome.samples)):
        clients = [
            _client(server, wanted, number, began_s + wanted.seconds, outcome) for number in range(wanted.clients)
        ]
        load = asyncio.gather(*clients)
        for at_s, kind in wanted.faults:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            outcome.faults.append(await strike(server, http, kind, began_s))
        await load


async def _client(server: WatchedServer, wanted: Wanted, number: int, until_s: float, outcome: Outcome) -> None:
    rng = random.Random(f"{wanted.seed}/{number}")
    actions, weights = list(ACTIONS), list(ACTIONS.values())
    async with http_client(server.url) as http:
        visit = Visit(http=http, address=server.address, rng=rng)
        while time.monotonic() < until_s:
            (action,) = rng.choices(actions, weights)
            try:
                ended = await act(action, visit)
            except Violation as violation:
                ended = "violation"
                if len(outcome.violations) < _MOST_VIOLATIONS:
                    at_s = wanted.seconds - (until_s - time.monotonic())
                    outcome.violations.append(f"{action.__name__} at {at_s:.0f} s: {violation}")
            outcome.counts[action.__name__, ended] += 1
            # Who was refused waits, as clients do; else they would take the cores that a restart needs.
            await asyncio.sleep(rng.uniform(0.5, 5) if ended == ERROR else rng.uniform(0, 0.3))


@contextlib.asynccontextmanager
async def _cancelled_at_end(work: Any) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
