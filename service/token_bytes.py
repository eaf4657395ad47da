"""What bytes of text each token stands for, read off the decoder a tokenizer.json describes."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Any

Step = Callable[[str], str]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table, inverted)."""
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


class TokenDecoder:
    """Turns one token's spelling in the vocabulary into the bytes of text it contributes.

    `decoder` is the section of that name in a tokenizer.json: byte-level vocabularies, and SentencePiece's with "▁"
    for a space and `<0xE2>` for a byte. Raises ValueError for a decoder that does not work token by token.
    """

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        self.strips_leading_space = False
        """Whether the very first space of a text is not part of it (SentencePiece puts one before the first word)."""
        self._steps: list[Step] = []
        self._alphabet: dict[str, int] | None = None
        self._has_byte_tokens = False
        for step in _flatten(decoder):
            self._add(step)

    def _add(self, step: dict[str, Any]) -> None:
        match step:
            case {"type": "ByteLevel"}:
                self._alphabet = byte_alphabet()
            case {"type": "ByteFallback"}:
                self._has_byte_tokens = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                self._steps.append(lambda token: token.replace(old, new))
            case {"type": "Strip", "content": " ", "start": 0 | 1 as start, "stop": 0}:
                self.strips_leading_space = start == 1
            case {"type": "Metaspace", "replacement": str(old)}:
                self._steps.append(lambda token: token.replace(old, " "))
                self.strips_leading_space = step.get("prepend_scheme", "always") != "never"
            case _:
                raise ValueError(f"tokenizer.json: decoder step {step} is not supported: it cannot be streamed exactly")

    def __call__(self, token: str) -> bytes:
        """The bytes of text of one token."""
        if self._has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for step in self._steps:
            token = step(token)
        if self._alphabet is not None:
            found = [self._alphabet.get(character) for character in token]
            known = [byte for byte in found if byte is not None]
            if len(known) == len(found):
                return bytes(known)
        return token.encode("utf-8", "surrogatepass")

    def longest(self, tokens: Collection[str]) -> int:
        """The most bytes of text of one of the tokens; 1 if there are none.

        Where every character stands for a byte, tokens are measured and not decoded: a vocabulary is decoded in 0.2 s,
        which a start of the service would be longer.
        """
        alphabet = {} if self._steps or self._has_byte_tokens else self._alphabet or {}
        if alphabet.keys() >= set("".join(tokens)):
            return max(map(len, tokens), default=1)
        return max((len(self(token)) for token in tokens), default=1)


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]
