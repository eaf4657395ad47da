"""A request's part in an experiment: from its assignment to what became of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from service.engine_client import EngineRejectedError, EngineUnavailableError
from service.experiments.manager import Assignment, Experiments
from service.experiments.tally import Outcome
from service.request_metrics import Timing


class Participation:
    """One request. Made by `taking_part`, which counts it when it has ended."""

    def __init__(self, assignment: Assignment | None) -> None:
        self.assignment = assignment
        """None for a request that takes part in no experiment."""
        self.outcome: Outcome | None = Outcome(status="aborted")
        """Until something else is known, the client has left. None is not counted."""

    @property
    def headers(self) -> Mapping[str, str]:
        """What the response says of it."""
        return {} if self.assignment is None else self.assignment.headers

    def finish(self, timing: Timing) -> None:
        """The request was answered to its end."""
        self.outcome = Outcome(
            status="finished",
            num_output_tokens=timing.tokens,
            ttft_seconds=timing.ttft,
            latency_seconds=timing.end_to_end,
        )


@contextmanager
def taking_part(experiments: Experiments, assignment: Assignment | None) -> Iterator[Participation]:
    """A request while it runs; on leaving it is counted as finished, failed or aborted.

    A request that the engine finds invalid is its client's mistake, and not counted.
    """
    part = Participation(assignment)
    try:
        yield part
    except EngineRejectedError as error:
        part.outcome = None if error.rejected.code == "invalid" else Outcome(status="failed")
        raise
    except EngineUnavailableError:
        part.outcome = Outcome(status="failed")
        raise
    except OSError:  # the connection to the client: it has left, or takes nothing
        raise
    except Exception:
        part.outcome = Outcome(status="failed")
        raise
    finally:
        if assignment is not None and part.outcome is not None:
            experiments.observe(assignment, part.outcome)
