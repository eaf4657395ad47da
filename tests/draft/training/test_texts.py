"""Prompts over texts: passages with tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft.training.texts import LENGTHS, Texts


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two texts, one much longer than the other, and a file that is none."""
    (tmp_path / "long.txt").write_text("\n\n".join(f"Long {i} goes on. " * 9 for i in range(400)))
    (tmp_path / "short.md").write_text("Anna met Bert. They talked about Cordoba for an hour or so, and then left.\n")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    return tmp_path


def test_prompts_are_passages_with_tasks(folder: Path) -> None:
    """Short and long passages of every text, each about as often, with many tasks, and none longer than is said."""
    prompts = list(Texts([folder]).prompts(400, 0))
    short = sum("Cordoba" in prompt or "Anna" in prompt for prompt in prompts)
    assert 120 < short < 280
    lengths = [len(prompt) for prompt in prompts if "Long" in prompt]
    assert min(lengths) < 200
    assert 2000 < max(lengths) < LENGTHS[-1][1] + 200
    assert len({prompt[:12] for prompt in prompts}) > 10


def test_more_prompts_begin_with_fewer(folder: Path) -> None:
    """A longer list begins with the shorter one, so that a training can be extended; another seed makes others."""
    texts = Texts([folder])
    assert list(texts.prompts(30, 1))[:10] == list(texts.prompts(10, 1))
    assert list(texts.prompts(10, 1)) != list(texts.prompts(10, 2))


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    """An empty folder, an empty file, and one that is not UTF-8: an error that names it."""
    with pytest.raises(ValueError, match="no text there"):
        Texts([tmp_path])
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(ValueError, match=r"no text there; it takes \.txt and \.md files in UTF-8"):
        Texts([tmp_path / "empty.txt"])
    (tmp_path / "latin.txt").write_bytes("für".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.txt: not UTF-8"):
        Texts([tmp_path / "latin.txt"])
