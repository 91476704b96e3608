"""A CUDA device that is the CPU: pinned memory, events, and CUDA graphs that really replay.

Work runs when it is enqueued, but

    a copy to the device    may be under way until an event after it is waited for: a source that is overwritten
                            before that is found at the next wait
    a copy to the host      arrives when an event after it is waited for, and is nonsense before
    a graph                 is every call of torch's dispatcher while work is captured, with the very tensors and
                            numbers of that moment, and every kernel that torch knows nothing of (`launch`). A
                            replay makes these calls again. So numbers that the host computed stay what they
                            were, and a tensor that was replaced, where it should have been written to, is not
                            seen

and a capture fails on what a real one could not hold: host reads, waits, copies from the host, plans, tensors
made from host numbers, sizes that depend on data. It differs in that work also runs while it is captured.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from faser.kernels.interface.shapes import DeviceLane

WARM_UPS = 2

# Calls after which the host knows what the device computed: it has waited.
_HOST_READS = {
    Tensor.item,
    Tensor.tolist,
    Tensor.numpy,
    Tensor.cpu,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__array__,
    torch.tensor,
    torch.as_tensor,
}
_WAITING = {
    "_local_scalar_dense",
    "bincount",
    "equal",
    "is_nonzero",
    "lift_fresh",
    "masked_select",
    "nonzero",
    "repeat_interleave",
    "unique_dim",
    "_unique2",
}


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the calls of a capture, with the sizes and numbers of that moment."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Callable[[], None]] = []
        self.fresh_bytes = 0
        self.is_paused = False

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run a kernel that is not torch's; it is noted as one call."""
        self.is_paused = True
        try:
            kernel()
        finally:
            self.is_paused = False
        self.calls.append(kernel)

    def __torch_dispatch__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if self.is_paused:
            return func(*args, **options)
        name = func.overloadpacket.__name__
        assert name not in _WAITING, f"{name} waits for the device, or brings numbers to it, within a capture"
        _check_indices(name, args)
        result = func(*args, **options)
        self._note(func, name, args, options, result)
        return result

    def _note(self, func: Any, name: str, args: tuple[Any, ...], options: dict[str, Any], result: Any) -> None:
        known = {_storage(each) for each in _tensors((args, list(options.values())))}
        results = list(_tensors(result))
        fresh = [_storage(each) not in known for each in results]
        self.fresh_bytes += sum(each.nbytes for each, is_new in zip(results, fresh, strict=True) if is_new)
        is_view = not any(fresh) and not func._schema.is_mutable
        if is_view or name.startswith(("empty", "new_empty")):
            return

        def again() -> None:
            values = _tensors(func(*args, **options))
            for place, value, is_new in zip(results, values, fresh, strict=True):
                if is_new:
                    place.copy_(value)

        self.calls.append(again)


