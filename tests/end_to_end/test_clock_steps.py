"""The system's clock jumps by days while a server works: nothing but the dates in answers changes.

A library that is loaded before all others adds an offset, which a file holds, to what the C library says. Time as
Python, uvloop and the engine read it goes through there.
"""

import json
import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.end_to_end.server import Server, end, start

DAY_S = 86400
LIBRARY = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
static volatile int64_t *offset_s;
__attribute__((constructor)) static void begin(void) {
    void *shared = mmap(0, 8, PROT_READ, MAP_SHARED, open(getenv("CLOCK_OFFSET_FILE"), O_RDONLY), 0);
    offset_s = shared == MAP_FAILED ? 0 : shared;
}
int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    int status = real(id, at);
    if (offset_s && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += *offset_s;
    return status;
}
time_t time(time_t *found) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    if (found) *found = at.tv_sec;
    return at.tv_sec;
}
int gettimeofday(struct timeval *found, void *zone) {
    struct timespec at;
    clock_gettime(CLOCK_REALTIME, &at);
    found->tv_sec = at.tv_sec;
    found->tv_usec = at.tv_nsec / 1000;
    return 0;
}
"""

SetClock = Callable[[int], None]


@pytest.fixture
def clock(tmp_path: Path) -> Iterator[tuple[SetClock, dict[str, str]]]:
    """A function that sets the clock forward or back by seconds, and the variables for a program that obeys it."""
    compiler = shutil.which("cc") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C compiler")
    source, library, offset = tmp_path / "clock.c", tmp_path / "clock.so", tmp_path / "offset"
    source.write_text(LIBRARY)
    subprocess.run([compiler, "-shared", "-fPIC", "-x", "c", str(source), "-o", str(library), "-ldl"], check=True)
    with offset.open("w+b", buffering=0) as file:

        def set_clock(seconds: int) -> None:
            file.seek(0)
            file.write(struct.pack("<q", seconds))

        set_clock(0)
        yield set_clock, {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}


def seconds_measured(server: Server, name: str) -> float:
    return server.metric(f"{name}_seconds_sum")


@pytest.mark.full
def test_a_clock_that_jumps_touches_no_deadline_rate_connection_or_metric(
    clock: tuple[SetClock, dict[str, str]], tiny_checkpoint: Path, tmp_path: Path
) -> None:
    """By a day ahead, and by two back."""
    set_clock, variables = clock
    flags = ("--api-key", "none", "--key-rpm-limit", "2", "--engine-timeout", "30", "--request-timeout", "60")
    server = start(tiny_checkpoint, tmp_path, *flags, variables=variables)
    try:
        server.wait_ready()
        engine = server.engine_process()
        with server.http() as http:
            body = {"prompt": "the", "max_tokens": 150, "ignore_eos": True, "stream": True}
            connections, ahead_s = [], 0
            for jump_to_s in (DAY_S, -DAY_S):
                with http.stream("POST", "/v1/completions", json=body) as answer:
                    lines = answer.iter_lines()
                    created = json.loads(next(lines).removeprefix("data: "))["created"]
                    assert abs(created - time.time() - ahead_s) < 60, "the library works"
                    set_clock(ahead_s := jump_to_s)
                    rest = list(lines)
                assert rest[-2:] == ["data: [DONE]", ""]
                assert not any('"error"' in line for line in rest)
                connections.append(answer.extensions["network_stream"])
            assert connections[0] is connections[1], "the connection was kept"
            refused = http.post("/v1/completions", json={"prompt": "the", "max_tokens": 1})
            assert refused.status_code == 429, "a jump gives no new requests"
            assert 1 <= int(refused.headers["retry-after"]) <= 60
            assert http.get("/ready").status_code == 200
        time.sleep(2.5)  # a heartbeat of the engine, and the front-end's look at it
        assert server.engine_process().pid == engine.pid
        for name in ("e2e_request_latency", "time_to_first_token", "request_queue_time"):
            assert 0 <= seconds_measured(server, name) < 60
        assert "ERROR" not in server.log
    finally:
        end(server)
