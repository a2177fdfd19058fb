"""Is a table a legal schedule, and if not, why: in words that name row, place and action.

Rows and places are counted from 0, as ranks, stages and micro-batches are.
"""

from collections import Counter, defaultdict
from fractions import Fraction
from itertools import accumulate, pairwise, product
from typing import NamedTuple

from minipipe.actions import Action, ScheduleError
from minipipe.costs import Costs, Number, common_scale, decimal, exact, given, is_number
from minipipe.schedule import KIND_AND_STAGE, Schedule

_FEW = 8  # so many missing actions are named, the others are counted
# What has to stand before what, for one stage and micro-batch on its row.
_BEFORE = [("F", "B"), ("F", "I"), ("F", "R"), ("R", "B"), ("R", "I"), ("I", "W"), ("F", "W")]


class Problems(list):
    """What was found: place in the row, row, reason."""

    def add(self, row: int, place: int, reason: str) -> None:
        self.append((place, row, reason))

    def error(self) -> ScheduleError:
        """All reasons as one error, the earliest in the table first."""
        return ScheduleError(*dict.fromkeys(reason for _, _, reason in sorted(self)))


class _At(NamedTuple):
    """A single action and where it stands; the parts of a pair stand at one place."""

    action: Action
    row: int
    place: int

    def __str__(self) -> str:
        return f"row {self.row}, place {self.place} ({self.action})"


def check(schedule: Schedule, memory_limit: Number | None = None,
          costs: Costs | None = None) -> None:  # fmt: skip
    """Raise ScheduleError with every independent reason why the rows are not a legal schedule.

    memory_limit: what a rank may hold at most, in whole-share micro-batches (sizes from `costs`).
    """
    costs = given(schedule, costs)
    if memory_limit is not None and not (is_number(memory_limit) and memory_limit >= 0):
        raise TypeError(f"memory_limit must be a number, at least 0, not {memory_limit!r}")
    found = problems(schedule)
    if memory_limit is not None and len(schedule.holders) == schedule.stages:
        _over_limit(schedule, decimal(memory_limit), costs, found)
    if found:
        raise found.error()


def problems(schedule: Schedule) -> Problems:
    """Everything wrong with the rows: what is missing, doubled, apart, too early, or stuck."""
    found = Problems()
    places: dict[tuple[int, int], list[_At]] = defaultdict(list)
    for row, actions in enumerate(schedule.rows):
        for place, action in enumerate(actions):
            for part in action.parts:
                places[part.stage, part.microbatch].append(_At(part, row, place))
            other = action.overlapped
            if other is not None and other.microbatch == action.microbatch:
                found.add(row, place, f"row {row}, place {place} {action}: a pair is a forward and "
                          "a backward of different micro-batches")  # fmt: skip
    _missing_numbers(schedule, places, found)
    for at in places.values():
        _one_stage_and_microbatch(at, found)
    _uneven_copies(schedule, found)
    makers = {(a.action.stage, a.action.microbatch, a.action.kind in "BI"): a for at in
              places.values() for a in reversed(at) if a.action.kind in "FBI"}  # fmt: skip
    waits = _waits(schedule, places, makers, found)
    _updates(schedule, found)
    _stuck(schedule, waits, found)
    return found


def _missing_numbers(schedule: Schedule, places, found: Problems) -> None:
    """Whole stages and micro-batches that don't occur, then single actions."""
    seen = sorted({microbatch for _, microbatch in places})
    for what, numbers in (("stage", schedule.holders), ("micro-batch", seen)):
        for low, high in pairwise([-1, *numbers]):
            lost = f"{what} {low + 1} is" if high == low + 2 else (
                f"{what.replace('batch', 'batche')}s {low + 1} to {high - 1} are")  # fmt: skip
            if high > low + 1:
                found.add(0, 0, f"{lost} in no row, though {what} {high} is")
    if len(schedule.holders) * len(seen) > 10 * len(places) + 1000:
        found.add(0, 0, f"of {len(schedule.holders)} stages with {len(seen)} micro-batches only "
                  f"{len(places)} are in the table")  # fmt: skip
        return
    missing: dict[tuple, list[int]] = defaultdict(list)
    for (stage, rows), microbatch in product(schedule.holders.items(), seen):
        at = places.get((stage, microbatch), ())
        for kind, because in _missing_kinds({a.action.kind for a in at}, schedule.forward_only):
            missing[at[0].row if at else rows[0], stage, kind, because].append(microbatch)
    for (row, stage, kind, because), lost in missing.items():
        names = ", ".join(f"{stage}{kind}{m}" for m in lost[:_FEW])
        more = f" and {len(lost) - _FEW} more" if len(lost) > _FEW else ""
        found.add(row, len(schedule.rows[row]), f"row {row}: {names}{more} "
                  f"{'is' if len(lost) == 1 else 'are'} missing ({because})")  # fmt: skip


