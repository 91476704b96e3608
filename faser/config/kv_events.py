"""The JSON of --kv-events-config, with vLLM's keys."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from faser import optional
from faser.config.declaration import Kind, Setting, read_keys

_GROUP = "KV events"
_PUBLISHERS = ("zmq", "null")
_KEYS = (
    Setting(
        name="enable_kv_cache_events", kind=Kind.SWITCH, help="Whether events are published at all.", group=_GROUP
    ),
    Setting(name="publisher", kind=Kind.TEXT, help="zmq, or null: none.", group=_GROUP, choices=_PUBLISHERS),
    Setting(name="endpoint", kind=Kind.TEXT, help="Where subscribers find the events.", group=_GROUP),
    Setting(name="replay_endpoint", kind=Kind.TEXT, help="Where they ask for events again.", group=_GROUP),
    Setting(name="topic", kind=Kind.TEXT, help="The topic of all events.", group=_GROUP),
    Setting(
        name="buffer_steps", kind=Kind.COUNT, help="Steps kept for replay.", group=_GROUP, low=1, high=1 << 24
    ),
    Setting(
        name="hwm", kind=Kind.COUNT, help="Messages that wait for a subscriber.", group=_GROUP, low=0, high=1 << 24
    ),
    Setting(
        name="max_queue_size",
        kind=Kind.COUNT,
        help="Steps that wait to be sent.",
        group=_GROUP,
        low=1,
        high=1 << 24,
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """Settings for publishing KV cache events. See engine/kv_events.py; defaults are vLLM's."""

    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000


def of_engine(given: Mapping[str, Any] | None, number: int) -> Mapping[str, Any] | None:
    """The JSON for one of several engines of a host. Each has ports of its own: those of the one before, plus one.

    As vLLM does for its data parallel ranks.
    """
    if not given or not number:
        return given
    config = parse_kv_events(given)[0] or KvEventsConfig()
    ends = optional.given({"endpoint": config.endpoint, "replay_endpoint": config.replay_endpoint})
    return {**given, **{name: _moved(end, number) for name, end in ends.items()}}


def shared_ports(given: Mapping[str, Any] | None, engines: int) -> str | None:
    """A sentence about the first port that two of this number of engines would have; None: each has its own."""
    config = parse_kv_events(given)[0]
    if config is None:
        return None
    taken: dict[str, str] = {}
    for number in range(engines):
        own = parse_kv_events(of_engine(given, number))[0] or config
        for name, endpoint in (("endpoint", own.endpoint), ("replay_endpoint", own.replay_endpoint)):
            if endpoint is None:
                continue
            named = f"{name} of engine {number}"
            if endpoint in taken:
                return (
                    f"{taken[endpoint]} and {named} are both {endpoint}; with {engines} engines the ports of "
                    f"endpoint and replay_endpoint must be {engines} apart"
                )
            taken[endpoint] = named
    return None


def _moved(endpoint: str, number: int) -> str:
    address, _, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp:") and port.isdecimal():
        return f"{address}:{int(port) + number}"
    return f"{endpoint}_dp{number}"


def parse_kv_events(given: Mapping[str, Any] | None) -> tuple[KvEventsConfig | None, tuple[str, ...]]:
    """None: no events are published. And every problem of the JSON in one line each."""
    problems: list[str] = []
    values = read_keys(given or {}, _KEYS, {}, problems, [])
    enabled = values.pop("enable_kv_cache_events", False) and values.pop("publisher", "zmq") != "null"
    values.pop("publisher", None)
    if problems or not enabled:
        return None, tuple(problems)
    return KvEventsConfig(**optional.given(values)), ()
