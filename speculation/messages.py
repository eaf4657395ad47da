"""Every message that crosses the seam between the front and an engine. Frozen data; MessagePack on the wire.

Front to engine: `Submit`, `Abort`, `Drain`, `Prefer`. Engine to front: `Ready`, `StepOutputs`, `Rejected`, `Stats`,
`BlocksChanged`, `Alive`.
"""

from __future__ import annotations

import msgspec

from draft.config import (
    AutoConfig,
    DraftModelConfig,
    NgramConfig,
    NoSpeculation,
    SpeculationConfig,
    method_of,
    resolve,
    single_configs,
)
from target.sampling_defaults import SamplingDefaults
from target.sampling_params import BIAS, MAX_LOGPROBS, MAX_TOP_K, RANGES, Range, SamplingParams

__all__ = [
    "BIAS",
    "MAX_LOGPROBS",
    "MAX_TOP_K",
    "RANGES",
    "Abort",
    "Alive",
    "AutoConfig",
    "BlocksChanged",
    "Command",
    "DraftModelConfig",
    "Drain",
    "Event",
    "Loading",
    "NgramConfig",
    "NoSpeculation",
    "Prefer",
    "Range",
    "Ready",
    "Rejected",
    "RequestMetrics",
    "SamplingDefaults",
    "SamplingParams",
    "SequenceOutput",
    "SpeculationConfig",
    "Stats",
    "StepOutputs",
    "Submit",
    "TokenLogprob",
    "method_of",
    "resolve",
    "single_configs",
]


class Submit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="submit"):
    """Generate for one sequence. A request with n > 1 is n of these, whose seeds differ."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    speculation: SpeculationConfig | None = None
    """None is the engine's default."""
    priority: int = 0
    """Lower is served earlier; equal priorities in order of arrival."""
    cache_salt: str = ""
    """Prefix blocks are shared among requests of the same salt alone."""
    prompt_logprobs: int | None = None
    """Number of alternatives to report beside each prompt token's logprob; None reports nothing."""
    prediction_token_ids: list[int] = []
    output_token_ids: list[int] = []
    """Tokens that were generated already, elsewhere: generation goes on behind them, and counts them."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Stop a sequence and free its blocks within one step. Unknown ids are ignored: it may just have finished."""

    request_id: str


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new sequences, finish the running ones, then exit."""


class Prefer(msgspec.Struct, frozen=True, tag="prefer"):
    """Prefixes that the whole pool is asked for, by their last blocks, most popular first: evict them last."""

    identities: list[bytes]


Command = Submit | Abort | Drain | Prefer


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The engine has loaded its model and serves."""

    model_fingerprint: str
    model_folder: str
    """Where tokenizer.json, tokenizer_config.json and the chat template lie: of a GGUF file, its converted folder."""
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    methods: list[str]
    """Speculation methods this engine can serve."""
    max_waiting: int
    description: str
    """Device, precision and which path runs."""
    max_num_seqs: int = 0
    """Most sequences that run at a time; 0 is not said."""
    heartbeat_seconds: float = 0.0
    """How often the engine says at least `Alive`, however long a step takes; 0 promises nothing."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """Sampling values that the model's files recommend, for requests that do not set them."""


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """The engine loads, which may take minutes; sent before `Ready`, any number of times."""

    phase: str
    """What it does now, such as "compiling for this processor, once"."""


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """The target's logprob of one token, and its most likely alternatives."""

    logprob: float
    rank: int
    """1 for the most likely token."""
    top_token_ids: list[int]
    top_logprobs: list[float]


class RequestMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence cost and how its guesses fared. Durations in seconds."""

    queue_seconds: float
    prefill_seconds: float
    """From the first step it was scheduled in to the step that computed its prompt whole."""
    num_prefill_chunks: int
    num_cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    num_steps: int
    """Forwards that ended in at least one token."""
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_prediction_tokens: int
    """Draft tokens that came from the client's predicted output."""
    num_accepted_prediction_tokens: int
    accepted_histogram: list[int]
    """Entry i counts drafts of which exactly i tokens were accepted."""
    skipped_drafts: dict[str, int]
    """Steps without a draft, by reason."""
    num_preemptions: int
    saved_seconds: float = 0.0
    """Estimated time saved against plain decoding by the step-cost model."""


class SequenceOutput(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one step brought for one sequence."""

    request_id: str
    token_ids: list[int] = []
    sources: list[str] = []
    """For each token the proposer that guessed it, or "target"."""
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    """Of prompt tokens 1 … n-1 (the first has none), in the output that completes the prompt."""
    finish_reason: str | None = None
    """"stop", "length" or "abort"."""
    stop_token_id: int | None = None
    """The token that stopped it, when one did. It is the last of `token_ids`."""
    metrics: RequestMetrics | None = None
    """With the finish reason."""


class StepOutputs(msgspec.Struct, frozen=True, tag="step"):
    """One step's outputs, all sequences together."""

    outputs: list[SequenceOutput]


class Rejected(msgspec.Struct, frozen=True, kw_only=True, tag="rejected"):
    """The engine will not take a sequence: nothing of it was kept."""

    request_id: str
    code: str
    """"overloaded" (try again later), "draining", or "invalid"."""
    message: str
    param: str | None = None


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """The engine's gauges and monotone counters, at most a few times a second."""

    num_waiting: int
    num_running: int
    blocks_free: int
    blocks_cached: int
    blocks_in_use: int
    counters: dict[str, float]
    """Totals since start: steps, tokens, drafts, accepted, prefix hits, preemptions, aborts, …"""
    accepted_per_position: list[int]
    drafted_per_position: list[int]
    skipped_drafts: dict[str, int]
    step_seconds_buckets: list[int]
    """Cumulative counts of steps by duration; bounds are `STEP_SECONDS_BOUNDS`."""
    step_seconds_sum: float
    prefill_tokens_per_second: float = 0.0
    """Rows a second in recent steps that computed prompts; 0 before the first."""
    decode_tokens_per_second: float = 0.0
    """Tokens a second, of all sequences together, in recent steps without prompts."""


STEP_SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class BlocksChanged(msgspec.Struct, frozen=True, tag="blocks"):
    """Which prefix blocks the engine holds now and did not before, and the other way round. Sent behind steps."""

    stored: list[bytes]
    evicted: list[bytes]


class Alive(msgspec.Struct, frozen=True, tag="alive"):
    """The engine's process runs, even if nothing else was to be said for a while."""


Event = Loading | Ready | StepOutputs | Rejected | Stats | BlocksChanged | Alive
