"""Which engine a prompt goes to, against a search by brute force."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from faser.engine.client.affinity import PrefixReach, Seen, best_first, chained
from faser.types.adapter import Adapter
from tests.engine.driving import request

texts = st.lists(st.sampled_from([b"a", b"b"]), max_size=6)


def shared(one: list[bytes], other: list[bytes]) -> int:
    """Length of the longest common beginning."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


@given(sent=st.lists(texts, max_size=6), asked=texts)
def test_what_is_known_is_the_longest_beginning_that_was_sent(sent: list[list[bytes]], asked: list[bytes]) -> None:
    seen = Seen()
    for text in sent:
        seen.note(chained(b"", text))
    assert seen.known(list(chained(b"", asked))) == max((shared(text, asked) for text in sent), default=0)


def test_namespaces_do_not_share_beginnings() -> None:
    seen = Seen()
    seen.note(chained(b"one", [b"a", b"b"]))
    assert seen.known(list(chained(b"one", [b"a", b"b"]))) == 2
    assert seen.known(list(chained(b"two", [b"a", b"b"]))) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=5))
def test_a_prefix_comes_first_while_its_queue_is_not_much_longer(engines: list[tuple[int, int]]) -> None:
    """engines: (pieces known, samples)."""
    ordered = best_first(engines, lambda each: each[0], lambda each: each[1])
    assert sorted(ordered) == sorted(engines)
    if engines:
        least = min(samples for _, samples in engines)
        most = max(known for known, _ in engines)
        wanted = [each for each in engines if each[0] == most and each[1] <= least * 1.25 + 4]
        busiest_known = min(samples for known, samples in engines if known == most)
        if most and busiest_known <= least * 1.25 + 4:
            assert ordered[0] in wanted
        else:
            assert ordered[0][1] == least


def test_what_will_be_cached_follows_the_latest_requests_with_the_same_first_block() -> None:
    reach, prompt = PrefixReach(), request("one", [1] * 100)
    assert reach.uncached(prompt) == 100
    for num_cached, uncached in ((90, 10), (50, 30), (50, 40)):
        reach.note(prompt, num_cached)
        assert reach.uncached(prompt) == uncached
    assert reach.uncached(request("other", [2] * 100)) == 100
    assert reach.uncached(replace(prompt, cache_salt="other")) == 100
    adapter = Adapter(name="x", path="x", digest="0f")
    assert reach.uncached(replace(prompt, adapter=adapter)) == 100
    assert reach.uncached(request("short", [1] * 16)) == 1
