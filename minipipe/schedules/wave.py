"""Hanayo: the stages go down and up the ranks in waves, without a copy of any."""

from collections.abc import Iterator
from math import inf

from minipipe.actions import Action
from minipipe.schedules.rows import Rows


def hanayo(ranks: int, microbatches: int, waves: int = 1) -> Rows:
    """2 * waves stages a rank; each rank takes the oldest micro-batch that is ready.
    ```
    0F0 0F1 0F2 0F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 6F0 6F1 6B0 6F2 6B1 6F3 6B2 6B3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 5F0 2F3 5F1 5F2 5F3 5B0 5B1 2B0 5B2 2B1 5B3 2B2 2B3
    3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 4B0 3B0 4B1 3B1 4B2 3B2 4B3 3B3
    ```
    For B = 2F. The paper's idle/total, (2p - 2)/(3pw + p - 1) for m = p, is not exact: 0.4, 0.222,
    0.118 for p = 4 and w = 1, 2, 4 waves, where these rows have 0.333, 0.213, 0.119. No rank keeps
    more than p micro-batches, whatever m. Hanayo, arXiv 2308.15762, section 3.
    """
    stages, steps = 2 * ranks * waves, 4 * ranks * waves  # step t: F of stage t, then B's, back
    mine = [[t for t in range(steps) if t % (2 * ranks) in (rank, 2 * ranks - 1 - rank)]
            for rank in range(ranks)]  # fmt: skip
    begun, free, now = [0] * steps, [0] * ranks, 0
    ends = {(-1, m): 0 for m in range(microbatches)}
    rows: Rows = [[] for _ in range(ranks)]

    def ready(rank: int) -> Iterator[tuple[int, int]]:
        for t in mine[rank] if free[rank] <= now else ():
            m = begun[t]
            # With all that older micro-batches will still keep here: that room is theirs.
            kept = sum(max(begun[s], m) - begun[steps - 1 - s] for s in mine[rank] if s < stages)
            if ends.get((t - 1, m), inf) <= now and (kept < stages or t >= stages):
                yield m, -t

    while min(begun) < microbatches:
        for rank in range(ranks):
            for m, t in sorted(ready(rank))[:1]:
                stage, kind, time = (-t, "F", 1) if -t < stages else (steps - 1 + t, "B", 2)
                free[rank] = ends[-t, m] = now + time
                begun[-t] += 1
                rows[rank].append(Action(stage, kind, m))
        now += 1
    return rows
