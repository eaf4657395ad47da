"""The most bytes of text that one token can stand for, where a tokenizer.json allows to say."""

from __future__ import annotations

from typing import Any

NORMAL_FORM_FACTOR = 4
"""Unicode's normal forms and lower case write a character of four bytes with at least one."""


def bytes_per_token(tree: dict[str, Any], longest_token: int) -> int | None:
    """The most bytes of a client's text that become one token; None if there is no such bound.

    `tree` is a tokenizer.json, `longest_token` the bytes of the longest token of its vocabulary. There is no bound
    where a step drops text (a normalizer that strips, a pre-tokenizer that removes what it splits at, a control token
    that takes the spaces beside it along) or a run of unknown characters becomes one token.
    """
    factor = _normalizer_factor(tree.get("normalizer"))
    takes_spaces = any(token.get("lstrip") or token.get("rstrip") for token in tree.get("added_tokens", ()))
    knows_every_byte = _has_all_bytes(tree)
    if factor is None or takes_spaces or not knows_every_byte or _drops_text(tree.get("pre_tokenizer")):
        return None
    return longest_token * factor


def _has_all_bytes(tree: dict[str, Any]) -> bool:
    """Whether every text has tokens of its own, so that nothing becomes an unknown token."""
    model = tree["model"]
    if model.get("type", "BPE") != "BPE":
        return False
    steps = [*_flatten(tree.get("pre_tokenizer"), "pretokenizers"), *_flatten(tree.get("normalizer"), "normalizers")]
    return bool(model.get("byte_fallback")) or any(step["type"] == "ByteLevel" for step in steps)


def _normalizer_factor(normalizer: dict[str, Any] | None) -> int | None:
    """How many bytes of text a byte of normalized text can stand for; None if there is no bound."""
    factor = 1
    for step in _flatten(normalizer, "normalizers"):
        match step:
            case {"type": "Prepend" | "ByteLevel"}:
                pass
            case {"type": "NFC" | "NFD" | "NFKC" | "NFKD" | "Lowercase"}:
                factor *= NORMAL_FORM_FACTOR
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if len(new.encode()) >= len(
                old.encode()
            ):
                pass
            case _:
                return None
    return factor


def _drops_text(pre_tokenizer: dict[str, Any] | None) -> bool:
    for step in _flatten(pre_tokenizer, "pretokenizers"):
        match step:
            case {"type": "ByteLevel" | "Digits" | "Metaspace"}:
                pass
            case {"type": "Split" | "Punctuation", "behavior": behavior} if behavior != "Removed":
                pass
            case _:
                return True
    return False


def _flatten(step: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step.get("type") == "Sequence":
        return [inner for outer in step[inside] for inner in _flatten(outer, inside)]
    return [step]
