"""V placement: rank r holds stage r on the way down and stage 2P - 1 - r on the way back up."""

from minipipe.actions import Action, ScheduleError
from minipipe.schedules.rows import phases


def zb_v(ranks: int, microbatches: int) -> list[list[Action]]:
    """Zero bubble in 1F1B's memory, the same on every rank.

    ```
    0F0 0F1 0F2 0F3 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 7I3 7W3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    ```
    For F = I = W the bubble is (p - 1)F/2, and none in a rank's own span; unequal times leave one.
    A rank keeps p micro-batches. Zero Bubble, arXiv 2401.10241, section 6. The order is torch's
    ScheduleZBVZeroBubble: below M = 2P - 1 it is that of 2P - 1 without what is too much (at P = M
    = 4 that takes 30 chunk units, where the bound is 27).
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


def dualpipev(ranks: int, microbatches: int) -> list[list[Action]]:
    """DualPipe cut in half.
    """
    if microbatches < 2 * ranks:
        raise ScheduleError(
            f"microbatches={microbatches} must be at least 2 * ranks = {2 * ranks}, which is the "
            "nearest legal value"
        )
    return [dual(r, ranks, microbatches, (0, 0)) for r in range(ranks)]


def dual(r: int, ranks: int, microbatches: int, first: tuple[int, int]) -> list[Action]:
    """Rank r's row of DualPipeV, and of DualPipe on half as many ranks"""
    after, pairs = ranks - 1 - r, microbatches - 2 * ranks + r + 1
    alone = (1, "F0 B1 F1B0") if after == 0 else (1, "F0B1 F1B0")
    ...
