"""`faser serve` that also tells how many asyncio tasks it has.

    python -m benchmarks serving.watched_server SOCKET [FLAGS]

Whoever connects to the Unix socket SOCKET reads the names of the unfinished tasks as a JSON list. A thread
answers, so that the event loop is as it always is.
"""

import asyncio
import gc
import json
import socket
import sys
import threading

from faser.cli.main import main as faser


def main() -> int:
    _, path, *flags = sys.argv
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    threading.Thread(target=_answer, args=(listener,), daemon=True).start()
    return faser(["serve", *flags])


def _answer(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(json.dumps(_unfinished_tasks()).encode())


def _unfinished_tasks() -> list[str]:
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    return sorted(each.get_name() for each in tasks if not each.done())
