"""Request fields of other servers: which are ignored, which have another name here, and which cannot be served.

The names are those that clients of vLLM, SGLang, llama.cpp, Ollama, LM Studio, OpenRouter and Anthropic send to
OpenAI-compatible servers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from difflib import SequenceMatcher
from functools import cache
from typing import Any, Literal

import msgspec

from service.errors import ApiError, cut, did_you_mean
from service.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    Message,
    Prediction,
    ResponseFormat,
    StreamOptions,
    TextPart,
    ToolCall,
)

UnknownFields = Literal["ignore", "refuse"]
"""What becomes of a field that is not known and cannot change the answer."""

MAX_UNKNOWN_FIELDS = 64
"""Most unknown fields of a request, which bounds the search for near-misses."""
NEAR_MISS = 0.8
"""Similarity (`difflib` ratio, from 0 to 1) from which an unknown name is taken for a misspelt one."""

ALIASES = {
    "repeat_penalty": "repetition_penalty",
    "n_predict": "max_tokens",
    "num_predict": "max_tokens",
}
"""Other servers' names of fields that are served."""

_TOOLS = "tool calls are not supported; leave the field out"
_CONSTRAINED = "constrained output is not supported; leave the field out"
_SAMPLER = "this sampling method is not supported; leave the field out"
_EMPTY: tuple[object, ...] = (None, False, 0, "", [], {})

REFUSED: dict[str, tuple[str, tuple[object, ...]]] = {
    "tools": (_TOOLS, _EMPTY),
    "tool_choice": (_TOOLS, (*_EMPTY, "none", "auto")),
    "functions": ("function calls are not supported; leave the field out", _EMPTY),
    "function_call": ("function calls are not supported; leave the field out", (*_EMPTY, "none", "auto")),
    "audio": ("only text is generated; leave the field out", _EMPTY),
    "images": ("only text is read; leave the field out", _EMPTY),
    "web_search_options": ("there is no web search; leave the field out", _EMPTY),
    "suffix": ("insertion before a suffix is not supported; leave the field out", _EMPTY),
    "logit_processors": ("custom logit processors are not supported; leave the field out", _EMPTY),
    "logits_processors": ("custom logit processors are not supported; leave the field out", _EMPTY),
    "use_beam_search": ("beam search is not supported; leave the field out", _EMPTY),
    "length_penalty": ("it belongs to beam search, which is not supported; leave the field out", (*_EMPTY, 1)),
    "early_stopping": ("it belongs to beam search, which is not supported; leave the field out", _EMPTY),
    "allowed_token_ids": ("it is not supported; use logit_bias to favour or ban token ids", _EMPTY),
    "bad_words": ("it is not supported; use logit_bias to ban token ids", _EMPTY),
    "no_repeat_ngram_size": ("it is not supported; use repetition_penalty", _EMPTY),
    "typical_p": (_SAMPLER, (*_EMPTY, 1)),
    "tfs_z": (_SAMPLER, (*_EMPTY, 1)),
    "top_a": (_SAMPLER, _EMPTY),
    "top_n_sigma": (_SAMPLER, (*_EMPTY, -1)),
    "mirostat": (_SAMPLER, _EMPTY),
    "mirostat_mode": (_SAMPLER, _EMPTY),
    "dry_multiplier": (_SAMPLER, _EMPTY),
    "xtc_probability": (_SAMPLER, _EMPTY),
    "dynatemp_range": (_SAMPLER, _EMPTY),
    "smoothing_factor": (_SAMPLER, _EMPTY),
    "guided_json": (_CONSTRAINED, _EMPTY),
    "guided_regex": (_CONSTRAINED, _EMPTY),
    "guided_choice": (_CONSTRAINED, _EMPTY),
    "guided_grammar": (_CONSTRAINED, _EMPTY),
    "structured_outputs": (_CONSTRAINED, _EMPTY),
    "json_schema": (_CONSTRAINED, _EMPTY),
    "grammar": (_CONSTRAINED, _EMPTY),
    "regex": (_CONSTRAINED, _EMPTY),
    "ebnf": (_CONSTRAINED, _EMPTY),
    "format": (_CONSTRAINED, _EMPTY),
    "lora_path": ("LoRA adapters are not supported; leave the field out", _EMPTY),
    "lora": ("LoRA adapters are not supported; leave the field out", _EMPTY),
    "chat_template": ("the model's own chat template is used; leave the field out", _EMPTY),
    "documents": ("documents are not supported; put their text into a message", _EMPTY),
    "stop_sequences": ("it is not a field of this route; use stop", _EMPTY),
    "max_new_tokens": ("it is not a field of this route; use max_tokens", _EMPTY),
    "max_output_tokens": ("it is not a field of this route; use max_tokens", _EMPTY),
    "input": ("it is not a field of this route; use messages on /v1/chat/completions", _EMPTY),
    "system": ("it is not a field of this route; put a message with the role 'system' into messages", _EMPTY),
    "return_tokens_as_token_ids": ("it is not supported; return_token_ids adds each choice's token ids", _EMPTY),
    "return_hidden_states": ("hidden states are not returned; leave the field out", _EMPTY),
    "prompt_embeds": ("only text and token ids are read; leave the field out", _EMPTY),
}
"""Fields that would change the answer and are not served: why, and the values at which they change nothing."""

