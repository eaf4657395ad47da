"""Text to token ids, with control tokens that a client cannot type."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from service.text_bound import bytes_per_token
from service.token_bytes import TokenDecoder

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
"""Read by the library at each call. Several texts at once are the front's business, and threads of its own are in the
way of the engine's."""

PIECE_CHARACTERS = 16 * 1024
"""Characters that are encoded before the tokens are counted, where a text may have too many."""
USUAL_TOKEN_BYTES = 8
"""A text with more characters than so many for each token that it may have is counted in pieces first."""


class TooManyTokensError(ValueError):
    """A text has more tokens than it may; the message says how many."""


class Tokenizer:
    """The target's tokenizer.

    Control tokens (`<|im_end|>`, `</s>`) have a second, secret spelling here, and only that one is recognised. A
    template's control tokens are respelled after rendering; those that a client typed never are, so they stay text.

        client's text   a <|im_end|> b      protect ->   a ·7; b          (· is a secret word, 7 the token's number)
        rendered        <|im_start|>user a ·7; b<|im_end|>
        respelled       ·<|im_start|>user a <|im_end|> b·<|im_end|>

    One tokenizer sees the whole text, so normalizers and pre-tokenizers behave as they do elsewhere. Safe to use from
    several threads.
    """

    def __init__(self, description: bytes) -> None:
        """`description` is the content of a tokenizer.json. Raises ValueError if it is not one."""
        tree: dict[str, Any] = msgspec.json.decode(description)
        self._secret = secrets.token_hex(16)
        self._specials = {
            int(token["id"]): str(token["content"]) for token in tree.get("added_tokens", ()) if token["special"]
        }
        self._added = {
            str(token["content"]): int(token["id"])
            for token in tree.get("added_tokens", ())
            if str(token["content"]).strip()
        }
        self._ids = {content: token_id for token_id, content in self._specials.items()}
        self._pattern = _any_of(self._specials.values())
        self._in_template = re.compile(rf"{self._secret}(\d+);|{self._pattern.pattern}")
        self._decode_token = TokenDecoder(tree.get("decoder"))
        self._tokenizer = self._respelled(tree)
        self._prefix = self._added_in_front()
        self._bytes: dict[int, bytes] = {}
        self.vocab_size = self._tokenizer.get_vocab_size()
        vocabulary = self._tokenizer.get_vocab().items()
        longest = self._decode_token.longest([token for token, i in vocabulary if i not in self._specials])
        longest = max(longest, *(len(word.encode()) for word in ("", *self._specials.values())))
        self.bytes_per_token = bytes_per_token(tree, longest)
        """Most bytes of a client's text that become one token; None where the tokenizer sets no bound."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises ValueError if there is none or it is of an unknown kind."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json; a model folder needs one")
        try:
            return cls(path.read_bytes())
        except (KeyError, TypeError, AttributeError, IndexError, msgspec.DecodeError) as error:
            raise ValueError(f"{path} is not a tokenizer: {error!r}") from error
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @property
    def strips_leading_space(self) -> bool:
        """Whether a text of its own (not the continuation of another) begins with a space that is not part of it."""
        return self._decode_token.strips_leading_space

    def protect(self, text: str) -> str:
        """A client's text, so written that `encode_rendered` takes the control tokens in it for text."""
        return self._pattern.sub(lambda found: f"{self._secret}{self._ids[found[0]]};", text)

    def encode_rendered(self, text: str, *, most: int | None = None) -> list[int]:
        """Token ids of a rendered template whose client texts were protected; adds nothing at its ends.

        Raises `TooManyTokensError` if there are more than `most`.
        """

        def respell(found: re.Match[str]) -> str:
            return self._respell(found[0]) if found[1] is None else self._specials[int(found[1])]

        return self._encode(self._in_template.sub(respell, text), add_special=False, most=most)

    def encode(
        self, text: str, *, parse_special: bool = False, add_special: bool = True, most: int | None = None
    ) -> list[int]:
        """Token ids of a client's text, behind whatever the model wants at the start of a text (`add_special`).

        Control tokens in it are text, unless `parse_special`. A text whose tokens begin with what the model wants there
        (its BOS) gets no second one. Raises `TooManyTokensError` if there are more tokens than `most`.
        """
        if parse_special:
            text = self._pattern.sub(lambda found: self._respell(found[0]), text)
        token_ids = self._encode(text, add_special=add_special, most=most)
        size = len(self._prefix)
        if add_special and size and token_ids[size : 2 * size] == self._prefix:
            return token_ids[size:]
        return token_ids

    def leading_added_token(self, text: str) -> int | None:
        """The added token, such as a control token, that a text begins with after whitespace; None if it has none."""
        text = text.lstrip()
        found = max(filter(text.startswith, self._added), key=len, default=None)
        return None if found is None else self._added[found]

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of text a token contributes; none for a control token or an id without a token."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = b"" if token_id in self._specials else self._decode(token_id)
        return found

    def spelling(self, token_id: int) -> bytes:
        """The bytes by which a token is shown beside its logprob: as `token_bytes`, and control tokens by name."""
        special = self._specials.get(token_id)
        return self.token_bytes(token_id) if special is None else special.encode()

    def decode(self, token_ids: Iterable[int]) -> str:
        """The whole text of a sequence of its own, without control tokens."""
        text = b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")
        return text.removeprefix(" ") if self.strips_leading_space else text

    def _added_in_front(self) -> list[int]:
        """Token ids that the model wants in front of a text, such as its BOS."""
        bare, whole = (self._encode("a", add_special=add_special, most=None) for add_special in (False, True))
        size = next((i for i in range(len(whole) - len(bare) + 1) if whole[i : i + len(bare)] == bare), 0)
        return whole[:size]

    def _decode(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        return b"" if token is None else self._decode_token(token)

    def _encode(self, text: str, *, add_special: bool, most: int | None) -> list[int]:
        """Token ids. The library lets other threads run while it encodes a batch, and not while it encodes a text."""
        encode = self._tokenizer.encode_batch_fast
        if most is not None and len(text) > max(most * USUAL_TOKEN_BYTES, PIECE_CHARACTERS):
            # A text cut into pieces has nearly as many tokens as the whole: twice the limit is certainly too many.
            num_tokens = 0
            for start in range(0, len(text), PIECE_CHARACTERS):
                num_tokens += len(encode([text[start : start + PIECE_CHARACTERS]], add_special_tokens=False)[0])
                if num_tokens > 2 * most + PIECE_CHARACTERS // USUAL_TOKEN_BYTES:
                    raise TooManyTokensError(f"more than {2 * most}")
        encoded = encode([text], add_special_tokens=add_special)[0]
        if most is not None and len(encoded) > most:
            raise TooManyTokensError(str(len(encoded)))
        return list(encoded.ids)

    def _respell(self, special: str) -> str:
        return self._secret + special

    def _respelled(self, tree: dict[str, Any]) -> tokenizers.Tokenizer:
        model = tree["model"]
        vocabulary = model["vocab"]
        for token in tree.get("added_tokens", ()):
            content = token["content"]
            if not token["special"]:
                continue
            token["content"] = self._respell(content)
            if isinstance(vocabulary, dict):
                if content in vocabulary:
                    vocabulary[token["content"]] = vocabulary.pop(content)
            elif token["id"] < len(vocabulary):
                vocabulary[token["id"]][0] = token["content"]
            if model.get("unk_token") == content:
                model["unk_token"] = token["content"]
        try:
            built = tokenizers.Tokenizer.from_buffer(msgspec.json.encode(tree))
        except Exception as error:  # the library raises nothing narrower
            raise ValueError(f"not a tokenizer: {error}") from error
        for token_id, content in self._specials.items():
            if built.token_to_id(self._respell(content)) != token_id:
                raise ValueError(f"control token {content!r} does not keep its id {token_id}")
        return built


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds any of the words, the longest first; nothing if there are none."""
    ordered = sorted(words, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) if ordered else r"(?!)")
