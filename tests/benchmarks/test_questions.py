from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.questions import SMALL, Question, read_questions, spread


def questions(**sizes: int) -> list[Question]:
    names = [name for name, size in sizes.items() for _ in range(size)]
    return [Question(question_id=i, category=name, turns=["?"]) for i, name in enumerate(names)]


def test_the_projects_own_questions_cover_what_copies_and_what_does_not() -> None:
    """The small file reads, its ids are unique, and edits, extraction, chat and summaries are in it."""
    found = read_questions(SMALL)
    assert len({question.question_id for question in found}) == len(found)
    assert {question.category for question in found} == {"code edit", "text edit", "extraction", "chat", "summarise"}


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    """The error says which line of which file is no question."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"question_id": 1, "category": "a", "turns": ["x"]}\n\n{"question_id": 2, "turns": ["x"]}\n')
    with pytest.raises(ValueError, match=r"questions.jsonl, line 3: .*category"):
        read_questions(path)


@pytest.mark.parametrize("text", ["", '{"question_id": 1, "category": "a", "turns": []}'])
def test_nothing_to_ask_is_refused(tmp_path: Path, text: str) -> None:
    """A file without questions, and a question without a message, are errors."""
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"no questions|turns is empty"):
        read_questions(path)


def test_a_limit_is_spread_over_categories() -> None:
    """Every category gives as many as any other, or all it has."""
    chosen = spread(questions(a=10, b=1, c=10), 7)
    assert Counter(question.category for question in chosen) == {"a": 3, "b": 1, "c": 3}


def test_a_category_is_sampled_over_its_whole_length() -> None:
    """Within a category questions are taken at even distances, and stay in order."""
    assert [question.question_id for question in spread(questions(a=10), 5)] == [0, 2, 4, 6, 8]


def test_a_limit_above_all_gives_all() -> None:
    """Nothing is left out, and nothing is asked twice."""
    every = questions(a=3, b=2)
    assert spread(every, 100) == every
