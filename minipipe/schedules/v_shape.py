"""V placement: rank r holds stage r on the way down and stage 2P - 1 - r on the way back up."""

from collections.abc import Callable
from itertools import accumulate

from minipipe.actions import Action
from minipipe.schedules.rows import Rows, phases


def zb_v(ranks: int, microbatches: int) -> Rows:
    """Zero bubble in 1F1B's memory, and every rank keeps the same.
    ```
    0F0 0F1 0F2 0F3 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 6F3 6I2 6W2 1I0 1W0 6I3 6W3 1I1 1W1 1I2 1W2 1I3 1W3
    2F0 2F1 2F2 5F0 2F3 5F1 5F2 5I0 5W0 5F3 5I1 5W1 2I0 2W0 5I2 5W2 2I1 2W1 5I3 5W3 2I2 2W2 2I3 2W3
    3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4I0 4W0 3I0 3W0 4I1 4W1 3I1 3W1 4I2 4W2 3I2 3W2 4I3 4W3 3I3 3W3
    ```
    For F = I = W the bubble is (p - 1)F/2, and none in a rank's own span; unequal times leave one.
    A rank keeps p micro-batches. Zero Bubble, arXiv 2401.10241, section 6; the order is torch's
    ScheduleZBVZeroBubble, which makes at least 2p - 1 micro-batches and drops those too many.
    """
    full = max(microbatches, 2 * ranks - 1)
    rows = []
    for r in range(ranks):
        left = ranks - r
        row = phases(
            (r, 2 * ranks - 1 - r), (0, 0), (2 * left - 1, "F0"), (r, "F1 F0"), (left, "F1 I1 W1"),
            (full - ranks, "F0 I0 W0 F1 I1 W1"), (r, "I0 I1"), (left, "I0 W0"), (r, "W1"),
            (r, "W0"),
        )  # fmt: skip
        rows.append([action for action in row if action.microbatch < microbatches])
    return rows


def v_half(ranks: int, microbatches: int) -> Rows:
    """V placement with half of 1F1B's memory, the same on every rank.
    ```
    0F0 0F1 0F2 0F3 7F0 7I0 7F1 7I1 7W0 7F2 7I2 7W1 0I0 7W2 0W0 7F3 7I3 0I1 7W3 0I2 0W1 0W2 0I3 0W3
    1F0 1F1 1F2 1F3 6F0 6F1 6I0 6W0 6F2 6I1 6W1 1I0 6I2 1W0 6W2 6F3 1I1 6I3 1I2 1W1 6W3 1W2 1I3 1W3
    2F0 2F1 2F2 5F0 5F1 5F2 5I0 5W0 2F3 2I0 5I1 2W0 5I2 5F3 5W1 2I1 5W2 2I2 5I3 2W1 2W2 2I3 5W3 2W3
    3F0 4F0 3F1 4F1 3F2 4F2 4I0 3I0 4W0 3F3 3W0 4F3 4I1 3I1 4I2 3I2 4W1 3W1 4I3 3I3 4W2 3W2 4W3 3W3
    ```
    A rank keeps (p + 2)//2 micro-batches, k = 2 * ((p + 2)//2) stages. For F = I = W, p >= 3 and
    m >= 2p the makespan is the least for that k, 6m + 6p - 1 - 3k stage times. Controllable Memory,
    arXiv 2405.15362, section 3; the block is the authors' code's but for its gaps (2 ticks here).
    """
    room = 2 * ((ranks + 2) // 2)
    return _repeated(ranks, microbatches, room, lambda r: (
        2 * r, 3 * ranks - 2 - r, 3 * ranks + 1 + 2 * r, 6 * ranks - r))  # fmt: skip


def v_min(ranks: int, microbatches: int) -> Rows:
    """V placement with a third of 1F1B's memory, the same on every rank.
    ```
    0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 0F3 0I0 0W0 7F2 7I2 0I1 7W2 0W1 7F3 7I3 0I2 7W3 0W2 0I3 0W3
    1F0 1F1 6F0 6F1 6I0 6W0 1F2 6I1 6W1 1I0 1F3 1W0 6F2 1I1 6I2 1W1 6W2 6F3 1I2 6I3 1W2 6W3 1I3 1W3
    2F0 2F1 5F0 5F1 5I0 5W0 2F2 2I0 5I1 2W0 5W1 5F2 2F3 2I1 2W1 5I2 5F3 5W2 2I2 2W2 5I3 5W3 2I3 2W3
    3F0 4F0 3F1 4F1 4I0 3I0 4W0 3F2 3W0 4F2 4I1 3I1 4W1 3F3 3W1 4F3 4I2 3I2 4W2 3W2 4I3 3I3 4W3 3W3
    ```
    As V-Half, with (p + 4)//3 micro-batches, k = 2 * ((p + 4)//3). Where F, I, W differ, a bubble
    comes again with every micro-batch. For p % 3 = 2 the authors' block has no gap and
    misses the least makespan; a gap of 4 ticks meets it.
    """
    room, gap = 2 * ((ranks + 4) // 3), 2 * ((1 - ranks) % 3)
    return _repeated(ranks, microbatches, room, lambda r: (
        r, 2 * ranks - 1 - r, 2 * ranks + gap + r, 4 * ranks + gap - 1 - r))  # fmt: skip


def _repeated(ranks: int, microbatches: int, room: int,
              block: Callable[[int], tuple[int, ...]]) -> Rows:  # fmt: skip
    """The building block of one micro-batch, repeated every 6 ticks, and squeezed.

    block: when a rank does F of its two stages, I of the second and I of the first. In the order
    of these times each takes the earliest tick in which its rank keeps no more than `room` stages.
    A tick left free is for the oldest W that is due.
    """
    planned = sorted((time + 6 * m, rank, step, m) for m in range(microbatches)
                     for rank in range(ranks) for step, time in enumerate(block(rank)))  # fmt: skip
    rows: list[list[Action | None]] = [[] for _ in range(ranks)]
    levels = [[(0, 0)] for _ in range(ranks)]  # before each tick: stages kept, W due
    starts: dict[tuple[int, int, int], int] = {}
    for _, rank, step, m in planned:
        action = Action(rank if step in (0, 3) else 2 * ranks - 1 - rank, "FFII"[step], m)
        before = (rank + (1 if step % 2 else -1), step, m), (rank, step - 1, m), (rank, step, m - 1)
        tick = max(starts.get(other, -1) for other in before) + 1
        while not _put(action, tick, rows[rank], levels[rank], room):
            tick += 1
        starts[rank, step, m] = tick
    result = []
    for row, states in zip(rows, levels, strict=True):
        weights = (action._replace(kind="W") for action in row if action and action.kind == "I")
        filled = [a or next(weights) for a, (_, due) in zip(row, states, strict=False) if a or due]
        result.append(filled + list(weights))
    return result


def _put(action: Action, tick: int, row: list, levels: list, room: int) -> bool:
    """Let a rank do the action in that tick, if it is free and memory suffices from then on."""
    for _ in range(tick + 1 - len(row)):
        row.append(None)
        levels.append(_after(levels[-1], None))
    after = list(accumulate([action, *row[tick + 1 :]], _after, initial=levels[tick]))[1:]
    if row[tick] or max(after)[0] > room:
        return False
    row[tick], levels[tick + 1 :] = action, after
    return True


def _after(level: tuple[int, int], action: Action | None) -> tuple[int, int]:
    kept, due = level
    if action is None:
        return kept - min(due, 1), due - min(due, 1)
    return (kept + 1, due) if action.kind == "F" else (kept, due + 1)
