from __future__ import annotations

import pytest

from benchmarks.methods import read_methods


def test_names_json_and_labels_are_methods() -> None:
    """Commas inside JSON separate nothing; a config without a label is named by what it says."""
    text = 'none, ngram,{"method": "ngram", "max_n": 4},deep={"method": "first", "proposers": [{"method": "suffix"}]}'
    assert read_methods(text) == [
        ("none", {"method": "none"}),
        ("ngram", {"method": "ngram"}),
        ("ngram max_n=4", {"method": "ngram", "max_n": 4}),
        ("deep", {"method": "first", "proposers": [{"method": "suffix"}]}),
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("none,", "a method is empty"),
        ('{"method": ', "not valid JSON"),
        ('x={"max_n": 4}', "names no method"),
        ("ngram,none,ngram", "'ngram' stands twice"),
    ],
)
def test_a_bad_method_is_named(text: str, problem: str) -> None:
    """The error says which item of the list is wrong, and why."""
    with pytest.raises(ValueError, match=problem):
        read_methods(text)
