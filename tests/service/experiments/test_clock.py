"""The clock of experiments while the machine's clock is set."""

from __future__ import annotations

import pytest

from service.experiments.clock import SteadyClock


class Machine:
    """A machine's two clocks."""

    def __init__(self) -> None:
        self.true = 1000.0
        self.offset = 0.0

    def wall(self) -> float:
        return self.true + self.offset

    def monotonic(self) -> float:
        return self.true


def seconds_of(clock: SteadyClock, machine: Machine, seconds: float) -> float:
    """How far the clock goes while so much time passes, asked twice a second."""
    before = clock()
    for _ in range(int(2 * seconds)):
        machine.true += 0.5
        later = clock()
        assert later >= before
    return later - before


@pytest.mark.parametrize("step", [3600.0, -3600.0])
def test_a_step_neither_ends_nor_freezes_what_is_timed(step: float) -> None:
    """A minute stays a minute, give or take a tenth, and once the machine is right again so is the clock."""
    machine = Machine()
    clock = SteadyClock(machine.wall, machine.monotonic)
    assert seconds_of(clock, machine, 60) == pytest.approx(60)
    machine.offset = step
    assert seconds_of(clock, machine, 60) == pytest.approx(60, abs=6.01)
    machine.offset = 0.0
    seconds_of(clock, machine, 120)
    assert clock() == pytest.approx(machine.wall(), abs=0.01)


def test_a_machine_whose_clock_was_wrong_at_the_start_is_followed() -> None:
    """A clock that is set right for good is reached, and small corrections are followed at once."""
    machine = Machine()
    machine.offset = -3600.0
    clock = SteadyClock(machine.wall, machine.monotonic)
    machine.offset = 0.0
    seconds_of(clock, machine, 11 * 3600)
    assert clock() == pytest.approx(machine.wall())
    machine.offset = 0.4
    assert clock() == pytest.approx(machine.wall())
