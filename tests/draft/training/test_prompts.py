"""Prompts: read from every kind of line, or begun for the target to go on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draft.training.prompts import ChatTokens, openings, read_prompts
from tests.tiny_folder import write_tiny_folder


def test_every_kind_of_line_is_a_prompt(tmp_path: Path) -> None:
    """Plain text, a JSON string, and objects with prompt, turns or messages; empty lines are passed over."""
    path = tmp_path / "prompts"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "e"}]
    lines = ["a b", '"b"', '{"prompt": "c"}', "", '{"turns": ["d", "later"]}', json.dumps({"messages": messages})]
    path.write_text("\n".join(lines))
    found = read_prompts(path)
    assert [prompt[-1]["content"] for prompt in found] == ["a b", "b", "c", "d", "e"]
    assert found[-1] == messages


@pytest.mark.parametrize("line", ['{"text": "a"}', '{"turns": []}', '{"messages": []}', '{"prompt": '])
def test_a_line_that_is_no_prompt_is_named(tmp_path: Path, line: str) -> None:
    """The error says which line, and what a line may be."""
    path = tmp_path / "prompts"
    path.write_text(f"a\n{line}\n")
    with pytest.raises(ValueError, match=r"line 2: .*a line is plain text"):
        read_prompts(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="has no prompts"):
        read_prompts(path)


def test_a_turn_is_opened_and_closed_as_the_template_does(tmp_path: Path) -> None:
    """An open turn is the beginning of the whole turn, which is what the template makes of the message."""
    folder = write_tiny_folder(tmp_path)
    template = (
        "w1 {% for m in messages %}w2 {{ m['content'] }} w3 {% endfor %}{% if add_generation_prompt %}w4{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template)
    chat = ChatTokens(folder)
    assert chat.open_turn("w9") == [1, 2, 9]
    assert chat.whole_turn("w9 w8") == [1, 2, 9, 8, 3, 4]
    assert chat.conversation([{"role": "user", "content": "w9 w8"}]) == chat.whole_turn("w9 w8")


def test_without_a_template_prompts_are_plain_text(tmp_path: Path) -> None:
    """A base model's prompt is its words; an empty one is at least one token."""
    chat = ChatTokens(write_tiny_folder(tmp_path))
    assert chat.whole_turn("w9 w8") == [9, 8]
    assert len(chat.open_turn("")) == 1


def test_openings_are_many_and_the_same_again() -> None:
    """A longer list begins with the shorter one, so that a training can be extended."""
    assert openings(300, 1)[:100] == openings(100, 1)
    assert len({opening.text for opening in openings(300, 1)}) > 50
    assert openings(50, 1) != openings(50, 2)
