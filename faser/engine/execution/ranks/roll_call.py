"""The roll call: which ranks hang, when a collective has failed.

Gloo does not say whom it has waited for. So rank 0 asks through the store, and a thread of each other rank answers
how many collectives that rank has entered. A rank that is stopped, or whose machine is gone, does not answer; one
whose computation hangs has entered fewer than rank 0.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch._C._distributed_c10d import Store

_ASKED = "roll call"
_POLL_S = 0.1
_LISTEN_S = 0.25  # between two looks of a rank at the store
_PATIENCE_S = 1.5


def answer_roll_call(store: Store, rank: int, num_entered: Callable[[], int], ended: threading.Event) -> None:
    """Start the thread that answers for a rank, once. num_entered: how many collectives the rank has entered.

    ended: is set when nothing more is to be answered.
    """

    def answer() -> None:
        with contextlib.suppress(RuntimeError):  # the store is gone, and rank 0 with it
            while not ended.wait(_LISTEN_S):
                if store.check([_ASKED]):
                    store.set(_answer(rank), str(num_entered()))
                    return

    threading.Thread(target=answer, name="faser-roll-call", daemon=True).start()


def call_roll(store: Store, size: int, check: Callable[[], None]) -> dict[int, int]:
    """Return how many collectives each rank that answers has entered.

    check: raises an error that names a rank that has ended; called meanwhile.
    """
    answers: dict[int, int] = {}
    until_s = time.monotonic() + _PATIENCE_S

    def ask() -> None:
        with contextlib.suppress(RuntimeError):
            store.set(_ASKED, "")
            while len(answers) < size - 1 and time.monotonic() < until_s:
                for rank in range(1, size):
                    if rank not in answers and store.check([_answer(rank)]):
                        answers[rank] = int(store.get(_answer(rank)))
                time.sleep(_POLL_S)

    # In a thread, for the store may be gone, or locked by a rank that is stopped.
    asking = threading.Thread(target=ask, name="faser-roll-call", daemon=True)
    asking.start()
    while asking.is_alive() and time.monotonic() < until_s:
        check()
        asking.join(_POLL_S)
    check()
    return dict(answers)


def verdict(answers: Mapping[int, int], size: int, num_entered: int, waited_s: float) -> str:
    """Say which ranks hang. answers: of call_roll. num_entered, waited_s: rank 0's own."""
    silent = [rank for rank in range(1, size) if rank not in answers]
    if silent:
        return f"{_named(silent)} does not answer: it is stopped, or cannot be reached"
    least = min(answers.values())
    if least < num_entered:
        behind = [rank for rank, entered in answers.items() if entered == least]
        return f"{_named(behind)} hangs: the other ranks have waited for it for {waited_s:.0f} s"
    return "all ranks of the tensor-parallel model answer, but a connection between them has broken"


def _named(ranks: Sequence[int]) -> str:
    return f"rank {' and rank '.join(map(str, ranks))} of the tensor-parallel model"


def _answer(rank: int) -> str:
    return f"{_ASKED}/{rank}"
