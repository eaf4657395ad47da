"""Traces of production traffic: when requests came, how long they were, and how long their answers.

The format is that of the Azure LLM inference traces of 2023 (Patel et al., Splitwise, ISCA 2024): CSV with the columns
TIMESTAMP, ContextTokens and GeneratedTokens.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class TracedRequest(NamedTuple):
    """One request."""

    at: float
    """Seconds after the trace's first."""
    num_prompt_tokens: int
    num_output_tokens: int


def read_trace(path: Path) -> list[TracedRequest]:
    """The requests of a file in order of arrival. Raises ValueError naming the line that cannot be read."""
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} has no column {', '.join(missing)}; a trace has {', '.join(COLUMNS)}")
        rows = [_row(path, reader.line_num, row) for row in reader]
    if not rows:
        raise ValueError(f"{path} has no requests")
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    return [TracedRequest((at - first).total_seconds(), context, generated) for at, context, generated in rows]


def _row(path: Path, number: int, row: dict[str, str]) -> tuple[datetime, int, int]:
    try:
        at, context, generated = (row[name] for name in COLUMNS)
        return datetime.fromisoformat(at), int(context), int(generated)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}, line {number}: {error}; a line is a time and two numbers of tokens") from error


def schedule(
    trace: Sequence[TracedRequest],
    *,
    scale: float,
    length_scale: float,
    max_context: int,
    limit: int | None,
    max_seconds: float,
) -> list[TracedRequest]:
    """The trace as it is replayed: `scale` times as fast, lengths times `length_scale`, cut to what fits.

    At most `limit` requests, and those alone that arrive within `max_seconds`. Answers keep their length before
    prompts do; both have at least one token, and together at most `max_context`. Raises ValueError for a scale or a
    context that is not positive.
    """
    for name, value, least in (("scale", scale, 0), ("length_scale", length_scale, 0), ("max_context", max_context, 1)):
        if not value > least:
            raise ValueError(f"{name} is {value}; it must be above {least}")
    replayed = (request._replace(at=request.at / scale) for request in trace[:limit])
    return list(_fitting((request for request in replayed if request.at <= max_seconds), length_scale, max_context))


def _fitting(trace: Iterable[TracedRequest], length_scale: float, max_context: int) -> Iterable[TracedRequest]:
    for at, num_prompt_tokens, num_output_tokens in trace:
        output = min(max(round(num_output_tokens * length_scale), 1), max_context - 1)
        prompt = min(max(round(num_prompt_tokens * length_scale), 1), max_context - output)
        yield TracedRequest(at, prompt, output)
