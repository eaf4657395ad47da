"""Guesses of a head behind its own guesses, without leaving the native call: a chain, and what stands beside it.

A level's candidates are the `width` likeliest columns of each row's logits. The likeliest of them becomes the next
pair's token, and the output at its row that pair's feature.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from target.native.attention_tiles import TILE
from target.native.choice_lanes import first_lane, lanes_at_least
from target.native.choosing import noise_of
from target.native.compiling import native
from target.native.rows import copy, normalise
from target.native.threads import take_task
from target.native.vectors import (
    broadcast,
    exponential,
    keep_first,
    load,
    load_float,
    load_integer,
    store_float,
    store_integer,
    sum_lanes,
)

Record = Any

OUTSTANDING = np.float32(8)
"""One token in 3,000 has a noise above this."""
LOWEST = np.float32(-4)
"""Of the scores that may be among the best: those without noise are 0 at most, and of a few tokens some have some."""


class GuessRecord(NamedTuple):
    """What is to be guessed behind S sequences, of each of which one row's logits are wanted. Addresses of int64s."""

    num_levels: int
    """The most that any sequence may have; 0: only logits and outputs are wanted."""
    num_sequences: int
    width: int
    """Candidates of a level."""
    num_columns: int
    """Of the logits, C."""
    target_ids: int
    """[C] the target's id of each column."""
    depths: int
    """[S] levels wanted."""
    min_chances: int
    """[S] floats: behind a path less likely than this nothing is guessed."""
    temperatures: int
    """[S] floats; 0: the likeliest is chosen, else noise is added to the logits over this."""
    keys: int
    """[num_levels, S] of the noise of each place."""
    stops: int
    """Token ids behind which nothing is guessed: of sequence s those in [stop_starts[s], stop_starts[s + 1])."""
    stop_starts: int
    norms_output: int
    """Whether it is the normalised output that goes on as a feature."""
    token_ids: int
    """[num_levels, S, width] the candidates, likeliest first."""
    chances: int
    """[num_levels, S, width] floats: how likely each is behind the path that it extends, with the noise if any."""
    counts: int
    """[S] levels guessed."""
    reached: int
    """[S] floats: how likely the path so far is."""
    rows: int
    """[S] the sequence of each row of the level that is being guessed."""


@native
def rank_rows(model: Record, batch: Record, guess: Record, level: int, thread: int) -> None:
    """The candidates of each row of a level; a task is a row."""
    while True:
        row = take_task(model.control, thread, model.num_threads, batch.num_logits)
        if row < 0:
            return
        sequence = load_integer(64, guess.rows + 8 * row)
        place = level * guess.num_sequences + sequence
        token_ids, chances = guess.token_ids + 8 * guess.width * place, guess.chances + 4 * guess.width * place
        logits = batch.logits + batch.logits_stride * row
        _best_columns(logits, guess.num_columns, guess.width, token_ids, chances)
        temperature = load_float(guess.temperatures + 4 * sequence)
        if temperature > 0:
            key = np.uint64(load_integer(64, guess.keys + 8 * place))
            _best_with_noise(logits, guess, temperature, key, token_ids, chances)
            total = 0.0
            for i in range(guess.width):
                total += math.exp(load_float(chances + 4 * i) - load_float(chances))
        else:
            total = _mass(logits, guess.num_columns, load_float(chances))
        peak = load_float(chances)
        for i in range(guess.width):
            column = load_integer(64, token_ids + 8 * i)
            store_integer(token_ids + 8 * i, load_integer(64, guess.target_ids + 8 * column))
            store_float(chances + 4 * i, np.float32(math.exp(load_float(chances + 4 * i) - peak) / total))


@native
def _best_with_noise(logits: int, guess: Record, temperature: float, key: int, columns: int, values: int) -> None:
    """Replace the candidates by those with the highest scores, logit over temperature plus noise.

    Only of tokens that an outstanding noise could lift among them, which most are not.
    """
    peak, last = load_float(values) / temperature, values + 4 * (guess.width - 1)
    for i in range(guess.width):
        store_float(values + 4 * i, np.float32(-np.inf))
    for start in range(0, guess.num_columns, 16):
        chunk = keep_first(load(logits + 4 * start), guess.num_columns - start, np.float32(-np.inf))
        bound = max(load_float(last), LOWEST) - OUTSTANDING
        lanes = lanes_at_least(chunk / broadcast(temperature) - broadcast(peak), broadcast(bound))
        while lanes:
            column = start + first_lane(lanes)
            lanes &= lanes - 1
            noise = noise_of(key, load_integer(64, guess.target_ids + 8 * column))
            score = np.float32(load_float(logits + 4 * column) / temperature - peak + noise)
            if score > load_float(last):
                _insert(column, score, guess.width, columns, values)


