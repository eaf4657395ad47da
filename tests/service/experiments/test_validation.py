from __future__ import annotations

from typing import Any

import pytest

from service.errors import ApiError
from service.experiments.model import Adaptive, Filter, HeaderMatch, Profile, Promote, Switchback
from service.experiments.validation import (
    check_name,
    filter_warnings,
    filters_overlap,
    initial_weights,
    overlapping,
    parse_definition,
    resolve_arms,
)
from speculation.messages import NgramConfig, NoSpeculation
from tests.service.experiments.traffic import NGRAM, PLAIN, definition, encoded, experiment, replaced


def arm(name: str, **changes: Any) -> dict[str, Any]:
    return {"name": name, "speculation": {"method": "none"}, **changes}


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"name": "<script>"}, "name", "letters"),
    ({"name": "a\nb"}, "name", "letters"),
    ({"name": ""}, "name", "letters"),
    ({"name": "x" * 65}, "name", "1 to 64"),
    ({"name": "../x"}, "name", "letters"),
    ({"hypothesis": "red\x1b[31m"}, "hypothesis", "control characters"),
    ({"hypothesis": "\u202eevil"}, "hypothesis", "control characters"),
    ({"metrik": "tpot"}, "metrik", "metric"),
    ({"metric": "speed"}, "metric", "tokens_per_second"),
    ({"arms": [PLAIN]}, "arms", "at least 2"),
    ({"arms": [arm(str(n)) for n in range(9)]}, "arms", "8"),
    ({"arms": [PLAIN, PLAIN]}, "arms[1].name", "a second time"),
    ({"arms": [PLAIN, {"name": "x"}]}, "arms[1]", "exactly one"),
    ({"arms": [PLAIN, arm("x", profile="y")]}, "arms[1]", "exactly one"),
    ({"arms": [arm("a", weight=0.5), arm("b", weight=0.4)]}, "arms", "sum to 1"),
    ({"arms": [arm("a", weight=0.5), arm("b")]}, "arms[1].weight", "missing"),
    ({"arms": [arm("a", weight=0.0), arm("b", weight=1.0)]}, "arms[0].weight", "0"),
    ({"arms": [PLAIN, {"name": "x", "speculation": {"method": "magic"}}]}, "arms[1].speculation.method", "ngram"),
    (
        {"arms": [PLAIN, {"name": "x", "speculation": {"method": "ngram", "min_n": 3, "max_n": 2}}]},
        "arms[1].speculation",
        "min_n",
    ),
    ({"unit": "ip"}, "unit", "header:NAME"),
    ({"unit": "header:"}, "unit", "header:NAME"),
    ({"unit": "header:bad name"}, "unit", "header:NAME"),
    ({"filter": {"header": {"name": "Authorization", "value": "x"}}}, "filter.header.name", "secret"),
    ({"filter": {"min_prompt_tokens": 9, "max_prompt_tokens": 3}}, "filter.min_prompt_tokens", "at most"),
    ({"filter": {"route": "/v1/\x00"}}, "filter.route", "control"),
    ({"guardrails": [{"metric": "happiness", "limit": 1}]}, "guardrails[0].metric", "error_rate"),
    ({"guardrails": [{"metric": "ttft"}]}, "guardrails[0]", "limit"),
    ({"guardrails": [{"metric": "error_rate", "limit": 2}]}, "guardrails[0].limit", "at most 1"),
    ({"guardrails": [{"metric": "ttft", "limit": 1}] * 2}, "guardrails[1].metric", "second time"),
    ({"min_samples": 300, "max_samples": 200}, "min_samples", "at most"),
    ({"min_samples": 5}, "min_samples", "40"),
    ({"significance": 0.9}, "significance", "0.2"),
    ({"allocation": "random"}, "allocation.kind", "switchback"),
    ({"allocation": {"kind": "adaptive", "floor": 0.5}}, "allocation.floor", "below 0.5"),
    ({"allocation": "adaptive", "unit": "user"}, "unit", "request"),
    ({"allocation": "switchback", "unit": "user"}, "unit", "request"),
    ({"allocation": "switchback", "arms": [arm("a", weight=0.7), arm("b", weight=0.3)]}, "arms", "same number"),
    (
        {"allocation": {"kind": "switchback", "slot_seconds": 8, "washout_seconds": 5}},
        "allocation.washout_seconds",
        "half",
    ),
    ({"at_end": "celebrate"}, "at_end.action", "promote"),
]


@pytest.mark.parametrize(("changes", "param", "hint"), BAD, ids=lambda value: str(value)[:40])
def test_a_mistake_is_named_with_what_is_right(changes: dict[str, Any], param: str, hint: str) -> None:
    """The error carries the field's path, and its message names the field and a value that would do."""
    with pytest.raises(ApiError) as caught:
        parse_definition(encoded(**changes))
    assert caught.value.status == 400
    assert caught.value.body.param == param
    assert hint in caught.value.body.message
    assert all(character.isprintable() for character in caught.value.body.message)


