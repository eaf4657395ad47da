"""Prompts to train on: read from a file, or begun here and continued by the target itself."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft.training.openers import LONG_OPENERS, OPENERS


class ChatTokens:
    """A target's chat template as token ids around a user's words, and its tokenizer."""

    def __init__(self, model_dir: Path) -> None:
        """Raises ValueError for a folder without a tokenizer."""
        from transformers import AutoTokenizer

        if not (model_dir / "tokenizer.json").is_file():
            raise ValueError(f"{model_dir} has no tokenizer.json; training text needs one")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(model_dir))
        self._before, self._after = "", ""
        if self._tokenizer.chat_template:
            mark = "FORERUN"
            rendered = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
            )
            self._before, _, self._after = rendered.partition(mark)

    def open_turn(self, opener: str) -> list[int]:
        """Token ids of a user's turn that has only begun; of plain text where the target has no chat template."""
        return self._encode(self._before + opener)

    def whole_turn(self, text: str) -> list[int]:
        """Token ids of a prompt that asks `text` and wants an answer."""
        return self._encode(self._before + text + self._after)

    def conversation(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a prompt that ends with the user's last words and wants an answer."""
        if not self._tokenizer.chat_template:
            return self._encode("\n\n".join(message["content"] for message in messages))
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._encode(text)

    def decode(self, token_ids: list[int]) -> str:
        """Text without control tokens."""
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _encode(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special_tokens=not self._before)
        return [int(token_id) for token_id in ids] or [int(self._tokenizer.bos_token_id or 0)]


@dataclass(frozen=True, slots=True)
class Opening:
    """The beginning of a user's turn, for the target to go on with."""

    text: str
    max_tokens: int
    min_tokens: int = 0


def openings(count: int, seed: int) -> list[Opening]:
    """`count` beginnings: an empty turn, a task's first words, or a task over a long text that is still to come."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.35:
            drawn.append(Opening("", 72))
        elif kind < 0.8:
            drawn.append(Opening(rng.choice(OPENERS), 64))
        else:
            # Left alone, the target ends most texts after a sentence.
            drawn.append(Opening(rng.choice(LONG_OPENERS), 280, rng.choice((60, 120, 200))))
    return drawn


def read_prompts(path: Path) -> list[list[dict[str, str]]]:
    """The prompts of a file, as chat messages, one a line.

    A line is plain text, or JSON: a string, or an object with `prompt` (text), `turns` (the first is taken) or
    `messages` (role and content). Raises ValueError naming the line that is none of these.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompts.append(_messages(line))
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ValueError(
                f"{path}, line {number}: {error}; a line is plain text, a JSON string, or a JSON object with prompt, "
                "turns or messages"
            ) from None
    if not prompts:
        raise ValueError(f"{path} has no prompts; it needs one a line")
    return prompts


def _messages(line: str) -> list[dict[str, str]]:
    if not line.lstrip().startswith(("{", '"')):
        return [{"role": "user", "content": line}]
    found = json.loads(line)
    if isinstance(found, str):
        return [{"role": "user", "content": found}]
    if "messages" in found:
        messages = [{"role": str(part["role"]), "content": str(part["content"])} for part in found["messages"]]
        if not messages:
            raise ValueError("messages is empty")
        return messages
    return [{"role": "user", "content": str(found["prompt"] if "prompt" in found else found["turns"][0])}]
