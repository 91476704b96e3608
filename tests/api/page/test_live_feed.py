"""LiveFeed: one sampler for all viewers, which no viewer can hold up.

GET /live over HTTP: events, keys, limits, and an end that no viewer delays.
"""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from faser.api.bodies.errors import HttpError
from faser.api.middleware.key_limits import KeyLimits
from faser.api.page import live_feed
from faser.api.page.live_feed import MOST_VIEWERS_OF_A_KEY, LiveFeed, server_facts
from faser.errors import NotReadyError, OverloadError
from faser.metrics import live as recording
from faser.metrics.live import LiveRecorder, Snapshot
from faser.types.engine import EngineState
from tests.api.server import http_client, serving, settings
from tests.fake_engine import FakeEngine, saying
from tests.metrics.statistics import EMPTY, after_step
from tests.metrics.test_live import Clock
from tests.waiting import PATIENCE_S, until

INTERVAL_S = 0.02


class Watched:
    """A feed over a fake engine; num_requests as a test sets it."""

    def __init__(self, *, most_viewers: int = 32, recorder: LiveRecorder | None = None) -> None:
        self.engine = FakeEngine()
        self.recorder = recorder or LiveRecorder()
        self.num_requests = 0
        self.keys = {0, 1, 2, 3}
        self.feed = LiveFeed(
            self.engine,
            self.recorder,
            server_facts("tiny", "1.2.3"),
            lambda: self.num_requests,
            lambda index: index in self.keys,
            most_viewers=most_viewers,
            interval_s=INTERVAL_S,
        )

    async def join(self, key_index: int | None = None) -> tuple[dict[str, Any], AsyncGenerator[bytes, None]]:
        events = self.feed.messages(key_index)
        return parse(await anext(events))[0], events


def parse(message: bytes) -> list[dict[str, Any]]:
    frames = message.split(b"\n\n")
    assert frames.pop() == b""
    assert all(each.startswith(b"data: {") and b"\n" not in each for each in frames)
    return [json.loads(each[6:]) for each in frames]


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    asyncio.run(within())


async def rest(events: AsyncGenerator[bytes, None]) -> list[dict[str, Any]]:
    return [each async for message in events for each in parse(message)]


class CountingRecorder(LiveRecorder):
    num_snapshots = 0

    def snapshot(self) -> Snapshot:
        self.num_snapshots += 1
        return super().snapshot()


def test_viewers_share_one_sampler_and_get_the_same_bytes() -> None:
    async def test() -> None:
        recorder = CountingRecorder()
        watched = Watched(recorder=recorder)
        joined = [(await watched.join())[1] for _ in range(3)]
        assert recorder.num_snapshots == 1
        for number in range(2, 6):
            one, *others = [await anext(each) for each in joined]
            assert all(each is one for each in others)
            assert recorder.num_snapshots == number
        for each in joined:
            await each.aclose()

    run(test)


