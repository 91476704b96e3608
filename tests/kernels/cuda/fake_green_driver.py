"""A driver that divides processors as one of compute capability 9.0 does, and checks how its handles are used."""

from dataclasses import dataclass, field

from faser.kernels.cuda.lanes import GreenContextError, Group


@dataclass
class FakeGreenDriver:
    """See GreenDriver. refuses: the first call that fails, from 0, as do all later ones; destroying does not
    count and never fails. None: no call fails.


    contexts: those alive, with the group of each. streams: those alive, with the context of each. priorities: of
    all streams ever made. log: calls, in order.
    """

    num_processors: int = 132
    refuses: int | None = None
    contexts: dict[object, Group] = field(default_factory=dict)
    streams: dict[int, object] = field(default_factory=dict)
    priorities: list[int] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    @property
    def num_made(self) -> int:
        return sum(not each.startswith("destroy") for each in self.log)

    def split(self, count: int) -> tuple[Group, Group]:
        self._note("split")
        size = -(-count // 8) * 8
        if size > self.num_processors:
            raise GreenContextError(f"split: 0 groups of {count} among {self.num_processors}")
        group = Group(count=size, resource=tuple(range(size)))
        return group, Group(count=self.num_processors - size, resource=tuple(range(size, self.num_processors)))

    def context(self, group: Group) -> object:
        self._note("context")
        assert group.count, "the driver has no context for nothing"
        context = object()
        self.contexts[context] = group
        return context

    def stream(self, context: object, priority: int) -> int:
        self._note("stream")
        assert context in self.contexts
        address = 4096 + 64 * self.num_made
        self.streams[address] = context
        self.priorities.append(priority)
        return address

    def destroy_stream(self, stream: int) -> None:
        self.log.append("destroy stream")
        assert self.streams[stream] in self.contexts, "its context was destroyed before it"
        del self.streams[stream]

    def destroy_context(self, context: object) -> None:
        self.log.append("destroy context")
        assert context not in self.streams.values(), "it still has a stream, which would leak"
        del self.contexts[context]

    def _note(self, call: str) -> None:
        if self.num_made == self.refuses:
            raise GreenContextError(f"{call}: CUDA_ERROR_NOT_SUPPORTED, operation not supported")
        self.log.append(call)
