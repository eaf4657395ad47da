"""One forward of the whole model, as each of its threads runs it.

A layer is five phases with a barrier behind each: norm, query/key/value products, rotation and cache write; attention;
output product and residual; norm, gate and up products and activation; down product and residual. In a step of few
rows every thread normalises them all for itself, which is quicker than waiting for the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from target.native.attention import attend_rows, lay_units
from target.native.compiling import native
from target.native.phases import (
    embed_rows,
    norm_final,
    project_down,
    project_gate_up,
    project_head,
    project_output,
    project_qkv,
    save_features,
)
from target.native.threads import IDLE, STARTED, STOPPED, atomic_load, change, meet, wait_while

Record = Any


WAKE_ONLY = -1
"""Instead of a thread: start the workers without taking part, so that they see they are to stop."""


@native
def run(models: Record, layers: Record, batches: Record, thread: int) -> None:
    """Thread 0: one step, with the workers' help. Any other thread: every step, until the workers are told to stop.

    The first step must be one of a single thread, before there are workers: they wait for the second.
    """
    model = models[0]
    control = model.control
    if thread <= 0:
        change(control + STARTED, control + IDLE)
        if thread == 0:
            _forward(model, layers, batches[0], thread)
        return
    seen = np.int32(1)
    while True:
        wait_while(control + STARTED, seen, control + IDLE, model.spin_ticks)
        if atomic_load(control + STOPPED) != 0:
            return
        seen = atomic_load(control + STARTED)
        _forward(model, layers, batches[0], thread)


@native
def _forward(model: Record, layers: Record, batch: Record, thread: int) -> None:
    control, num_threads, spin = model.control, model.num_threads, model.spin_ticks
    if thread == 0:
        lay_units(model, batch)
    embed_rows(model, batch, thread)
    meet(control, num_threads, spin)
    for index in range(model.num_layers):
        layer = layers[index]
        save_features(model, batch, thread, index)
        project_qkv(model, layer, batch, thread)
        meet(control, num_threads, spin)
        attend_rows(model, layer, batch, thread)
        meet(control, num_threads, spin)
        project_output(model, layer, batch, thread)
        meet(control, num_threads, spin)
        project_gate_up(model, layer, batch, thread)
        meet(control, num_threads, spin)
        project_down(model, layer, batch, thread)
        meet(control, num_threads, spin)
    save_features(model, batch, thread, model.num_layers)
    norm_final(model, batch, thread)
    meet(control, num_threads, spin)
    project_head(model, batch, thread)
    meet(control, num_threads, spin)