def test_nothing_is_sampled_before_the_first_viewer_and_a_while_after_the_last(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(live_feed, "_LINGER_S", 0.1)

    async def test() -> None:
        watched = Watched()
        assert not watched.feed.is_sampling
        assert not watched.recorder.watched
        _, events = await watched.join()
        assert watched.feed.is_sampling
        assert watched.recorder.watched
        await asyncio.sleep(0.2)
        assert watched.feed.is_sampling
        await events.aclose()
        assert watched.feed.num_viewers == 0
        assert watched.feed.is_sampling  # a page that is loaded again has its past
        await asyncio.sleep(0.2)
        assert not watched.feed.is_sampling
        assert not watched.recorder.watched
        await (await watched.join())[1].aclose()
        assert watched.feed.is_sampling

    run(test)


def test_the_first_viewer_gets_what_was_recorded_without_viewers() -> None:
    async def test() -> None:
        rng, clock, stats = random.Random(1), Clock(), EMPTY
        watched = Watched(recorder=LiveRecorder(clock))
        for _ in range(40):
            clock.now_s += 0.5
            stats = after_step(stats, rng)
            watched.recorder.engine(stats)
        first, events = await watched.join()
        assert first["server"]["model"] == "tiny"
        assert first["server"]["engine"]["kv_tokens"] == 4096
        assert len(first["history"]) == 20
        began = watched.recorder.past[0].stats
        assert (
            sum(each.get("output", 0) for each in first["history"])
            == stats.generation_tokens - began.generation_tokens
        )
        await events.aclose()

    run(test)


def test_the_first_viewer_gets_the_latencies_of_requests_that_ended_before_it_came() -> None:
    async def test() -> None:
        clock = Clock()
        watched = Watched(recorder=LiveRecorder(clock))
        recorder = watched.recorder
        for second in range(60):
            clock.now_s += 1.0
            if second == 10:
                recorder.latency("ttft", 0.2)
            if second == 57:
                recorder.latency("ttft", 0.1)
            recorder.engine(EMPTY)
        first, events = await watched.join()
        shown = [each.get("latencies", {}).get("ttft") for each in first["history"]]
        assert [each and each[0] for each in shown] == [None] * 9 + [1] * 30 + [None] * 17 + [1] * 4
        assert shown[-1][1:] == pytest.approx([100] * 3, rel=recording.RESOLUTION * 1.001)
        assert shown[9][1:] == pytest.approx([200] * 3, rel=recording.RESOLUTION * 1.001)
        await events.aclose()

    run(test)


def test_a_second_viewer_gets_the_samples_that_the_first_one_got() -> None:
    async def test() -> None:
        watched = Watched()
        first, events = await watched.join()
        seen = first["history"] + [parse(await anext(events))[0]["sample"] for _ in range(4)]
        second, others = await watched.join()
        assert second["history"] == seen
        await events.aclose()
        await others.aclose()

    run(test)


def test_viewers_are_limited_together_and_by_key() -> None:
    async def test() -> None:
        watched = Watched(most_viewers=MOST_VIEWERS_OF_A_KEY + 2)
        of_a_key = [(await watched.join(0))[1] for _ in range(MOST_VIEWERS_OF_A_KEY)]
        with pytest.raises(HttpError, match="this API key has 8 live views; at most 8") as refused:
            await watched.join(0)
        assert refused.value.status == 429
        others = [(await watched.join(key))[1] for key in (1, 2)]
        with pytest.raises(OverloadError, match="has 10 viewers; at most 10"):
            await watched.join(3)
        await of_a_key.pop().aclose()
        of_a_key.append((await watched.join(0))[1])
        for each in [*of_a_key, *others]:
            await each.aclose()
        assert watched.feed.num_viewers == 0

    run(test)


def test_a_viewer_that_does_not_keep_up_is_asked_to_leave_and_others_are_not() -> None:
    async def test() -> None:
        watched = Watched()
        (_, slow), (_, fast) = await watched.join(), await watched.join()
        for _ in range(12):
            await anext(fast)
        assert await rest(slow) == [{"end": "slow"}]
        assert watched.feed.num_viewers == 1
        assert "sample" in parse(await anext(fast))[0]
        await fast.aclose()

    run(test)


def test_a_view_ends_when_its_key_is_removed() -> None:
    async def test() -> None:
        watched = Watched()
        (_, one), (_, other) = await watched.join(0), await watched.join(1)
        assert "sample" in parse(await anext(one))[0]
        watched.keys.remove(0)
        assert (await rest(one))[-1] == {"end": "key"}
        await anext(other)
        assert "sample" in parse(await anext(other))[0]
        await other.aclose()

    run(test)


@pytest.mark.parametrize("state", [EngineState.DEAD, EngineState.DRAINING])
def test_the_feed_ends_with_the_server(state: EngineState) -> None:
    async def test() -> None:
        watched = Watched()
        _, events = await watched.join()
        watched.engine.state = state
        watched.recorder.engine_state(state)
        *_, last, end = await rest(events)
        assert last["sample"]["state"] == state.value
        assert end == {"end": "closing"}
        with pytest.raises(NotReadyError, match=f"the engine is {state}"):
            await watched.join()
        assert not watched.feed.is_sampling

    run(test)


def test_the_drain_can_be_watched_until_the_last_request_is_done() -> None:
    async def test() -> None:
        watched = Watched()
        watched.num_requests = 1
        _, events = await watched.join()
        watched.engine.state = EngineState.DRAINING
        watched.recorder.engine_state(EngineState.DRAINING)
        for _ in range(10):
            assert "sample" in parse(await anext(events))[0]
        watched.num_requests = 0
        assert (await rest(events))[-1] == {"end": "closing"}

    run(test)


def test_viewers_are_informed_when_the_model_is_loaded() -> None:
    async def test() -> None:
        watched = Watched()
        watched.engine.loaded, watched.engine.state = False, EngineState.LOADING
        first, events = await watched.join()
        assert first["server"]["engine"] is None
        assert len(parse(await anext(events))) == 1
        watched.engine.loaded, watched.engine.state = True, EngineState.READY
        _, news = parse(await anext(events))
        assert news["server"]["engine"]["context"] == 4096
        assert len(parse(await anext(events))) == 1
        await events.aclose()

    run(test)


def test_a_bug_in_sampling_ends_the_views_and_not_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        watched = Watched()
        _, events = await watched.join()
        monkeypatch.setattr(watched.recorder, "snapshot", lambda: 1 // 0)
        assert (await rest(events))[-1] == {"end": "failed"}
        assert not watched.feed.is_sampling
        assert "ZeroDivisionError" in caplog.text

    run(test)


def test_samples_come_once_a_second() -> None:
    assert recording.INTERVAL_S == 1.0


KEY = {"Authorization": "Bearer k0"}


@contextmanager
def watching(http: httpx.Client, headers: dict[str, str] | None = None) -> Iterator[Iterator[dict[str, Any]]]:
    """The messages of one viewer."""
    with http.stream("GET", "/live", headers=headers) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        yield (json.loads(line[6:]) for line in answer.iter_lines() if line)


def test_a_viewer_gets_the_history_and_then_a_sample_each_second(http: httpx.Client) -> None:
    with watching(http) as messages:
        first = next(messages)
        assert first["server"]["model"] == "tiny"
        assert first["server"]["version"] == "1.2.3"
        assert isinstance(first["history"], list)
        samples = [next(messages)["sample"] for _ in range(2)]
    assert samples[1]["dt"] > 0.9
    assert samples[1]["t"] - samples[0]["t"] == pytest.approx(samples[1]["dt"], abs=0.01)


def test_it_needs_the_key_and_counts_for_no_limit_of_it() -> None:
    limits = KeyLimits(parallel_requests=1, requests_per_minute=2)
    engine = FakeEngine(saying("Hello!"))
    with serving(engine, settings(api_keys=("k0",), key_limits=limits)) as url, http_client(url) as http:
        assert http.get("/live").status_code == 401
        with watching(http, KEY) as one, watching(http, KEY) as other:
            next(one), next(other)
            asked = {"prompt": "four", "max_tokens": 2}
            answers = [http.post("/v1/completions", json=asked, headers=KEY).status_code for _ in range(3)]
    assert answers == [200, 200, 429]


def test_viewers_beyond_the_limit_are_refused_and_one_that_leaves_makes_room() -> None:
    with serving(FakeEngine(), settings(most_viewers=1)) as url, http_client(url) as http:
        with watching(http) as messages:
            next(messages)
            refused = http.get("/live")
            assert refused.status_code == 503
            assert "has 1 viewers; at most 1" in refused.json()["error"]["message"]
            assert int(refused.headers["retry-after"]) > 0

        def has_room() -> bool:
            with http.stream("GET", "/live") as answer:
                return answer.status_code == 200

        until(has_room)


def test_without_the_page_there_is_no_feed() -> None:
    with serving(FakeEngine(), settings(page=False)) as url, http_client(url) as http:
        assert http.get("/live").status_code == 404


def test_it_is_sent_while_the_model_is_loaded_and_ends_with_the_server() -> None:
    engine = FakeEngine()
    engine.loaded, engine.state = False, EngineState.LOADING
    with serving(engine) as url, http_client(url) as http, watching(http) as messages:
        assert next(messages)["server"]["engine"] is None
        engine.state = EngineState.DRAINING
        assert [next(iter(each)) for each in messages][-1] == "end"
        assert http.get("/live").status_code == 503