def _one_stage_and_microbatch(at: list[_At], found: Problems) -> None:
    """The actions of one stage and micro-batch: each once, on one row, in order."""
    first: dict[str, _At] = {}
    for here in at:
        kind = here.action.kind
        if kind == "U":
            continue
        if kind in first:
            found.add(here.row, here.place, f"{here}: stands twice, first at {first[kind]}")
            continue
        first[kind] = here
        start = at[0]
        if here.row != start.row:
            found.add(here.row, here.place, f"{here}: stands apart from {start}; one rank does "
                      "all of one stage and micro-batch")  # fmt: skip
    for before, after in _BEFORE:
        one, two = first.get(before), first.get(after)
        if one and two and one.row == two.row and one.place >= two.place:
            found.add(two.row, two.place, f"{two}: stands before its {one.action}, which comes "
                      f"at place {one.place}")  # fmt: skip
    if "B" in first:
        for half in first.keys() & {"I", "W"}:
            here = first[half]
            found.add(here.row, here.place, f"{here}: {first['B'].action} already is the whole "
                      "backward pass; write either B, or I and W")  # fmt: skip


def _missing_kinds(kinds: set[str], forward_only: bool) -> list[tuple[str, str]]:
    missing = []
    if "F" not in kinds:
        missing.append(("F", "every micro-batch goes forward through every stage"))
    if not forward_only and not kinds & {"B", "I", "W"}:
        missing.append(("B", "without its backward pass a stage lacks a gradient"))
    if "I" in kinds and "W" not in kinds:
        missing.append(("W", "there is an I, so the weights still lack their gradient"))
    if "W" in kinds and "I" not in kinds and "B" not in kinds:
        missing.append(("I", "there is a W, which follows on an I"))
    if forward_only and "R" in kinds:
        missing.append(("B", "there is an R, which computes again for a backward pass"))
    return missing


def _uneven_copies(schedule: Schedule, found: Problems) -> None:
    usual = Counter(map(len, schedule.holders.values())).most_common(1)[0][0]
    for stage, ranks in schedule.holders.items():
        if len(ranks) != usual:
            found.add(ranks[-1], 0, f"stage {stage} stands on {len(ranks)} rows "
                      f"({', '.join(map(str, ranks))}), other stages on {usual}")  # fmt: skip


def _waits(schedule: Schedule, places, makers, found: Problems) -> dict[tuple[int, int], list]:
    """What every place waits for on other rows; a wait for a later place on the same row is
    a problem of its own."""
    waits: dict[tuple[int, int], list[_At]] = defaultdict(list)
    for at in places.values():
        for here in at:
            stage, kind, microbatch, _ = here.action
            if kind == "F" and stage:
                maker = makers.get((stage - 1, microbatch, False))
            elif kind in "BI" and stage < schedule.stages - 1:
                maker = makers.get((stage + 1, microbatch, True))
            else:
                continue
            if maker is None:
                continue  # reported as missing
            if maker.row != here.row:
                waits[here.row, here.place].append(maker)
            elif maker.place >= here.place:
                found.add(here.row, here.place, f"{here}: waits for {maker.action}, which comes "
                          f"later on the same rank, at place {maker.place}")  # fmt: skip
    return waits


def _updates(schedule: Schedule, found: Problems) -> None:
    """U stands behind all gradients that it applies, each later U applies more, all are applied."""
    for row, actions in enumerate(schedule.parts if schedule.asynchronous else ()):
        todo: dict[int, list[int]] = defaultdict(list)
        for stage, kind, microbatch, _ in sorted(actions, reverse=True):
            if kind in "BW":
                todo[stage].append(microbatch)
        done = set()
        places = (place for place, pair in enumerate(schedule.rows[row]) for _ in pair.parts)
        for place, (stage, kind, microbatch, _) in zip(places, actions, strict=True):
            if kind in "BW":
                done.add((stage, microbatch))
            if kind != "U":
                continue
            due = []
            while todo[stage] and todo[stage][-1] <= microbatch:
                due.append(todo[stage].pop())
            late = [m for m in due if (stage, m) not in done]
            here = f"row {row}, place {place} ({stage}U{microbatch})"
            if stage in schedule.copies:
                found.add(row, place, f"{here}: stage {stage} stands on several rows; copies that "
                          "are updated at times of their own would differ")  # fmt: skip
            elif late:
                found.add(row, place, f"{here}: the gradient of micro-batch {late[0]} is not there "
                          "yet")  # fmt: skip
            elif microbatch not in due:
                found.add(row, place, f"{here}: there is no gradient of micro-batch {microbatch} "
                          "that an earlier U has not applied")  # fmt: skip
        for stage, left in todo.items():
            if left:
                found.add(row, len(schedule.rows[row]), f"row {row}: no U of stage {stage} applies "
                          f"micro-batch {left[0]}")  # fmt: skip


