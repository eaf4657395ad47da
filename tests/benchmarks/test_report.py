from __future__ import annotations

import msgspec
import pytest

from benchmarks.machine import describe_machine
from benchmarks.report import ALL, Measurement, Report, Row, of_answer, of_group, rows_of, service_of
from benchmarks.system import Answer, Arrival
from benchmarks.table import table


def answer(*arrivals: tuple[float, int], drafts: int | None = None, accepted: int = 0) -> Answer:
    return Answer(
        token_ids=[],
        arrivals=[Arrival(*arrival) for arrival in arrivals],
        num_drafts=drafts,
        num_accepted=accepted,
        cpu_seconds=0.002,
    )


def measured(
    rate: float, *, method: str = "none", system: str = "forerun", category: str = "a", is_exact: bool | None = True
) -> Measurement:
    """An answer of 11 tokens at `rate` after a first token that took a tenth second."""
    return of_answer(
        answer((0.1, 1), (0.1 + 10 / rate, 10), drafts=4, accepted=6),
        system=system,
        method=method,
        precision="float32",
        category=category,
        num_prompt_tokens=500,
        is_exact=is_exact,
    )


def row(rows: list[Row], system: str, method: str, category: str) -> Row:
    (found,) = (each for each in rows if (each.system, each.method, each.category) == (system, method, category))
    return found


def test_speed_is_counted_after_the_first_tokens() -> None:
    """Tokens that came with the first arrival belong to its time; the others to the time after it."""
    found = answer((0.5, 2), (0.7, 3), (1.5, 1))
    assert found.num_tokens == 6
    assert found.ttft_seconds == 0.5
    assert found.tokens_per_second == pytest.approx(4.0)
    assert found.gap_seconds == pytest.approx(0.5)


def test_an_answer_that_came_at_once_has_no_speed_after_its_first_token() -> None:
    """One token has a time to first token but no speed; a whole answer has neither."""
    assert (answer((0.5, 1)).ttft_seconds, answer((0.5, 1)).tokens_per_second) == (0.5, None)
    assert (answer((0.5, 9)).ttft_seconds, answer((0.5, 9)).tokens_per_second) == (None, None)


def test_a_row_has_medians_and_a_ratio_of_medians() -> None:
    """One slow outlier moves neither speed nor speed-up."""
    found = [measured(rate) for rate in (10, 11, 0.01)] + [measured(rate, method="ngram") for rate in (30, 33, 1000)]
    rows = rows_of(found)
    assert row(rows, "forerun", "none", "a").tokens_per_second == pytest.approx(10)
    assert row(rows, "forerun", "ngram", "a").tokens_per_second == pytest.approx(33)
    assert row(rows, "forerun", "ngram", "a").speedup == pytest.approx(3.3)
    assert row(rows, "forerun", "none", "a").ttft_ms == pytest.approx(100)
    assert row(rows, "forerun", "ngram", "a").mean_acceptance_length == pytest.approx(2.5)


def test_categories_are_apart_and_together() -> None:
    """Each category has its own rows, the last are those of all, and speed-up compares within a category."""
    found = [measured(10), measured(40, method="ngram"), measured(20, category="b")]
    found.append(measured(20, method="ngram", category="b"))
    rows = rows_of(found)
    assert [each.category for each in rows] == ["a", "a", "b", "b", ALL, ALL]
    assert row(rows, "forerun", "ngram", "b").speedup == pytest.approx(1.0)
    assert row(rows, "forerun", "ngram", ALL).speedup == pytest.approx(2.0)


def test_a_peer_has_no_exactness_and_maybe_no_acceptance() -> None:
    """What another system does not tell is null in its row, and its speed is compared all the same."""
    peer = msgspec.structs.replace(measured(5, system="transformers", is_exact=None), num_drafts=None)
    found = row(rows_of([measured(10), peer]), "transformers", "none", "a")
    assert found.exact is None
    assert found.mean_acceptance_length is None
    assert found.speedup == pytest.approx(0.5)


def test_without_plain_decoding_there_is_no_speed_up() -> None:
    """Nothing is compared with a method that was not measured."""
    assert rows_of([measured(10, method="ngram")])[0].speedup is None


def test_a_group_counts_all_tokens_over_all_time() -> None:
    """The last of several at a time ends the clock, and the group has no category but all."""
    answers = [answer((0.5, 1), (1.0, 9)), answer((0.7, 1), (2.0, 19))]
    found = of_group(answers, system="forerun", method="none", precision="float32", num_prompt_tokens=20, is_exact=True)
    assert found.tokens_per_second == pytest.approx(15)
    assert found.ttft_seconds == pytest.approx(0.6)
    assert [each.category for each in rows_of([found])] == [ALL]


def test_what_the_service_adds_is_the_gap_less_that_of_the_engine() -> None:
    """With the engine measured alone, plain decoding shows what is added, and every method what the front uses."""
    found = [measured(100), measured(100, method="ngram"), measured(125, system="forerun-engine", is_exact=None)]
    plain, ngram = service_of(found)
    assert plain.added_gap_ms == pytest.approx(1000 * (10 / 100 - 10 / 125))
    assert ngram.added_gap_ms is None
    assert plain.front_cpu_ms_per_token == pytest.approx(2 / 11)
    assert plain.front_core_share_at_500 == pytest.approx(1 / 11)


def report(*found: Measurement) -> Report:
    return Report(
        rows=rows_of(found),
        exact=all(each.is_exact is not False for each in found),
        service=service_of(found),
        settings={},
        machine=describe_machine(),
        machine_at_end=describe_machine(),
    )


def test_the_json_has_the_fields_that_are_promised() -> None:
    """Rows with system, method, category and numbers; whether all was exact; the machine."""
    tree = msgspec.to_builtins(report(measured(10)))
    promised = {"system", "method", "category", "tokens_per_second", "ttft_ms", "mean_acceptance_length", "speedup"}
    assert promised <= tree["rows"][0].keys()
    assert tree["exact"] is True
    assert tree["machine"]["cores"] >= 1


def test_the_table_says_when_an_answer_was_changed() -> None:
    """A method whose token ids differ is marked in its row and at the end."""
    lines = table(report(measured(10), measured(20, method="bad", is_exact=False))).splitlines()
    assert next(line.split() for line in lines if "bad" in line)[-2:] == ["2.00", "NO"]
    assert "All methods of forerun gave the same token ids: NO" in lines