@native
def _best_columns(logits: int, size: int, width: int, columns: int, values: int) -> None:
    """The `width` largest of `size` floats, largest first and of equal ones the first, and where they stand."""
    for i in range(width):
        store_integer(columns + 8 * i, 0)
        store_float(values + 4 * i, np.float32(-np.inf))
    last = values + 4 * (width - 1)
    for start in range(0, size, 16):
        chunk = keep_first(load(logits + 4 * start), size - start, np.float32(-np.inf))
        lanes = lanes_at_least(chunk, broadcast(load_float(last)))
        while lanes:
            column = start + first_lane(lanes)
            lanes &= lanes - 1
            value = load_float(logits + 4 * column)
            if column < size and value > load_float(last):
                _insert(column, value, width, columns, values)


@native
def _insert(column: int, value: float, width: int, columns: int, values: int) -> None:
    i = width - 1
    while i > 0 and value > load_float(values + 4 * (i - 1)):
        store_integer(columns + 8 * i, load_integer(64, columns + 8 * (i - 1)))
        store_float(values + 4 * i, load_float(values + 4 * (i - 1)))
        i -= 1
    store_integer(columns + 8 * i, column)
    store_float(values + 4 * i, value)


@native
def _mass(logits: int, size: int, peak: float) -> float:
    """The sum of e^(logit - peak)."""
    peaks, total = broadcast(peak), broadcast(np.float32(0))
    for start in range(0, size, 16):
        chunk = keep_first(load(logits + 4 * start), size - start, np.float32(-np.inf))
        total = total + exponential(chunk - peaks)
    return np.float64(sum_lanes(total))


@native
def go_on(model: Record, batch: Record, guess: Record, level: int) -> None:
    """Make a batch of the likeliest candidates of `level` behind which to guess; without rows if there are none.

    For one thread. Rows only move towards the front, so none is overwritten before it has been read.
    """
    count, size = 0, model.hidden_size
    for i in range(batch.num_logits):
        sequence = load_integer(64, guess.rows + 8 * i)
        if not _is_worth_more(guess, level, sequence):
            continue
        source = load_integer(64, batch.logit_rows + 8 * i)
        out = batch.hidden + 4 * size * count
        if guess.norms_output != 0:
            normalise(batch.hidden + 4 * size * source, model.norm, size, model.eps, out)
        elif source != count:
            copy(batch.hidden + 4 * size * source, size, out)
        start = load_integer(64, batch.num_computed + 8 * i) + load_integer(64, batch.chain_lens + 8 * i)
        place = level * guess.num_sequences + sequence
        store_integer(batch.token_ids + 8 * count, load_integer(64, guess.token_ids + 8 * guess.width * place))
        _place(batch, i, count, start)
        store_integer(guess.rows + 8 * count, sequence)
        count += 1
    store_integer(batch.row_starts + 8 * count, count)
    batch.num_rows = batch.num_logits = batch.num_sequences = count


@native
def _is_worth_more(guess: Record, level: int, sequence: int) -> bool:
    """Note the level of a sequence; whether there is to be another."""
    place = level * guess.num_sequences + sequence
    reached = load_float(guess.reached + 4 * sequence) * load_float(guess.chances + 4 * guess.width * place)
    store_float(guess.reached + 4 * sequence, reached)
    store_integer(guess.counts + 8 * sequence, level + 1)
    is_deep = level + 1 >= load_integer(64, guess.depths + 8 * sequence)
    is_unlikely = reached < load_float(guess.min_chances + 4 * sequence)
    return not (is_deep or is_unlikely or _is_stop(guess, sequence, guess.token_ids + 8 * guess.width * place))


@native
def _is_stop(guess: Record, sequence: int, place: int) -> bool:
    """Whether nothing is guessed behind the token at `place`."""
    i, last = load_integer(64, guess.stop_starts + 8 * sequence), load_integer(64, guess.stop_starts + 8 * sequence + 8)
    while i < last and load_integer(64, guess.stops + 8 * i) != load_integer(64, place):
        i += 1
    return i < last


@native
def _place(batch: Record, i: int, row: int, start: int) -> None:
    """Row `row` is what follows sequence i of the batch, at position `start`, alone."""
    store_integer(batch.positions + 8 * row, start)
    store_integer(batch.num_computed + 8 * row, start)
    store_integer(batch.chain_lens + 8 * row, 1)
    store_integer(batch.row_starts + 8 * row, row)
    store_integer(batch.tree_masks + 8 * row, 0)
    store_integer(batch.logit_rows + 8 * row, row)
    table, source = batch.tables + 8 * batch.table_width * row, batch.tables + 8 * batch.table_width * i
    for j in range(batch.table_width if i != row else 0):
        store_integer(table + 8 * j, load_integer(64, source + 8 * j))
    slot = load_integer(64, table + 8 * (start // TILE)) * TILE + start % TILE
    store_integer(batch.slots + 8 * row, slot)
