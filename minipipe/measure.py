"""Two sides measured in one run, in turns: medians, and their ratio."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median

REPEATS = 21
LIMIT = 240.0  # seconds that one launch may take
TORCH = "torch.distributed.pipelining"


@dataclass(frozen=True)
class Case:
    """Medians of one benchmark's two sides in `unit`, and their ratio."""

    name: str
    case: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    peer: str

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line of text."""
        return (f"{self.name:<18}{self.case:<34}{self.ours:>12.4g} {self.unit:<10}"
                f"{self.peer} {self.theirs:.4g}: ratio {self.ratio:.3f}")  # fmt: skip


def case(name: str, what: str, ours: list[float], theirs: list[float], unit: str,
          peer: str) -> Case:  # fmt: skip
    """The medians of both sides, whose repetitions took turns."""
    return Case(name, what, median(ours), median(theirs), unit,
                median(ours) / median(theirs), peer)  # fmt: skip


def in_turns(repeats: int, *sides: Callable[[], object]) -> list[list[float]]:
    """Seconds of each side in each repetition, one after the other; the first is not counted. All
    ranks start at the same moment, which rank 0 names."""
    import torch
    import torch.distributed as dist

    times: list[list[float]] = [[] for _ in sides]
    for repetition in range(repeats + 1):
        for side, measured in zip(sides, times, strict=True):
            dist.barrier()
            moment = torch.tensor([time.perf_counter() + 0.01], dtype=torch.float64)
            dist.broadcast(moment, 0)
            start = float(moment)
            time.sleep(max(0.0, start - time.perf_counter()))
            side()
            if repetition:
                measured.append(time.perf_counter() - start)
    return times


def slowest(results: list[list[list[float]]]) -> list[list[float]]:
    """A step lasts until its slowest rank is done: from [rank][side][repetition]."""
    sides = zip(*results, strict=True)
    return [[max(times) for times in zip(*side, strict=True)] for side in sides]
