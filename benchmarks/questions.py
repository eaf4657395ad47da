"""Questions to measure with: JSON lines in the shape of Spec-Bench's (`question_id`, `category`, `turns`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

SMALL = Path(__file__).with_name("prompts") / "small.jsonl"
"""The project's own few questions."""


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """A user's messages; each after the first follows the answer to the one before."""

    question_id: int
    category: str
    turns: list[str]


def read_questions(path: Path) -> list[Question]:
    """The questions of a file, in order. Raises ValueError naming the line that is not one."""
    questions = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            question = msgspec.json.decode(line, type=Question)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}; a line needs question_id, category and turns") from error
        if not question.turns:
            raise ValueError(f"{path}, line {number}: turns is empty; a question has at least one user message")
        questions.append(question)
    if not questions:
        raise ValueError(f"{path} has no questions")
    return questions


def spread(questions: Sequence[Question], limit: int) -> list[Question]:
    """At most `limit` questions, as many of every category as of any other where there are enough, in file order.

    Within a category they are taken at even distances, so that the same limit always gives the same questions.
    """
    by_category: dict[str, list[Question]] = {}
    for question in questions:
        by_category.setdefault(question.category, []).append(question)
    wanted = dict.fromkeys(by_category, 0)
    for _ in range(min(limit, len(questions))):
        open_categories = [name for name, found in by_category.items() if wanted[name] < len(found)]
        wanted[min(open_categories, key=wanted.__getitem__)] += 1
    chosen = {
        id(found[i * len(found) // wanted[name]]) for name, found in by_category.items() for i in range(wanted[name])
    }
    return [question for question in questions if id(question) in chosen]
