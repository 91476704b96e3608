"""A server with few descriptors, flooded by clients that never finish: its probes are answered all the while."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from tests.api.raw_http import connect, head, read_all
from tests.waiting import PATIENCE_S, until

ROOT = Path(__file__).parents[3]
NUM_DESCRIPTORS = 128
NUM_PROBES = 60

HALF_REQUEST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Half"
STALLED_BODY = head(Content_Length=31 << 20) + b"{" + b" " * 20_000
KEPT_ALIVE = head("/health", method="GET")
NOTHING = b""


@contextmanager
def front_end(num_descriptors: int) -> Iterator[tuple[psutil.Process, str]]:
    """A running front_end.py and its URL; killed at the end."""
    command = [sys.executable, "-m", "tests.api.http.front_end", str(num_descriptors)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(60, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            url = f"http://127.0.0.1:{int(process.stdout.readline())}"
            until(lambda: answers(url))
            yield psutil.Process(process.pid), url
        finally:
            watchdog.cancel()
            process.kill()


def answers(url: str) -> bool:
    """Whether a probe on a connection of its own is answered."""
    try:
        with connect(url) as connection:
            connection.sendall(head("/health", method="GET", Connection="close"))
            return read_all(connection).startswith(b"HTTP/1.1 200 ")
    except OSError:
        return False


class Attack(threading.Thread):
    """Opens connections one after the other, sends the same on each, and holds the last ones open."""

    def __init__(self, url: str, sent: bytes, *, num_held: int) -> None:
        super().__init__()
        self.num_opened = 0
        self._url = url
        self._sent = sent
        self._num_held = num_held
        self._over = threading.Event()

    def run(self) -> None:
        with ExitStack() as stack:
            held = [stack.enter_context(ExitStack()) for _ in range(self._num_held)]
            while not self._over.wait(0.01):
                slot = held[self.num_opened % self._num_held]
                slot.close()
                try:
                    slot.enter_context(connect(self._url)).sendall(self._sent)
                except OSError:  # refused or reset, which is the server's good right
                    continue
                self.num_opened += 1

    def stop(self) -> None:
        self._over.set()
        self.join()


@pytest.mark.alone
def test_probes_are_answered_while_unfinished_requests_hold_every_descriptor() -> None:
    with front_end(NUM_DESCRIPTORS) as (process, url):
        descriptors = process.num_fds()
        attacks = [
            Attack(url, sent, num_held=NUM_DESCRIPTORS)
            for sent in (HALF_REQUEST, STALLED_BODY, KEPT_ALIVE, NOTHING)
        ]
        for attack in attacks:
            attack.start()
        num_probes = most_descriptors = 0
        try:
            while num_probes < NUM_PROBES or min(attack.num_opened for attack in attacks) <= 2 * NUM_DESCRIPTORS:
                assert answers(url), f"probe {num_probes} failed"
                num_probes += 1
                most_descriptors = max(most_descriptors, process.num_fds())
                time.sleep(0.02)
            body = {"prompt": "hi"}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S, trust_env=False)
            assert answer.status_code == 200
        finally:
            for attack in attacks:
                attack.stop()
        assert NUM_DESCRIPTORS / 2 < most_descriptors <= NUM_DESCRIPTORS
        until(lambda: process.num_fds() <= descriptors)
