"""Hosts of engines: a process reports how it ended, and one that does not end is killed."""

import os
import signal
import socket
from contextlib import closing

import psutil

from faser.engine.client.engine_host import launch, start_host


def test_a_process_whose_front_end_closes_the_connection_ends() -> None:
    ours, theirs = socket.socketpair()
    host = start_host("process", theirs)
    ours.close()
    assert host.exit_status() == " (exit status 0)"
    host.wait()


def test_a_thread_ends_with_its_connection_and_has_no_exit_status() -> None:
    ours, theirs = socket.socketpair()
    with closing(ours):
        host = start_host("thread", theirs)
    host.wait()
    assert host.exit_status() == ""


def test_a_process_that_is_stopped_is_killed_and_leaves_no_zombie() -> None:
    ours, theirs = socket.socketpair()
    before = set(psutil.Process().children())
    with closing(ours):
        host = start_host("process", theirs)
        (process,) = set(psutil.Process().children()) - before
        os.kill(process.pid, signal.SIGSTOP)
        host.kill()
    assert not process.is_running()


def test_a_launched_engine_that_is_not_needed_leaves_no_process() -> None:
    before = set(psutil.Process().children())
    launched = launch("process")
    (process,) = set(psutil.Process().children()) - before
    for _ in range(2):
        launched.discard()
    assert not process.is_running()
