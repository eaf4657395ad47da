from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.trace import TracedRequest, read_trace, schedule

HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
TRACE = [TracedRequest(0.0, 100, 10), TracedRequest(4.0, 3000, 20), TracedRequest(9.0, 50, 2000)]


def replayed(**changes: float | None) -> list[TracedRequest]:
    wanted = {"scale": 1.0, "length_scale": 1.0, "max_context": 10_000, "limit": None, "max_seconds": 100.0}
    return schedule(TRACE, **(wanted | changes))  # type: ignore[arg-type]


def test_a_trace_begins_at_its_first_arrival(tmp_path: Path) -> None:
    """Times count from the earliest request, whatever the order of lines, with fractions of seven digits."""
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEAD}2023-11-16 18:15:50.5000000,396,109\n2023-11-16 18:15:46.0000000,374,44\n")
    assert read_trace(path) == [(0.0, 374, 44), (4.5, 396, 109)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        (HEAD, "no requests"),
        (f"{HEAD}yesterday,1,2\n", "line 2: .*yesterday"),
        (f"{HEAD}2023-11-16 18:15:46,1\n", "line 2"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    """The error names the column that is missing, or the line that cannot be read."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_trace(path)


def test_scale_makes_arrivals_denser() -> None:
    """At scale 2 everything comes in half the time, and no length changes."""
    assert replayed(scale=2.0) == [(0.0, 100, 10), (2.0, 3000, 20), (4.5, 50, 2000)]


def test_a_replay_is_bounded_in_count_and_time() -> None:
    """Neither more requests than the limit nor any after the time are sent."""
    assert len(replayed(limit=2)) == 2
    assert [request.at for request in replayed(max_seconds=5.0)] == [0.0, 4.0]
    assert [request.at for request in replayed(max_seconds=5.0, scale=2.0)] == [0.0, 2.0, 4.5]


def test_prompts_are_cut_before_answers() -> None:
    """What does not fit the context loses prompt, and an answer only what is longer than the context itself."""
    assert [request[1:] for request in replayed(max_context=1000)] == [(100, 10), (980, 20), (1, 999)]


def test_lengths_scale_and_never_vanish() -> None:
    """A prompt and an answer have at least one token."""
    assert [request[1:] for request in replayed(length_scale=0.01)] == [(1, 1), (30, 1), (1, 20)]


@pytest.mark.parametrize("name", ["scale", "length_scale", "max_context"])
def test_nothing_scales_to_zero(name: str) -> None:
    """A scale of zero is refused by its name."""
    with pytest.raises(ValueError, match=f"{name} is 0"):
        replayed(**{name: 0})
