from __future__ import annotations

import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest

from service.experiments.assignment import NUM_BUCKETS, matches, place, slot_arm
from service.experiments.model import Experiment, Filter, HeaderMatch, Promotion
from tests.service.experiments.traffic import experiment, facts, replaced


def arms(chosen: Experiment, num: int = 2000, **changes: Any) -> list[int]:
    found = [place(chosen, facts(number, **changes)) for number in range(num)]
    return [one.arm for one in found if one is not None]


def test_assignment_is_the_same_in_another_process() -> None:
    """Arm and cluster depend on nothing but salt and unit: another interpreter with another hash seed agrees."""
    code = (
        "from tests.service.experiments.traffic import experiment, facts\n"
        "from service.experiments.assignment import place\n"
        "print([tuple(place(experiment(), facts(n)))[:4] for n in range(50)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str([tuple(place(experiment(), facts(n)) or ())[:4] for n in range(50)])


def test_shares_follow_the_weights() -> None:
    """Of 4,000 requests, arms get their weights up to chance."""
    chosen = experiment(
        arms=[
            {"name": n, "speculation": {"method": "none"}, "weight": w} for n, w in (("a", 0.7), ("b", 0.2), ("c", 0.1))
        ]
    )
    counts = Counter(arms(chosen, 4000))
    assert [counts[arm] / 4000 for arm in range(3)] == pytest.approx([0.7, 0.2, 0.1], abs=0.025)


def test_a_header_s_value_is_sticky() -> None:
    """All requests with one value get one arm, and a request without it has no place."""
    chosen = experiment(unit="header:X-Session")
    assert len(set(arms(chosen, 50, headers={"x-session": "s-1"}))) == 1
    assert {arm for n in range(50) for arm in arms(chosen, 1, headers={"x-session": f"s-{n}"})} == {0, 1}
    assert place(chosen, facts(headers={})) is None
    assert place(experiment(unit="user"), facts(user="")) is None


def test_experiments_assign_independently() -> None:
    """Who is in which arm of one experiment says nothing about another: half of the pairs agree."""
    pairs = zip(arms(experiment(salt="one")), arms(experiment(salt="two")), strict=True)
    assert sum(a == b for a, b in pairs) / 2000 == pytest.approx(0.5, abs=0.05)


def test_the_cluster_says_nothing_about_the_arm() -> None:
    """Buckets are filled by both arms alike."""
    chosen = experiment()
    places = [place(chosen, facts(number)) for number in range(4000)]
    low = [found.arm for found in places if found is not None and found.bucket < NUM_BUCKETS // 2]
    assert len(low) == pytest.approx(2000, abs=150)
    assert sum(low) / len(low) == pytest.approx(0.5, abs=0.05)


def test_a_block_of_slots_holds_each_arm_once() -> None:
    """Every block is a permutation of the arms, and permutations vary."""
    blocks = [tuple(slot_arm("salt", 3 * block + position, 3) for position in range(3)) for block in range(60)]
    assert all(sorted(block) == [0, 1, 2] for block in blocks)
    assert len(set(blocks)) == 6


def test_switchback_keeps_an_arm_for_the_slot() -> None:
    """Requests of one slot share arm and cluster; those right after a switch are served and not counted."""
    chosen = experiment(allocation={"kind": "switchback", "slot_seconds": 60, "washout_seconds": 5})
    slot = [place(chosen, facts(number, arrived_at=120.0 + number)) for number in range(60)]
    assert len({(found.arm, found.bucket) for found in slot if found}) == 1
    assert [found.is_counted for found in slot if found] == [False] * 5 + [True] * 55


def test_a_cool_down_leaves_the_first_arm_its_share() -> None:
    """After a promotion 10 % stay with the first arm, the rest goes to the promoted one and none to others."""
    promotion = Promotion(arm=2, profile="x", previous=None, at=0.0, until=600.0, by_hand=False, holdback=0.1)
    three = [{"name": name, "speculation": {"method": "none"}} for name in "abc"]
    counts = Counter(arms(replaced(experiment(arms=three), status="promoted", promotion=promotion), 4000))
    assert counts[1] == 0
    assert counts[0] / 4000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize(
    ("chosen", "taken"),
    [
        (Filter(), True),
        (Filter(model="m", route="/v1/chat/completions"), True),
        (Filter(model="other"), False),
        (Filter(route="/v1/completions"), False),
        (Filter(min_prompt_tokens=100, max_prompt_tokens=100), True),
        (Filter(min_prompt_tokens=101), False),
        (Filter(max_prompt_tokens=99), False),
        (Filter(header=HeaderMatch(name="X-Team", value="search")), True),
        (Filter(header=HeaderMatch(name="X-Team", value="ads")), False),
        (Filter(header=HeaderMatch(name="X-Other", value="search")), False),
    ],
)
def test_a_filter_takes_what_it_says(chosen: Filter, taken: bool) -> None:
    """Model, route, prompt length and header must all be as given."""
    assert matches(chosen, facts(headers={"x-team": "search"})) is taken
    assert msgspec.json.decode(msgspec.json.encode(chosen), type=Filter) == chosen