@pytest.mark.parametrize("text", [b"", b"[]", b"3", b"{", b'{"name": NaN}'])
def test_what_is_no_object_is_refused(text: bytes) -> None:
    """A body that is not a JSON object is an error of the client's, not ours."""
    with pytest.raises(ApiError) as caught:
        parse_definition(text)
    assert caught.value.status == 400


def test_kinds_may_be_written_alone() -> None:
    """`"adaptive"` is short for `{"kind": "adaptive"}`, `"promote"` for `{"action": "promote"}`."""
    chosen = definition(allocation="adaptive", at_end="promote")
    assert chosen.allocation == Adaptive()
    assert chosen.at_end == Promote()
    assert isinstance(definition(allocation={"kind": "switchback", "slot_seconds": 30}).allocation, Switchback)


def test_weights_default_to_equal_shares() -> None:
    """No weights mean the same for every arm, given ones are kept."""
    assert initial_weights(definition()) == [0.5, 0.5]
    given = [arm("a", weight=0.9), arm("b", weight=0.1)]
    assert initial_weights(definition(arms=given)) == [0.9, 0.1]


def test_arms_are_resolved_when_they_are_created() -> None:
    """An arm keeps its profile's config and version; an unknown profile or method is an error that names it."""
    profile = Profile(name="fast", version=3, speculation=NgramConfig(max_n=5), updated_at=0.0)
    chosen = definition(arms=[PLAIN, {"name": "x", "profile": "fast"}])
    assert resolve_arms(chosen, {"fast": profile}, lambda _: None) == (
        [NoSpeculation(), NgramConfig(max_n=5)],
        [None, 3],
    )
    with pytest.raises(ApiError, match=r"'fast'.*no profile.*did you mean 'fasts'"):
        resolve_arms(chosen, {"fasts": profile}, lambda _: None)

    def refuse(_: object) -> None:
        raise ValueError("method 'ngram' is not served here")

    with pytest.raises(ApiError, match=r"arms\[0\].speculation: method"):
        resolve_arms(definition(), {}, refuse)


@pytest.mark.parametrize(
    ("one", "other", "overlap"),
    [
        (Filter(), Filter(), True),
        (Filter(model="a"), Filter(), True),
        (Filter(model="a"), Filter(model="b"), False),
        (Filter(route="/a"), Filter(route="/b"), False),
        (Filter(max_prompt_tokens=100), Filter(min_prompt_tokens=101), False),
        (Filter(max_prompt_tokens=100), Filter(min_prompt_tokens=100), True),
        (Filter(min_prompt_tokens=5), Filter(min_prompt_tokens=100), True),
        (Filter(header=HeaderMatch(name="A", value="1")), Filter(header=HeaderMatch(name="a", value="2")), False),
        (Filter(header=HeaderMatch(name="A", value="1")), Filter(header=HeaderMatch(name="B", value="2")), True),
    ],
)
def test_filters_overlap_if_a_request_could_satisfy_both(one: Filter, other: Filter, overlap: bool) -> None:
    """Disjoint in one respect is enough to be apart; the relation is symmetric."""
    assert filters_overlap(one, other) is filters_overlap(other, one) is overlap


def test_only_experiments_that_take_traffic_are_in_the_way() -> None:
    """A stopped experiment or a draft on the same traffic is no obstacle, a running one is, and is found."""
    running = experiment()
    assert overlapping(definition(), [replaced(running, status="stopped"), replaced(running, status="draft")]) is None
    assert overlapping(definition(), [running]) is running


def test_a_filter_that_can_match_nothing_is_warned_of() -> None:
    """Unknown model, unknown route and too long prompts each bring a warning; without knowledge there is none."""
    chosen = Filter(model="gpt", route="/v2", min_prompt_tokens=9000)
    warnings = filter_warnings(chosen, {"smollm2"}, ["/v1/chat/completions"], 8192)
    assert [warning.split()[0] for warning in warnings] == ["filter.model", "filter.route", "filter.min_prompt_tokens"]
    assert filter_warnings(chosen, (), (), 0) == []
    assert filter_warnings(Filter(), {"smollm2"}, ["/v1"], 8192) == []


def test_names_are_checked_wherever_they_come_from() -> None:
    """What an address holds obeys the same rule."""
    assert check_name("ngram-8.v2_x", "name") == "ngram-8.v2_x"
    with pytest.raises(ApiError, match="name is"):
        check_name("-x", "name")


def test_the_example_of_two_arms_is_valid() -> None:
    """The smallest definition parses to its defaults."""
    chosen = definition()
    assert (chosen.arm_names, chosen.unit, chosen.metric) == (["plain", NGRAM["name"]], "request", "tpot")
    assert not chosen.is_clustered
    assert definition(unit="user").is_clustered
    assert definition(allocation="switchback").is_clustered
