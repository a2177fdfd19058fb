"""A schedule is its rows: one a rank. Everything else about it follows from them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction
from functools import cached_property

from minipipe.actions import Action, ScheduleError

_CELL = re.compile(r"\([^)]*\)\w*|[^\s,]+")


class Schedule:
    """The rows of actions, one a rank, in the order in which that rank runs them.

    rows: an iterable of iterables of `Action` or of their text form. `name` is only a label:
    two schedules are equal when their rows are.
    """

    def __init__(self, rows: Iterable[Iterable[Action | str]], name: str = ""):
        self.rows: tuple[tuple[Action, ...], ...] = tuple(
            tuple(a if isinstance(a, Action) else Action.parse(a) for a in row) for row in rows
        )
        self.name = name
        if not any(self.rows):
            raise ScheduleError("the schedule has no actions")

    @classmethod
    def parse(cls, text: str, name: str = "") -> Schedule:
        """Read rows from text: cells apart by blanks or commas, `#` starts a comment, `-` is a
        row without actions. Raises ScheduleError with row and place of what can't be read."""
        rows = []
        for line in text.splitlines():
            line = line.split("#", 1)[0].strip()
            if not line:
                continue
            row: list[Action] = []
            for cell in _CELL.findall(line) if line != "-" else ():
                try:
                    row.append(Action.parse(cell))
                except ScheduleError as error:
                    raise ScheduleError(f"row {len(rows)}, place {len(row)}: {error}") from None
            rows.append(row)
        return cls(rows, name)

    def __str__(self) -> str:
        return "\n".join(" ".join(map(str, row)) or "-" for row in self.rows)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"Schedule({name}{self.ranks} ranks, {self.microbatches} micro-batches)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schedule) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    def to_csv(self) -> str:
        """The rows as `torch.distributed.pipelining` reads them with its `_load_csv`.

        Raises ScheduleError for what torch can't express: R, U and copies of stages.
        """
        unknown = sorted({a.kind for row in self.rows for pair in row for a in pair.parts} & {*"RU"})
        if unknown:
            raise ScheduleError(f"torch has no action {' or '.join(unknown)}: nothing is written")
        if self.copies:
            raise ScheduleError(
                f"torch can't hold copies of a stage (here of {self.copies}): nothing is written"
            )
        cells = ([f"{a}OVERLAP_F_B" if a.overlapped else str(a) for a in row] for row in self.rows)
        return "".join(",".join(row) + "\n" for row in cells)

    @property
    def ranks(self) -> int:
        """Number of rows."""
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """Number of stages of the model, copies not counted."""
        return 1 + max(self.holders)

    @cached_property
    def microbatches(self) -> int:
        """Number of micro-batches: one more than the largest number in the table."""
        largest = 0
        for row in self.rows:
            for _, _, microbatch, overlapped in row:
                if microbatch > largest:
                    largest = microbatch
                if overlapped is not None and overlapped.microbatch > largest:
                    largest = overlapped.microbatch
        return largest + 1

    @cached_property
    def _kinds(self) -> frozenset[str]:
        kinds = {action[1] for row in self.rows for action in row}
        return frozenset(kinds | {"B"} if self.has_pairs else kinds)

    @cached_property
    def has_pairs(self) -> bool:
        """Whether there are overlapped pairs."""
        return any(action[3] is not None for row in self.rows for action in row)

    @cached_property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """For every stage in the table the ranks whose rows have it."""
        ranks: dict[int, list[int]] = {}
        for rank, row in enumerate(self.rows):
            stages = {action[0] for action in row}
            if self.has_pairs:
                stages |= {a.overlapped.stage for a in row if a.overlapped is not None}
            for stage in stages:
                ranks.setdefault(stage, []).append(rank)
        return {stage: tuple(ranks[stage]) for stage in sorted(ranks)}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank holds, ascending."""
        return tuple(stage for stage, ranks in self.holders.items() if rank in ranks)

    @cached_property
    def copies(self) -> tuple[int, ...]:
        """The stages that stand on more than one row."""
        return tuple(stage for stage, ranks in self.holders.items() if len(ranks) > 1)

    @property
    def parameter_copies(self) -> int | Fraction:
        """The most that a rank holds of the model's parameters, in whole shares of 1/ranks."""
        most = max(len(self.stages_of(rank)) for rank in range(self.ranks))
        share = Fraction(most * self.ranks, self.stages)
        return share.numerator if share.denominator == 1 else share

    @property
    def forward_only(self) -> bool:
        """Whether the table has neither B nor I nor W: only `evaluate` runs it."""
        return not self._kinds & {"B", "I", "W"}

    @property
    def asynchronous(self) -> bool:
        """Whether the table itself says when weights are updated (U)."""
        return "U" in self._kinds

    @property
    def splits_backward(self) -> bool:
        """Whether a backward pass is cut into I and W."""
        return bool(self._kinds & {"I", "W"})

    @property
    def recomputes(self) -> bool:
        """Whether activations are dropped and computed again (R)."""
        return "R" in self._kinds
