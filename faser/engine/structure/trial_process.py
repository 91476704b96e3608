"""Trial compilations: a grammar is compiled in a process that the kernel kills when it takes too much.

Run as `python -m faser.engine.structure.trial_process FD`, with the tokenizer on standard input. FD is a socket
that carries one end of a further socket for each trial. A trial has two processes, forked from this one: one
compiles, the other waits for it and kills it when the engine closes its end. Both are gone after the trial, so a
grammar that overflows the stack ends neither the engine nor this process.
"""

import json
import os
import resource
import select
import signal
import socket
import struct
import sys
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from faser.engine.structure.grammar_checks import LIMITS, fault, place_of_fault

LENGTH = struct.Struct("!Q")  # of the JSON text that asks for a trial
MOST_BYTES = 256 << 20  # that a compilation may add to the process
_STACK_BYTES = 4 << 20  # half of what the engine's threads have, which compile the same grammar after it


def main() -> None:
    """Serve until the engine closes the socket."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # this process ends with the engine, which may be draining
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # trials are not waited for
    setup = json.load(sys.stdin.buffer)
    tokenizer = LLTokenizer(setup["tokenizer"], n_vocab=setup["n_vocab"], eos_token=setup["eos_token"])
    del setup
    with socket.socket(fileno=int(sys.argv[1])) as engine:
        while True:
            _, ends, _, _ = socket.recv_fds(engine, 1, 1)
            if not ends:
                return
            with socket.socket(fileno=ends[0]) as trial:
                if os.fork() == 0:
                    engine.close()
                    _supervise(trial, tokenizer)
                    os._exit(0)


def _supervise(trial: socket.socket, tokenizer: LLTokenizer) -> None:
    """Answer with JSON lines, which together are the members of one object; the last has how the trial ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with trial.makefile("rb", buffering=0) as incoming:
        (size,) = LENGTH.unpack(_read(incoming, LENGTH.size))
        asked = json.loads(_read(incoming, size))
    running, ended = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(running)
        _limit(asked["cpu_s"], asked["nice"])
        _compile(asked, tokenizer, trial)
        os._exit(0)
    os.close(ended)
    ready, _, _ = select.select([running, trial.fileno()], [], [])
    if running not in ready:  # the engine wants it no longer
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    _answer(trial, signal=os.WTERMSIG(status), exit_status=os.WEXITSTATUS(status))


def _limit(cpu_s: float, nice: int) -> None:
    """Bound the processor time, memory and stack of this process."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        size = int(statm.read().split()[0]) * resource.getpagesize()
    for which, limit in (
        (resource.RLIMIT_AS, size + MOST_BYTES),
        (resource.RLIMIT_STACK, _STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(which)[1]
        soft = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(which, (soft, hard))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a crash is reported by its signal
    os.nice(nice)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _compile(asked: dict[str, Any], tokenizer: LLTokenizer, trial: socket.socket) -> None:
    """Compile, and say what is wrong with the grammar; for a JSON schema also where, if that is found in time."""
    before = _private_bytes()
    matcher = LLMatcher(tokenizer, asked["grammar"], log_level=0, limits=LIMITS)
    reason = fault(matcher)
    _answer(trial, fault=reason, num_bytes=_private_bytes() - before)
    if reason is not None and asked["schema"] is not None:
        signal.setitimer(signal.ITIMER_PROF, asked["cpu_s"])
        schema, any_whitespace = asked["schema"], asked["any_whitespace"]
        _answer(trial, place=place_of_fault(schema, reason, tokenizer, any_whitespace=any_whitespace))


def _private_bytes() -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


def _answer(trial: socket.socket, **members: Any) -> None:
    trial.sendall(json.dumps(members).encode() + b"\n")


def _read(incoming: Any, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = incoming.read(size - len(found))
        if not part:
            os._exit(0)  # the engine wants it no longer
        found += part
    return bytes(found)


if __name__ == "__main__":
    main()
