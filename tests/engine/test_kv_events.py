"""A subscriber that follows the events knows what the prefix index holds, through evictions and reconnections.

Oracle: the index itself. The wire: decoded with msgpack alone, by position, as a router's parser does.

Planted bugs that these tests have caught: no event of an eviction; a parent that is the block itself; content that
two blocks have stored twice; a replay that begins a batch late; events of a step before those of the one before.
"""

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from faser.config.engine import EngineConfig
from faser.config.kv_events import KvEventsConfig, of_engine, parse_kv_events, shared_ports
from faser.engine.contract.cache_salt import salt_digest
from faser.engine.contract.kv_events import BlockStored, KvEvent
from faser.engine.contract.plan import StepDeltas
from faser.engine.control.kv_cache import KvManager, SequenceBlocks
from faser.engine.kv_events import KvEventPublisher
from faser.errors import ConfigError
from faser.types.adapter import Adapter

BLOCK = 4
ENDPOINT, REPLAY = "inproc://events", "inproc://replay"
TOPIC = b"kv@here@tiny"


class Index:
    """What a subscriber knows: for each hash its parent, tokens and extra key."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...], Any]] = {}

    def take(self, events: list[Any]) -> None:
        for name, *fields in events:
            if name == "BlockStored":
                hashes, parent, tokens, size, _lora, _medium, _lora_name, extra = fields
                assert size * len(hashes) == len(tokens)
                for at, each in enumerate(hashes):
                    assert each not in self.blocks, "stored twice"
                    own = extra[at] if extra else None
                    self.blocks[each] = (parent, tuple(tokens[at * size : (at + 1) * size]), own and tuple(own))
                    parent = each
            else:
                assert name == "BlockRemoved"
                for each in fields[0]:
                    del self.blocks[each]


def index_of(kv: KvManager) -> set[int]:
    return {int.from_bytes(digest[-8:]) for digest in kv._block_of}


class Traffic:
    """Sequences that come, grow, share beginnings, and go, in a pool that is too small to keep them all."""

    def __init__(self, seed: int) -> None:
        self.kv = KvManager(24, BLOCK, records_events=True)
        self._random = random.Random(seed)
        self._running: list[tuple[SequenceBlocks, list[int]]] = []

    def step(self) -> list[KvEvent]:
        draw, kv = self._random, self.kv
        if len(self._running) < 4 and draw.random() < 0.5:
            tokens = [draw.randrange(2)] * draw.randrange(1, 30)
            table = kv.new_table(draw.choice([None, None, "salt"]))
            prefix = kv.cached_prefix(table, tokens)
            missing = kv.blocks_for(len(tokens)) - len(prefix)
            if kv.can_allocate(missing, adopting=prefix):
                kv.adopt(table, prefix)
                kv.allocate(table, missing)
                self._running.append((table, tokens))
        for each in list(self._running):
            table, tokens = each
            kv.publish(table, tokens, len(tokens))
            tokens.append(draw.randrange(2))
            lacking = kv.blocks_for(len(tokens)) - len(table.blocks)
            if len(tokens) > 40 or draw.random() < 0.1 or not kv.can_allocate(lacking):
                kv.release(table)
                self._running.remove(each)
            else:
                kv.allocate(table, lacking)
        return kv.take_events()


class GivenEvents(KvEventPublisher):
    """A publisher of given events."""

    def __init__(self, config: KvEventsConfig) -> None:
        self._events: list[KvEvent] = []
        super().__init__(config, lambda: self._events)

    def publish(self, events: list[KvEvent]) -> None:
        self._events = events
        self.stepped(StepDeltas())


@contextmanager
def publishing(**settings: Any) -> Iterator[GivenEvents]:
    config = KvEventsConfig(endpoint=ENDPOINT, replay_endpoint=REPLAY, topic=TOPIC.decode(), **settings)
    publisher = GivenEvents(config)
    try:
        yield publisher
    finally:
        publisher.close()


class Subscriber:
    """Rebuilds the index; asks for what it has missed."""

    def __init__(self, publisher: KvEventPublisher) -> None:
        self.index, self.next = Index(), 0
        self._context = publisher._context
        self._events = self._connected()
        self._replays = self._context.socket(zmq.DEALER)
        self._replays.connect(REPLAY)

    def _connected(self) -> Any:
        found = self._context.socket(zmq.SUB)
        found.connect(ENDPOINT)
        found.subscribe(TOPIC)
        time.sleep(0.05)
        return found

    def reconnect(self) -> None:
        self._events.close(linger=0)
        self._events = self._connected()

    def follow(self, until: int) -> None:
        """Until the batch before number `until` is in the index."""
        while self.next < until:
            if not self._events.poll(2000):
                self._catch_up()
                continue
            _topic, number, batch = self._events.recv_multipart()
            if int.from_bytes(number, "big") > self.next:
                self._catch_up()
            self._take(number, batch)

    def _catch_up(self) -> None:
        self._replays.send_multipart((b"", self.next.to_bytes(8, "big")))
        while True:
            delimiter, topic, number, batch = self._replays.recv_multipart()
            assert delimiter == b""
            if int.from_bytes(number, "big", signed=True) < 0:
                assert topic == batch == b""
                return
            assert topic == TOPIC  # as of a live batch: llm-d's router finds the model's name in it
            self._take(number, batch)

    def _take(self, number: bytes, batch: bytes) -> None:
        if int.from_bytes(number, "big") != self.next:
            return  # known already
        seconds, events, rank = msgspec.msgpack.decode(batch)
        assert abs(seconds - time.time()) < 600
        assert rank == 0
        self.index.take(events)
        self.next += 1

    def close(self) -> None:
        self._events.close(linger=0)
        self._replays.close(linger=0)


def test_a_subscriber_knows_the_index_after_ten_thousand_steps_and_a_reconnection() -> None:
    traffic, sent = Traffic(seed=5), 0
    with publishing() as publisher:
        subscriber = Subscriber(publisher)
        try:
            for step in range(10_000):
                events = traffic.step()
                publisher.publish(events)
                sent += bool(events)
                if step == 4_000:
                    subscriber.follow(sent - 50)
                    subscriber.reconnect()
            subscriber.follow(sent)
            assert subscriber.next == sent > 3_000
            assert set(subscriber.index.blocks) == index_of(traffic.kv)
            assert {extra for _, _, extra in subscriber.index.blocks.values() if extra} <= {
                (traffic.kv.new_table("salt").root.hex(),)
            }
        finally:
            subscriber.close()


def test_hashes_lead_from_block_to_block_and_tokens_are_the_blocks() -> None:
    kv, index = KvManager(8, BLOCK, records_events=True), Index()
    tokens = list(range(11))
    for namespace in (None, "mine"):
        table = kv.new_table(namespace)
        kv.allocate(table, 3)
        kv.publish(table, tokens, len(tokens))
    index.take(msgspec.msgpack.decode(msgspec.msgpack.encode(kv.take_events())))
    roots = [(own, tokens, extra) for own, (parent, tokens, extra) in index.blocks.items() if parent is None]
    assert [(tokens, extra is None) for _, tokens, extra in roots] == [((0, 1, 2, 3), True), ((0, 1, 2, 3), False)]
    assert "mine" not in str(roots)
    for root, _, _ in roots:
        (child,) = [(tokens, extra) for parent, tokens, extra in index.blocks.values() if parent == root]
        assert child == ((4, 5, 6, 7), None)
    assert kv.take_events() == []


def test_blocks_of_an_adapter_have_its_name_and_number_as_vllms_do() -> None:
    kv = KvManager(16, BLOCK, records_events=True)
    one, again = (Adapter(name="one", path=path, digest="7f" * 32) for path in ("a", "b"))
    other = Adapter(name="other", path="a", digest="80" * 32)
    tokens = list(range(9))
    for salt, adapter in ((None, one), (None, again), (None, other), ("mine", one)):
        table = kv.new_table(salt, adapter)
        kv.allocate(table, 3)
        kv.publish(table, tokens, len(tokens))
    events = [each for each in kv.take_events() if isinstance(each, BlockStored)]
    assert [(each.lora_name, each.lora_id) for each in events[:2]] == [("one", 0x7F7F7F7)] * 2
    assert [each.extra_keys for each in events] == [
        *[[["one"]]] * 2,
        *[[["other"]]] * 2,
        [["one", salt_digest("mine", one).hex()]],
        [["one"]],
    ]
    assert len({hashes for each in events for hashes in each.block_hashes}) == 6


def test_a_publisher_that_is_behind_drops_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    traffic = Traffic(seed=1)
    events = [found for _ in range(200) if (found := traffic.step())]
    with publishing(max_queue_size=1) as publisher:
        for each in events:
            publisher.publish(each)
    numbers = [number for number, _ in publisher._kept]
    assert numbers == sorted(set(numbers))
    assert numbers[-1] >= len(numbers) - 1
    assert ("KV events are dropped" in caplog.text) == (len(numbers) < len(events))


def test_the_json_has_vllms_keys_and_problems_are_named() -> None:
    given = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:1", "buffer_steps": 5}
    assert parse_kv_events(given) == (KvEventsConfig(endpoint="tcp://*:1", buffer_steps=5), ())
    for off in (None, {}, {"endpoint": "tcp://*:1"}, {"enable_kv_cache_events": True, "publisher": "null"}):
        assert parse_kv_events(off) == (None, ())
    assert of_engine(given, 0) == given
    assert of_engine(given, 2) == given | {"endpoint": "tcp://*:3"}
    assert of_engine(given | {"endpoint": "ipc://a", "replay_endpoint": "tcp://*:9"}, 1) == given | {
        "endpoint": "ipc://a_dp1",
        "replay_endpoint": "tcp://*:10",
    }
    with pytest.raises(ConfigError, match="kv_events_config: buffer_steps is 0; it must be at least 1"):
        EngineConfig(kv_events_config={"buffer_steps": 0})
    with pytest.raises(ConfigError, match=r"kv_events_config: tcp://nowhere\.invalid:x cannot be used"):
        GivenEvents(KvEventsConfig(endpoint="tcp://nowhere.invalid:x"))


@pytest.mark.parametrize("apart, engines, shared", [(1, 1, False), (1, 2, True), (2, 2, False), (3, 4, True)])
def test_ports_of_several_engines_must_be_as_far_apart_as_there_are_engines(
    apart: int, engines: int, shared: bool
) -> None:
    ends = {"endpoint": "tcp://*:5557", "replay_endpoint": f"tcp://*:{5557 + apart}"}
    problem = shared_ports({"enable_kv_cache_events": True, **ends}, engines)
    assert (problem is not None) == shared
    assert shared_ports(ends, engines) is None  # off