IGNORED = frozenset(
    {
        "num_ctx", "num_keep", "num_batch", "num_gpu", "num_thread", "keep_alive", "repeat_last_n", "penalty_last_n",
        "cache_prompt", "id_slot", "slot_id", "samplers", "timings_per_token", "post_sampling_probs", "n_probs",
        "mirostat_tau", "mirostat_eta", "dry_base", "dry_allowed_length", "dry_penalty_last_n",
        "dry_sequence_breakers", "xtc_threshold", "dynatemp_exponent", "smoothing_curve", "min_keep",
        "thinking", "reasoning", "include_reasoning", "separate_reasoning", "stream_reasoning",
        "provider", "route", "transforms", "usage", "models", "plugins", "no_stop_trim",
        "spaces_between_special_tokens", "detokenize", "mm_processor_kwargs", "kv_transfer_params",
        "guided_decoding_backend", "skip_tokenizer_init", "return_progress", "reasoning_format",
        "chat_id", "session_id", "client_metadata",
    }
)  # fmt: skip
"""Fields that are known to change nothing here, so that none of them is taken for a misspelling."""

WITHOUT_EFFECT = frozenset(
    {"parallel_tool_calls", "modalities", "verbosity", "reasoning_effort", "chat_template_kwargs"}
)
"""Fields of chat completions that mean nothing to a text completion."""

_INDEX = re.compile(r"\[\d+\]")

_CLEANED: Mapping[type, Mapping[str, type[msgspec.Struct]]] = {
    ChatCompletionRequest: {
        "messages": Message,
        "stream_options": StreamOptions,
        "prediction": Prediction,
        "response_format": ResponseFormat,
    },
    CompletionRequest: {"stream_options": StreamOptions, "prediction": Prediction},
    Message: {"content": TextPart, "tool_calls": ToolCall},
    Prediction: {"content": TextPart},
}
"""Fields that hold objects, or lists of objects, in which unknown fields are treated as at the root."""


