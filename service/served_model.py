"""The model as clients know it: its name, its context, its tokenizer and its chat template."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from pathlib import Path

from service.chat_template import ChatTemplate
from service.errors import ApiError, shorten
from service.tokenizer import Tokenizer
from speculation.messages import Ready, SamplingDefaults

EMBEDDED_NAME = "smollm2-135m-instruct"

_GGUF_SUFFIX = re.compile(r"(-[0-9]{5}-of-[0-9]{5})?\.gguf$")
"""End of the name of a GGUF file, which may be a part of a split one."""

ASSUMED_TOKEN_BYTES = 64
"""Bytes of text allowed for each token of the context where the tokenizer sets no bound."""
BODY_ROOM_BYTES = 256 * 1024
"""Room in a body for everything but the text: JSON's escapes, other fields, further prompts."""
MAX_BODY_BYTES = 16 * 1024**2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the front needs to know of the engine's model."""

    names: tuple[str, ...]
    """Names under which requests may ask for it; responses have the first."""
    folder: Path
    """Where its tokenizer and chat template were read."""
    ready: Ready
    tokenizer: Tokenizer
    template: ChatTemplate | None
    created: int
    """Seconds since the epoch at which it was loaded."""
    sampling: SamplingDefaults
    """What requests get that set nothing else."""
    end_of_turn: int | None = None
    """Token by which the chat template closes an assistant's turn, which ends the answer to a chat request."""

    @classmethod
    def load(cls, name: str, folder: Path, ready: Ready, sampling: SamplingDefaults | None = None) -> ServedModel:
        """Read tokenizer and template from a folder. Raises ValueError if they cannot be used.

        `name` is one name, or several with commas between them.
        `sampling` is for requests that set nothing else; without it OpenAI's defaults hold.
        """
        tokenizer = Tokenizer.load(folder)
        if tokenizer.vocab_size > ready.vocab_size:
            raise ValueError(f"the tokenizer has {tokenizer.vocab_size} tokens, the model {ready.vocab_size}")
        template = ChatTemplate.load(folder)
        end_of_turn = None if template is None else tokenizer.leading_added_token(template.after_answer())
        if end_of_turn is not None and end_of_turn >= ready.vocab_size:
            end_of_turn = None
        return cls(
            _names(name),
            folder,
            ready,
            tokenizer,
            template,
            int(time.time()),
            sampling or SamplingDefaults(),
            end_of_turn,
        )

    @property
    def name(self) -> str:
        """Its name in responses."""
        return self.names[0]

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence: the model's positions, or what the KV pool holds beside its null block."""
        return min(self.ready.max_model_len, (self.ready.num_blocks - 1) * self.ready.block_size)

    @property
    def max_text_bytes(self) -> int | None:
        """Bytes of the longest text that can fit in the context; None where the tokenizer sets no bound."""
        longest = self.tokenizer.bytes_per_token
        return None if longest is None else self.context_length * longest

    @property
    def max_body_bytes(self) -> int:
        """Largest body of a request, where no setting says: a text as long as the context, written as JSON."""
        text = self.max_text_bytes
        if text is None:
            text = self.context_length * ASSUMED_TOKEN_BYTES
        return min(text + BODY_ROOM_BYTES, MAX_BODY_BYTES)

    def check_name(self, name: str | None) -> None:
        """Raises `ApiError` (404) for a model that is not served."""
        if name is not None and name.lower() not in {"default", *map(str.lower, self.names)}:
            served = " or ".join(map(repr, self.names))
            raise ApiError(
                404,
                f"model {shorten(name)} is not served here; use {served}, or leave the field out",
                param="model",
                code="model_not_found",
            )


def _names(text: str) -> tuple[str, ...]:
    """The names of a list with commas. Raises ValueError if there is none."""
    names = tuple(dict.fromkeys(filter(None, map(str.strip, text.split(",")))))
    if not names:
        raise ValueError(f"model_name is {text!r}; it must have at least one name")
    return names


def default_name(model: str) -> str:
    """The name of a model whose operator gave it none."""
    if model == "embedded":
        return EMBEDDED_NAME
    return _GGUF_SUFFIX.sub("", Path(model).name)
