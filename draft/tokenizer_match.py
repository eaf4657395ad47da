"""Whether a draft model speaks the target's tokens: compared id by id, before anything is served."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer


class TokenizerMismatchError(ValueError):
    """The draft model's tokenizer is not the target's."""


def require_same_tokenizer(target_dir: Path, draft_dir: Path) -> None:
    """Compare the tokens of two model folders, id by id.

    One may have more ids than the other, as models pad their vocabularies. Raises `TokenizerMismatchError` naming the
    first id that means something else, or the file that is missing.
    """
    target, draft = _tokens_by_id(target_dir), _tokens_by_id(draft_dir)
    for token_id in sorted(target.keys() & draft.keys()):
        if target[token_id] != draft[token_id]:
            raise TokenizerMismatchError(
                f"draft_model {draft_dir} has another tokenizer than the target: token {token_id} is "
                f"{draft[token_id]!r} there and {target[token_id]!r} in the target; use one of the same family"
            )
    for larger, smaller, name in ((target, draft, "target"), (draft, target, "draft model")):
        end = max(smaller, default=-1)
        inside = [token_id for token_id in larger.keys() - smaller.keys() if token_id <= end]
        if inside:
            raise TokenizerMismatchError(
                f"draft_model {draft_dir} has another tokenizer than the target: token {min(inside)} is in the "
                f"{name} alone"
            )


def _tokens_by_id(model_dir: Path) -> dict[int, str]:
    path = model_dir / "tokenizer.json"
    if not path.is_file():
        raise TokenizerMismatchError(f"{path} is missing; without it the two tokenizers cannot be compared")
    vocabulary = Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    return {token_id: token for token, token_id in vocabulary.items()}
