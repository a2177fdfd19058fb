"""A schedule is its rows: one a rank. Everything else about it follows from them."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Set
from fractions import Fraction
from functools import cached_property
from itertools import starmap
from operator import itemgetter

from minipipe.actions import KINDS, MOST, Action, ScheduleError

# Rows can be long: what follows from them is read with these, without a loop in Python, and
# where one reading follows another, block by block, so that the cache still has the actions.
_STAGE, _KIND, _MICROBATCH, _OVERLAPPED = map(itemgetter, range(4))
KIND_AND_STAGE = itemgetter(1, 0)
_BLOCK = 2048
_UNORDERED = (str, bytes, Mapping, Set)  # what is no list of actions
_CELL = re.compile(r"\([^)]*\)\w*|[^\s,]+")


def _last(block: tuple) -> int | None:
    """The last micro-batch of some plain actions, or None if not all are such."""
    if {*map(type, block)} != {Action}:
        return None
    stages, kinds, microbatches = ([*map(of, block)] for of in (_STAGE, _KIND, _MICROBATCH))
    plain = (
        {*map(type, stages), *map(type, microbatches)} == {int} and {*map(type, kinds)} == {str}
        and {*kinds} <= KINDS.keys() and 0 <= min(stages) <= max(stages) <= MOST
        and 0 <= min(microbatches) <= max(microbatches) <= MOST
        and [*map(_OVERLAPPED, block)].count(None) == len(block)
    )  # fmt: skip
    return max(microbatches) if plain else None


def _row(number: int, cells) -> tuple[tuple[Action, ...], int | None]:
    """One row of actions from actions or their text, and its last micro-batch (None if there are
    pairs in it); names the place of what is neither."""
    if isinstance(cells, _UNORDERED) or not isinstance(cells, Iterable):
        raise ScheduleError(f"row {number} must be a list of actions, not {cells!r:.40}")
    row, last = tuple(cells), -1
    for begin in range(0, len(row), _BLOCK):
        found = _last(row[begin : begin + _BLOCK])
        if found is None:
            break
        last = max(last, found)
    else:
        return row, last
    actions: list[Action] = []
    for cell in row:
        try:
            actions.append(Action.parse(str(cell) if isinstance(cell, Action) else cell))
        except ScheduleError as error:
            raise ScheduleError(f"row {number}, place {len(actions)}: {error}") from None
    pairs = any(map(_OVERLAPPED, actions))
    return tuple(actions), None if pairs else max(map(_MICROBATCH, actions), default=-1)


class Schedule:
    """The rows of actions, one a rank, in the order in which that rank runs them.

    rows: an iterable of iterables of `Action` or of their text form. `name` is only a label:
    two schedules are equal when their rows are.
    """

    def __init__(self, rows: Iterable[Iterable[Action | str]], name: str = ""):
        if isinstance(rows, _UNORDERED) or not isinstance(rows, Iterable):
            raise ScheduleError("rows must be lists of actions; Schedule.parse reads text")
        read = [*starmap(_row, enumerate(rows))]
        self.rows: tuple[tuple[Action, ...], ...] = tuple(row for row, _ in read)
        self._last = [last for _, last in read]
        self.name = name
        if not any(self.rows):
            raise ScheduleError("the schedule has no actions")

    @classmethod
    def parse(cls, text: str, name: str = "") -> "Schedule":
        """Read rows from text: cells apart by blanks or commas, `#` starts a comment, `-` is a
        row without actions. Raises ScheduleError with row and place of what can't be read."""
        if not isinstance(text, str):
            raise TypeError(f"Schedule.parse reads text, not {type(text).__name__}")
        lines = (line.split("#")[0] for line in text.removeprefix("\ufeff").splitlines())
        rows = [_CELL.findall(line) for line in lines if line.strip()]
        return cls([cells if cells != ["-"] else [] for cells in rows], name)

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
        unknown = sorted(self._kinds & {*"RU"})
        if unknown:
            raise ScheduleError(f"torch has no action {' or '.join(unknown)}: nothing is written")
        if self.copies:
            raise ScheduleError(f"torch can't hold copies of a stage (here of {self.copies}): "
                                "nothing is written")  # fmt: skip
        cells = ([f"{a}OVERLAP_F_B" if a.overlapped else str(a) for a in row] for row in self.rows)
        return "".join((",".join(row) or ",") + "\n" for row in cells)

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
        if not self.has_pairs:
            return 1 + max(self._last)
        return 1 + max(max(map(_MICROBATCH, row)) for row in self.parts if row)

    @cached_property
    def has_pairs(self) -> bool:
        """Whether there are overlapped pairs."""
        return None in self._last

    @cached_property
    def parts(self) -> tuple[tuple[Action, ...], ...]:
        """The rows with every pair cut into its forward and its backward."""
        if not self.has_pairs:
            return self.rows
        return tuple(tuple(part for action in row for part in action.parts) for row in self.rows)

    @cached_property
    def counts(self) -> tuple[Counter[tuple[str, int]], ...]:
        """For every rank how many actions of each kind and stage its row has."""
        return tuple(Counter(map(KIND_AND_STAGE, row)) for row in self.parts)

    @cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset(kind for count in self.counts for kind, _ in count)

    @cached_property
    def holders(self) -> dict[int, tuple[int, ...]]:
        """For every stage in the table the ranks whose rows have it."""
        ranks: dict[int, list[int]] = {}
        for rank, count in enumerate(self.counts):
            for stage in {stage for _, stage in count}:
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
