"""What several schedules are made with: 1F1B and its kin, and rows from phases."""

import re
from itertools import accumulate, count

from minipipe.actions import Action, ScheduleError

Rows = list[list[Action]]


def require(legal: bool, argument: str, value: int, rule: str, nearest: int) -> None:
    """Refuse a size outside its rule, naming the nearest legal one."""
    if not legal:
        rule = f"{rule}; the nearest legal value is {nearest}"
        shown = repr(value) if isinstance(value, str) else value
        raise ScheduleError(f"{argument}={shown} must be {rule}")


def looped(ranks: int, microbatches: int, chunks: int = 1, group: int | None = None, hop: int = 1,
           back: str = "B") -> Rows:  # fmt: skip
    """1F1B and its kin: groups of micro-batches go round the ranks once a chunk; a rank does its
    warm-up of forwards, then one forward and one backward by turns, then the backwards left.

    hop: by how many forwards a rank's warm-up is longer than the next rank's. back: the kinds of a
    backward: B, RB, or I, whose W then follows on rank r after hop * r more backwards.
    """
    low = min(ranks, microbatches)
    group = low if group is None else group
    rule = f"between min(ranks, microbatches) = {low} and microbatches = {microbatches}"
    nearest = min(max(group, low), microbatches)
    require(group == nearest, "group", group, rule, nearest)
    groups = microbatches // group
    sizes = [microbatches // groups + (g < microbatches % groups) for g in range(groups)]

    def order(rank: int, kind: str) -> list[Action]:
        stages = range(rank, chunks * ranks, ranks)
        return [
            Action(stage, kind, m)
            for size, end in zip(sizes, accumulate(sizes), strict=True)
            for stage in (stages if kind == "F" else reversed(stages))
            for m in range(end - size, end)
        ]

    rows = []
    for rank in range(ranks):
        warm_up, lag = (chunks - 1) * sizes[0] + hop * (ranks - 1 - rank), hop * rank
        forwards, weights = order(rank, "F"), order(rank, "W") if back == "I" else []
        row = forwards[:warm_up]
        for step, backward in enumerate(zip(*(order(rank, kind) for kind in back), strict=True)):
            row += [*forwards[warm_up + step : warm_up + step + 1], *backward]
            row += weights[step - lag : step - lag + 1] if step >= lag else []
        rows.append(row + weights[max(0, len(weights) - lag) :])
    return rows


def phases(stages: tuple[int, int], first: tuple[int, int],
           *patterns: tuple[int, str]) -> list[Action]:  # fmt: skip
    """One row from phases (how often, pattern), a pattern as a reader sees it in the figure.

    `F0 F1B0` is the forward of chunk 0 (the first of `stages`), then an overlapped pair; a chunk's
    micro-batches are counted up from `first`. `W1` is the oldest W of chunk 1 that is still due,
    `W` the oldest of both.
    """
    numbers = {(kind == "F", chunk): count(first[chunk]) for kind in "FB" for chunk in (0, 1)}
    due: list[Action] = []

    def action(kind: str, chunk: str) -> Action:
        if kind == "W":
            oldest = next(w for w in due if not chunk or w.stage == stages[int(chunk)])
            due.remove(oldest)
            return oldest
        made = Action(stages[int(chunk)], kind, next(numbers[kind == "F", int(chunk)]))
        if kind == "I":
            due.append(made._replace(kind="W"))
        return made

    row = []
    for times, pattern in patterns:
        for token in pattern.split() * times:
            one, *other = (action(*part) for part in re.findall(r"([FBIW])(\d?)", token))
            row.append(one._replace(overlapped=other[0]) if other else one)
    return row
