"""A report as people read it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.report import Report, Row, Service

HEAD = ("system", "method", "tokens/s", "TTFT ms", "accepted", "speed-up", "same ids")


def table(report: Report) -> str:
    """One block a category, then what the columns cannot hold."""
    return "\n".join(_lines(report))


def _lines(report: Report) -> Iterator[str]:
    widths = _widths([HEAD, *map(_cells, report.rows)])
    category = None
    for row in report.rows:
        if row.category != category:
            category = row.category
            yield f"\n{category}, prompts of {row.prompt_tokens:.0f} tokens at the median"
            yield _line(HEAD, widths)
        yield _line(_cells(row), widths)
    yield "\nPrecision:"
    for name, precision in dict.fromkeys((row.system, row.precision) for row in report.rows):
        yield f"  {name}: {precision}"
    yield from map(_service_line, report.service)
    yield f"All methods of forerun gave the same token ids: {_shown(report.exact)}"
    machine = report.machine
    yield f"Machine: {machine.processor}, {machine.cores} cores, {machine.memory_gib} GiB {' '.join(machine.gpus)}"
    yield f"Load before and after: {machine.load_average}, {report.machine_at_end.load_average}"


def _service_line(service: Service) -> str:
    share = service.front_core_share_at_500
    return (
        f"Service under {service.method}: {_shown(service.gap_ms, 2)} ms between arrivals, "
        f"{_shown(service.added_gap_ms, 2)} ms more than the engine alone; the front uses "
        f"{_shown(service.front_cpu_ms_per_token, 3)} ms of a core a token, "
        f"{_shown(None if share is None else 100.0 * share)} % of one at 500 tokens/s"
    )


def _cells(row: Row) -> tuple[str, ...]:
    return (
        row.system,
        row.method,
        _shown(row.tokens_per_second),
        _shown(row.ttft_ms),
        _shown(row.mean_acceptance_length, 2),
        _shown(row.speedup, 2),
        _shown(row.exact),
    )


def _shown(value: float | bool | None, digits: int = 1) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.{digits}f}"


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    pairs = list(zip(cells, widths, strict=True))
    words = [cell.ljust(width) for cell, width in pairs[:2]] + [cell.rjust(width) for cell, width in pairs[2:]]
    return "  " + "  ".join(words)
