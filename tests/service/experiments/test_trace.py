from __future__ import annotations

import msgspec

from service.experiments.tally import Tally
from service.experiments.trace import MAX_POINTS, Trace
from service.experiments.verdict import report_on
from tests.service.experiments.traffic import experiment


def test_a_trace_is_bounded_and_spans_the_whole_time() -> None:
    """After 5,000 looks it has at most 400 points, in order, from the first look to nearly the last."""
    report, trace = report_on(experiment(), Tally()), Trace()
    for number in range(1, 5001):
        trace.add(msgspec.structs.replace(report, num_samples=number), float(number))
    numbers = [point.num_samples for point in trace.points]
    assert MAX_POINTS / 2 <= len(numbers) <= MAX_POINTS
    assert numbers == sorted(numbers)
    assert numbers[0] == 1
    assert numbers[-1] > 4900


def test_a_look_without_news_is_no_point() -> None:
    """The same number of samples is the same look."""
    report, trace = msgspec.structs.replace(report_on(experiment(), Tally()), num_samples=7), Trace()
    assert trace.add(report, 1.0)
    assert not trace.add(report, 2.0)
