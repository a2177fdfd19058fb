"""What a step or an evaluation gave: losses, and what all ranks measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from minipipe.engine.interpreter import Record
from minipipe.lower import lower
from minipipe.schedule import Schedule
from minipipe.timeline import Timeline, Waiting


@dataclass(frozen=True)
class Ledger:
    """Where a rank's time went, in seconds: computing, handing tensors over, or waiting."""

    compute: float
    transfer: float
    waiting: Waiting


@dataclass(frozen=True)
class StepResult:
    """What one step gave: the same on every rank, but for the two byte counts, which are this
    rank's own (`timeline` has those of all ranks).

    loss: of the whole batch, by rows. peak_activation_bytes: the most that autograd kept at once.
    bytes_sent: activations and gradients sent to other ranks, and what the sum over copies of a
    stage sends (`timeline.bytes_sent` has the messages alone, as a prediction does).
    """

    loss: float
    peak_activation_bytes: int
    bytes_sent: int
    _timeline: Callable[[], Timeline]

    @cached_property
    def timeline(self) -> Timeline:
        """When every rank did what, in seconds from the first start."""
        return self._timeline()

    @property
    def ledger(self) -> tuple[Ledger, ...]:
        """Each rank's time by what it went into; transfer is not counted as waiting."""
        timeline = self.timeline
        rows = zip(timeline.busy, timeline.transfers, timeline.waiting, strict=True)
        shares = [(busy, min(transfer, w.inside), w) for busy, transfer, w in rows]
        return tuple(
            Ledger(busy, transfer, Waiting(w.fill, w.inside - transfer, w.drain))
            for busy, transfer, w in shares
        )


@dataclass(frozen=True)
class Evaluation:
    """loss: of all rows, None without targets. outputs: in row order, on every rank."""

    loss: float | None
    outputs: torch.Tensor | tuple


def pack(schedule: Schedule, record: Record, loss: float, sent: int,
         metered: bool, offset: float = 0.0) -> torch.Tensor:  # fmt: skip
    """One rank's measurements as a float64 vector, of the same length on every rank; offset:
    seconds that rank 0's clock, which all times are given in, is ahead of this rank's."""
    longest = max(len(row) for row in schedule.rows)
    columns: list = [record.starts, record.ends]
    if offset:
        columns = [[time + offset for time in column] for column in columns]
    if metered:
        columns += [record.during, record.after]
    padded = [column + [0] * (longest - len(column)) for column in columns]
    own = [loss, sent, record.transfer, *(value for column in padded for value in column)]
    return torch.tensor(own, dtype=torch.float64)


def unpack(schedule: Schedule, everyone: torch.Tensor, rank: int, metered: bool,
           origin: str, summed: int = 0) -> StepResult:  # fmt: skip
    """The result on one rank from the vectors of all: [ranks, n]; summed: bytes that this rank
    sent for the sums over copies."""
    columns = everyone[:, 3:].reshape(schedule.ranks, 4 if metered else 2, -1)
    counts = [len(row) for row in schedule.rows]

    def timeline() -> Timeline:
        starts, ends = (
            [time for row, count in zip(columns[:, c].tolist(), counts, strict=True)
             for time in row[:count]]
            for c in (0, 1)
        )  # fmt: skip
        zero = min(starts)  # the first start of all is time 0
        levels = [[(0, 0)] * count for count in counts]
        if metered:
            levels = [list(zip(*row[:, :count].long().tolist(), strict=True))
                      for row, count in zip(columns[:, 2:], counts, strict=True)]  # fmt: skip
        return Timeline(
            schedule, [time - zero for time in starts], [time - zero for time in ends], levels,
            origin=origin, time_unit="s", memory_unit="bytes",
            bytes_sent=everyone[:, 1].long().tolist(), transfers=everyone[:, 2].tolist(),
            messages=lower(schedule).routes().total(),
        )  # fmt: skip

    peak = int(columns[rank, 2, : counts[rank]].max()) if metered and counts[rank] else 0
    sent = int(everyone[rank, 1]) + summed
    return StepResult(float(everyone[:, 0].sum()), peak, sent, timeline)