class _NoHostReads(TorchFunctionMode):
    """What the dispatcher does not see."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, func: Any, _types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert self._tape.is_paused or func not in _HOST_READS, f"{func.__name__} within a capture"
        return func(*args, **(kwargs or {}))


def _check_indices(name: str, args: tuple[Any, ...]) -> None:
    """Indexing by truth values has a size that only the device knows."""
    if name in ("index", "index_put", "index_put_"):
        masks = [each for each in _tensors(list(args[1])) if each.dtype is torch.bool]
        assert not masks or (name != "index" and args[2].numel() == 1), f"{name} by a mask within a capture"


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _storage(tensor: Tensor) -> int:
    """Where its memory begins; a tensor without memory is like no other."""
    return tensor.untyped_storage().data_ptr() or id(tensor)


@dataclass
class FakeEvent:
    owner: "FakeAccelerator"
    number: int = 0

    def record(self) -> None:
        self.owner.check_not_capturing("an event is recorded")
        self.number = self.owner.given

    def hold_stream(self) -> None:
        """There is one stream, whose work is in order."""

    def query(self) -> bool:
        return self.number <= self.owner.done

    def synchronize(self) -> None:
        self.owner.check_not_capturing("the host waits")
        self.owner.reach(self.number)


@dataclass(frozen=True)
class FakeGraph:
    owner: "FakeAccelerator"
    recorder: "FakeGraphRecorder"
    calls: list[Callable[[], None]]

    def replay(self) -> None:
        self.owner.check_not_capturing("a graph is replayed")
        self.owner.on_replay(self.recorder)
        self.owner.given += 1
        with torch.inference_mode():
            for call in self.calls:
                call()


@dataclass
class FakeGraphRecorder:
    """pool: the memory pool of all its graphs."""

    owner: "FakeAccelerator"
    lane: DeviceLane | None = None
    pool: object = field(default_factory=object)
    graph_bytes: int = 0

    def capture(self, work: Callable[[], None]) -> FakeGraph:
        owner = self.owner
        owner.check_not_capturing("another capture begins")
        for _ in range(WARM_UPS):
            work()
        owner.tape = Tape()
        try:
            with _NoHostReads(owner.tape), owner.tape:
                work()
            self.graph_bytes += owner.tape.fresh_bytes
            return FakeGraph(owner, self, owner.tape.calls)
        finally:
            owner.tape = None


@dataclass(frozen=True)
class _Copy:
    """host: pinned. value: what it held, or will hold. number: of the piece of work."""

    host: Tensor
    value: Tensor
    number: int


@dataclass
class FakeAccelerator:
    """See Accelerator. given: number of enqueued pieces of work; done: how many of them are known to be done.

    waits: how often the host waited for work that was not known to be done.
    on_replay: called before every replay, by the thread that asks for it.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_processors: int = 132
    given: int = 0
    done: int = 0
    waits: int = 0
    uploads: int = 0
    pinned_bytes: int = 0
    tape: Tape | None = None
    on_replay: Callable[[FakeGraphRecorder], None] = lambda _: None
    _pinned: dict[int, Tensor] = field(default_factory=dict)
    _leaving: list[_Copy] = field(default_factory=list)
    _arriving: list[_Copy] = field(default_factory=list)

    def host_numbers(self, count: int, dtype: torch.dtype = torch.int32) -> Tensor:
        self.check_not_capturing("pinned memory is allocated")
        found = torch.full((count,), 0x59, dtype=torch.uint8).repeat(dtype.itemsize).view(dtype)
        self._pinned[_storage(found)] = found
        self.pinned_bytes += found.nbytes
        return found

    def upload(self, numbers: Tensor) -> Tensor:
        self.uploads += 1
        self.reads(numbers)
        return numbers.clone()

    def transfer(self, source: Tensor, target: Tensor) -> None:
        assert source.shape == target.shape, (source.shape, target.shape)
        assert source.dtype is target.dtype, (source.dtype, target.dtype)
        assert self.is_pinned(source) != self.is_pinned(target), "such a copy waits for the device"
        if self.is_pinned(source):
            self.reads(source)
            target.copy_(source)
            return
        self.check_not_capturing("the host gets values")
        self.given += 1
        self._arriving.append(_Copy(target, source.clone(), self.given))
        target.view(torch.uint8).fill_(0x59)

    def event(self) -> FakeEvent:
        return FakeEvent(self)

    def graph_recorder(self, lane: DeviceLane | None = None) -> FakeGraphRecorder:
        return FakeGraphRecorder(self, lane)

    def wait(self) -> None:
        self.check_not_capturing("the host waits")
        self.reach(self.given)

    def wide_product(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        assert x.dtype is weight.dtype, (x.dtype, weight.dtype)
        assert out.dtype is torch.float32, out.dtype
        return torch.mm(x.float(), weight.float(), out=out)

    def launch(self, kernel: Callable[[], None]) -> None:
        """Run a kernel that is not torch's."""
        self.given += 1
        if self.tape is None:
            kernel()
        else:
            self.tape.launch(kernel)

    def reads(self, host: Tensor) -> None:
        """The device copies from this memory, later if it is pinned."""
        self.check_not_capturing("something is copied from the host")
        self.given += 1
        if self.is_pinned(host):
            self._leaving.append(_Copy(host, host.clone(), self.given))

    def reach(self, number: int) -> None:
        """The first `number` pieces of work are done."""
        self.waits += number > self.done
        self.done = max(self.done, number)
        for each in self._leaving:
            same = each.number > self.done or torch.equal(each.host, each.value)
            assert same, "pinned memory was written to while the device was copying from it"
        for each in self._arriving:
            if each.number <= self.done:
                each.host.copy_(each.value)
        self._leaving = [each for each in self._leaving if each.number > self.done]
        self._arriving = [each for each in self._arriving if each.number > self.done]

    def check_not_capturing(self, what: str) -> None:
        assert self.tape is None, f"{what} within a capture"

    def is_pinned(self, tensor: Tensor) -> bool:
        return _storage(tensor) in self._pinned