def _stuck(schedule: Schedule, waits, found: Problems) -> None:
    """Run the rows in any order that the waits allow; who can't go on is in a cycle or behind."""
    at = [0] * schedule.ranks
    moved = True
    while moved:
        moved = False
        for row, actions in enumerate(schedule.rows):
            while at[row] < len(actions) and all(
                maker.place < at[maker.row] for maker in waits.get((row, at[row]), ())
            ):
                at[row] += 1
                moved = True
    stuck = {row: next(m for m in waits[row, at[row]] if m.place >= at[m.row])
             for row in range(schedule.ranks) if at[row] < len(schedule.rows[row])}  # fmt: skip
    seen: set[int] = set()
    for row in stuck:
        path = []
        while row not in seen:
            seen.add(row)
            path.append(row)
            row = stuck[row].row
        if row not in path:
            continue  # not in the cycle, but behind it
        cycle = path[path.index(row):]
        if any((at[r], r) == known[:2] for r in cycle for known in found):
            continue  # no reason of its own
        cycle = cycle[cycle.index(min(cycle)):] + cycle[:cycle.index(min(cycle))]
        lines = [f"{_At(schedule.rows[r][at[r]], r, at[r])} waits for {stuck[r].action} at row "
                 f"{stuck[r].row}, place {stuck[r].place}" for r in cycle]  # fmt: skip
        first = min(cycle, key=lambda r: (at[r], r))
        found.add(first, at[first], "deadlock, each waits for the next: " + "; ".join(lines))


def _over_limit(schedule: Schedule, limit: Number, costs: Costs, found: Problems) -> None:
    for row, levels in enumerate(memory_levels(schedule, costs)):
        for place, (during, _) in enumerate(levels):
            if during > limit:
                here = _At(schedule.rows[row][place], row, place)
                found.add(row, place, f"{here}: rank {row} then holds {during} micro-batches' "
                          f"activations, the limit is {limit}")  # fmt: skip
                break


def _changes(schedule: Schedule, costs: Costs) -> tuple[dict[tuple[str, int], Number], int]:
    """By how much an action of a kind and stage changes what its rank keeps ("again": a forward
    whose activations are computed again), times a scale that makes exact sizes ints."""
    names = ("input_size", "forward_size", "weight_size")
    table: dict[tuple[str, int], Number] = {}
    for stage, sizes in enumerate(zip(*(costs.per_stage(n, schedule) for n in names), strict=True)):
        inputs, kept, weights = sizes
        changes = {"F": kept, "B": -kept, "I": weights - kept, "W": -weights, "U": 0,
                   "R": kept - inputs, "again": inputs}  # fmt: skip
        table |= {(kind, stage): change for kind, change in changes.items()}
    scale = common_scale(table.values())
    return {key: int(c * scale) if scale > 1 else c for key, c in table.items()}, scale


def _kept(schedule: Schedule, costs: Costs) -> tuple[list[list[Number]], int]:
    """By how much each action changes what its rank keeps, the parts of a pair one by one, times
    the scale of `_changes`."""
    if schedule.forward_only:
        return [[0] * len(row) for row in schedule.parts], 1
    table, scale = _changes(schedule, costs)
    rows = [list(map(table.__getitem__, map(KIND_AND_STAGE, row))) for row in schedule.parts]
    if schedule.recomputes:
        again = {(a.stage, a.microbatch) for row in schedule.parts for a in row if a.kind == "R"}
        for row, changes in zip(schedule.parts, rows, strict=True):
            for place, (stage, kind, microbatch, _) in enumerate(row):
                if kind == "F" and (stage, microbatch) in again:
                    changes[place] = table["again", stage]
    return rows, scale


def memory_peaks(schedule: Schedule, costs: Costs, program=None) -> list[Number]:
    """The most that each rank keeps at once; see `memory_levels`. program: the lowered schedule,
    with which it is quicker."""
    if not program or program.paired or schedule.recomputes or schedule.forward_only:
        rows, scale = _kept(schedule, costs)
    else:
        table, scale = _changes(schedule, costs)
        by_code = [change for key in program.code
                   for change in [table[key]] * schedule.microbatches]  # fmt: skip
        rows = [map(by_code.__getitem__, codes) for codes in program.codes]
    peaks = [max(accumulate(changes, initial=0)) for changes in rows]
    return [exact(Fraction(peak, scale)) for peak in peaks] if scale > 1 else peaks


def memory_levels(schedule: Schedule, costs: Costs) -> list[list[tuple[Number, Number]]]:
    """For every rank and action what the rank holds during the action, and after it.

    Counted in whole-share micro-batches, or in the unit of the sizes where they are lists: from
    the start of F to the end of B or W; only the stage's input from F to the start of R. A
    forward-only table keeps nothing.
    """
    rows, scale = _kept(schedule, costs)
    result = []
    for row, changes in zip(schedule.rows, rows, strict=True):
        levels, level, following = [], 0, iter(changes)
        for action in row:
            before, after = level, [level := level + next(following) for _ in action.parts]
            levels.append((max(before, *after), level))
        result.append(levels)
    return [[(exact(Fraction(most, scale)), exact(Fraction(level, scale)))
             for most, level in levels] for levels in result] if scale > 1 else result  # fmt: skip
