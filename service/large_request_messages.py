"""Messages between the front and its process for large requests, sent as the frames of `speculation.framing`."""

from __future__ import annotations

from typing import Literal

import msgspec

from service.errors import ErrorBody
from service.foreign_fields import UnknownFields
from service.generation import Generation
from service.schema import GenerationRequest, Received
from service.settings import LimitSettings
from speculation.messages import Ready, SamplingDefaults, SpeculationConfig

Kind = Literal["chat", "completion", "socket", "tokenize"]
"""Body of POST /v1/chat/completions, /v1/completions or /tokenize, or a `generate` message of GET /v1/stream."""


class Load(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """First message to the process: the model whose tokenizer and chat template it uses."""

    model_name: str
    folder: str
    """Where tokenizer.json and the chat template are."""
    ready: Ready
    sampling: SamplingDefaults = SamplingDefaults()
    """What requests get that set nothing else."""
    limits: LimitSettings


class Parse(msgspec.Struct, frozen=True, kw_only=True, tag="parse"):
    """Request for a body to be parsed and tokenized, which follows this frame as it is."""

    kind: Kind
    num_bytes: int
    """Length of the body."""
    profiles: dict[str, SpeculationConfig]
    """Configs that the request's `speculation` may name."""
    unknown_fields: UnknownFields = "ignore"
    """What becomes of fields that are not known."""


class Parsed(msgspec.Struct, frozen=True, kw_only=True, tag="parsed"):
    """Answer: a request that can be served."""

    message_id: str = ""
    """`id` of a WebSocket message."""
    request: GenerationRequest
    """Fields that say how to answer and whom; the others are in `generation`."""
    generation: Generation
    """Its `id` is empty."""


class Tokenized(msgspec.Struct, frozen=True, kw_only=True, tag="tokenized"):
    """Answer: the token ids of a body of POST /tokenize."""

    token_ids: list[int]
    with_token_strs: bool


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """Answer: the status and body of the error that the client gets."""

    message_id: str | None = None
    status: int
    error: ErrorBody


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Answer: an exception that is no fault of the client's."""

    message_id: str | None = None
    traceback: str
    is_memory_error: bool = False


ToWorker = Load | Parse
FromWorker = Parsed | Tokenized | Refused | Failed


def fields_of(body: Received | Parsed) -> GenerationRequest:
    """Fields of a request that say how to answer and whom."""
    return body.request
