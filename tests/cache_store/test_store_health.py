"""When a store that failed is asked again, and what is said about it."""

from __future__ import annotations

from structlog.testing import capture_logs

from cache_store.store_health import StoreHealth


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_retries_become_rarer_up_to_a_limit() -> None:
    """After each failure in a row the wait doubles, to a limit, and one success makes it short again."""
    clock = Clock()
    health = StoreHealth(first_retry_seconds=1.0, longest_retry_seconds=4.0, clock=clock)
    waits = []
    for _ in range(5):
        health.failed(OSError("gone"))
        start = clock.now
        while not health.may_try:
            clock.now += 0.5
        waits.append(clock.now - start)
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    health.succeeded()
    health.failed(OSError("gone again"))
    clock.now += 1.0
    assert health.may_try


def test_each_change_is_logged_once_with_its_cause() -> None:
    """Ten failures and ten successes are one warning and one message, with the reason and the length of the outage."""
    with capture_logs() as logs:
        clock = Clock()
        health = StoreHealth(clock=clock)
        health.succeeded()
        for _ in range(10):
            health.failed(OSError("no route"))
            clock.now += 1.0
        for _ in range(10):
            health.succeeded()
    assert [(entry["log_level"], entry.get("reason"), entry.get("down_seconds")) for entry in logs] == [
        ("warning", "no route", None),
        ("info", None, 10.0),
    ]
    assert health.num_failures == 10


def test_a_store_is_taken_to_be_up_until_it_fails() -> None:
    """The first request may ask."""
    health = StoreHealth()
    assert (health.is_up, health.may_try) == (True, True)
    health.failed(OSError("gone"))
    assert (health.is_up, health.may_try) == (False, False)
