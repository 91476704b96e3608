"""The bucket by hand-computed levels."""

from faser.api.middleware.key_limits import TokenBucket


def test_a_minutes_worth_may_be_taken_at_once_and_no_more() -> None:
    bucket = TokenBucket(3, now_s=100.0)
    for _ in range(3):
        assert bucket.wait_s(100.0) == 0.0
        bucket.take(1, 100.0)
    assert bucket.wait_s(100.0) == 20.0
    assert bucket.wait_s(115.0) == 5.0
    assert bucket.wait_s(120.0) == 0.0


def test_it_never_holds_more_than_a_minutes_worth() -> None:
    bucket = TokenBucket(60, now_s=0.0)
    bucket.take(60, 10_000.0)
    assert bucket.wait_s(10_000.0) == 1.0


def test_a_debt_is_paid_at_the_rate() -> None:
    bucket = TokenBucket(600, now_s=0.0)
    bucket.take(1600, 0.0)  # 1000 more than there were
    assert bucket.wait_s(0.0) == 100.1
    assert bucket.wait_s(100.1) < 1e-9
