"""Prompts over somebody's own texts: a passage, and a task a user might set about it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

SUFFIXES = (".txt", ".md")
TASKS = (
    "Summarize the following text.\n\n{}",
    "Summarize: {}",
    "{}\n\nSummarize the text above in a few sentences.",
    "Write a short summary of this article:\n\n{}",
    "What are the main points of this text?\n\n{}",
    "Read the text and answer the question.\n\nText: {}\n\nQuestion: What is said about {name}?",
    "Answer the question based on the context.\n\nContext: {}\n\nQuestion: Who or what is {name}?\nAnswer:",
    "{}\n\nWhat does this mean?",
    "Explain this: {}",
    "Rewrite the following text in simpler words:\n\n{}",
    "Correct the mistakes in this text:\n\n{}",
    "List the names that occur in the following text.\n\n{}",
    "Write three questions about this text:\n\n{}",
    "Continue this text:\n\n{}",
    "Turn this into a list of facts: {}",
)
TRANSLATIONS = (
    "Translate to English: {}",
    "Translate the following sentence into English: {}",
    "Translate this text into English.\n\n{}",
    "{}\n\nWhat is this in English?",
    "How do you say this in English: {}",
)
TRANSLATION_SHARE = 0.35
LENGTHS = ((40, 240), (240, 1000), (1000, 3200))
"""Characters of short, medium and long passages, which take turns by chance; translations are short or medium."""


class Texts:
    """Plain text files, from which passages are drawn: every file as often as any other, whatever its size."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Files, or folders whose `.txt` and `.md` files are taken. Raises ValueError where there is no text."""
        found = {file: _paragraphs(file) for path in paths for file in _files(path)}
        self._texts = [paragraphs for paragraphs in found.values() if paragraphs]
        self.names = [file.name for file, paragraphs in found.items() if paragraphs]
        if not self._texts:
            names = ", ".join(map(str, paths))
            raise ValueError(f"--texts {names}: no text there; it takes {' and '.join(SUFFIXES)} files in UTF-8")

    def prompts(self, count: int, seed: int) -> Iterator[str]:
        """`count` prompts; the same for the same seed and texts, however many are asked for."""
        for number in range(count):
            rng = random.Random(f"{seed} {number}")
            is_translation = rng.random() < TRANSLATION_SHARE
            shortest, longest = rng.choice(LENGTHS[:2] if is_translation else LENGTHS)
            passage = self._passage(rng, rng.randint(shortest, longest))
            yield rng.choice(TRANSLATIONS if is_translation else TASKS).format(passage, name=_name(rng, passage))

    def _passage(self, rng: random.Random, length: int) -> str:
        """Whole paragraphs, the last one cut behind a sentence or a word, of about `length` characters."""
        paragraphs = rng.choice(self._texts)
        first = rng.randrange(len(paragraphs))
        passage = ""
        for paragraph in paragraphs[first : first + 40]:
            passage = f"{passage}\n\n{paragraph}".strip()
            if len(passage) >= length:
                break
        return _cut(passage, length)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES and file.is_file())
    return [path]


def _paragraphs(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--texts {file}: not UTF-8 ({error})") from None
    parts = (" ".join(part.split()) for part in text.split("\n\n"))
    return [part for part in parts if part]


def _cut(text: str, length: int) -> str:
    if len(text) <= length:
        return text
    sentence = max(text.rfind(end, 0, length) for end in (". ", "? ", "! ")) + 1
    return text[:sentence] if sentence > length // 2 else text[: text.rfind(" ", 0, length)] or text[:length]


def _name(rng: random.Random, passage: str) -> str:
    """A word of the passage to ask about: a capitalised one, if there are any."""
    words = [word.strip(".,;:!?()\"'") for word in passage.split()]
    return rng.choice([word for word in words if word[:1].isupper()] or words or ["it"])