class FieldCleaner:
    """Takes from a request what is not its route's, and remembers what it has taken."""

    def __init__(self, unknown_fields: UnknownFields) -> None:
        self.ignored: dict[str, None] = {}
        """Paths of the fields that were left out, in the order of the request; list indices are left out."""
        self._unknown_fields = unknown_fields
        self._num_unknown = 0

    def clean(self, tree: Mapping[str, Any], request_type: type[msgspec.Struct]) -> dict[str, Any]:
        """The request without fields of other servers, and with their names replaced where only the name differs.

        Raises `ApiError` (400) for fields that would change the answer, and for misspelt ones.
        """
        root = dict(tree)
        options = root.pop("options", None)
        if isinstance(options, dict):  # Ollama's sampling options; fields of the request itself win
            root = {**options, **root}
        self._apply_thinking(root)
        for foreign, own in ALIASES.items():
            value = root.pop(foreign, None)
            if value is None:
                continue
            if root.get(own) not in {None, value}:
                raise ApiError.invalid(foreign, f"{foreign} and {own} are the same field; give one of them")
            root[own] = value
        if request_type is CompletionRequest and root.get("logprobs") is False:
            root["logprobs"] = None
        return self._cleaned(root, request_type, "")

    def _apply_thinking(self, root: dict[str, Any]) -> None:
        """Make `enable_thinking` a variable of the chat template, which is what it is for other servers."""
        value = root.pop("enable_thinking", None)
        given = root.get("chat_template_kwargs")
        if isinstance(value, bool) and (given is None or isinstance(given, dict)):
            root["chat_template_kwargs"] = {"enable_thinking": value, **(given or {})}

    def _cleaned(self, value: Mapping[str, Any], kind: type[msgspec.Struct], path: str) -> dict[str, Any]:
        known = _names(kind)
        kept: dict[str, Any] = {}
        for name, item in value.items():
            if name in known:
                nested = _CLEANED.get(kind, {}).get(name)
                if item is None and name != "content":
                    continue
                kept[name] = item if nested is None else self._cleaned_items(item, nested, f"{path}{name}")
            elif item is not None:
                self._leave_out(name, item, kind, known, path)
        return kept

    def _cleaned_items(self, item: object, kind: type[msgspec.Struct], path: str) -> object:
        if isinstance(item, dict):
            return self._cleaned(item, kind, f"{path}.")
        if isinstance(item, list):
            return [
                self._cleaned(one, kind, f"{path}[{index}].") if isinstance(one, dict) else one
                for index, one in enumerate(item)
            ]
        return item

    def _leave_out(
        self, name: str, value: object, kind: type[msgspec.Struct], known: Collection[str], path: str
    ) -> None:
        """Note that a field is ignored. Raises `ApiError` if it must not be."""
        full = f"{path}{cut(name)}"
        if kind is Message and name in REFUSED and not _is_neutral(name, value):  # such as Ollama's `images`
            raise ApiError.invalid(full, f"{full}: {REFUSED[name][0]}", code="unsupported_parameter")
        if not path:
            self._refuse_if_it_matters(name, value, kind)
            if _is_neutral(name, value):
                return
        self._num_unknown += 1
        if self._num_unknown > MAX_UNKNOWN_FIELDS:
            raise ApiError.invalid(
                None, f"the request has more than {MAX_UNKNOWN_FIELDS} unknown fields", code="unknown_parameter"
            )
        is_foreign = not path and (name in IGNORED or name in WITHOUT_EFFECT)
        meant = None if is_foreign else _near_miss(name, known)
        if self._unknown_fields == "refuse" or meant is not None:
            hint = did_you_mean(name, known) if meant is None else f"did you mean {meant!r}?"
            raise ApiError.invalid(full, f"{full} is not a known field; {hint}", code="unknown_parameter")
        self.ignored[_INDEX.sub("[]", full)] = None

    def _refuse_if_it_matters(self, name: str, value: object, kind: type[msgspec.Struct]) -> None:
        """Raises `ApiError` for a field at the root that would change the answer."""
        if _is_neutral(name, value):
            return
        if name in REFUSED:
            raise ApiError.invalid(name, f"{name}: {REFUSED[name][0]}", code="unsupported_parameter")
        other, route = (
            (CompletionRequest, "/v1/completions")
            if kind is ChatCompletionRequest
            else (ChatCompletionRequest, "/v1/chat/completions")
        )
        if name in _names(other) and name not in WITHOUT_EFFECT:
            raise ApiError.invalid(
                name, f"{name} is a field of {route}, not of this route; leave it out", code="unsupported_parameter"
            )


def _is_neutral(name: str, value: object) -> bool:
    """Whether a field that is not this route's says nothing that is not so without it."""
    if name in REFUSED:
        return any(value == neutral for neutral in REFUSED[name][1])
    if name == "best_of":
        return value == 1
    if name == "response_format":
        return value == {"type": "text"}
    return name in _OWN_NAMES and any(value == neutral for neutral in _EMPTY)


def _near_miss(name: str, known: Collection[str]) -> str | None:
    """The known name of which `name` is a misspelling, such as `temprature` or `topP`; None if there is none."""
    plain = _plain(name)
    if len(plain) > 2 * max(map(len, known)):
        return None
    ratios = {own: SequenceMatcher(None, plain, _plain(own)).ratio() for own in known}
    nearest = max(sorted(ratios), key=ratios.__getitem__)
    return nearest if ratios[nearest] >= NEAR_MISS else None


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name[:256].lower())


@cache
def _names(kind: type[msgspec.Struct]) -> frozenset[str]:
    tag = kind.__struct_config__.tag_field
    return frozenset({field.encode_name for field in msgspec.structs.fields(kind)} | ({tag} if tag else set()))


_OWN_NAMES = _names(ChatCompletionRequest) | _names(CompletionRequest)
