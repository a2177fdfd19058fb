"""Looped schedules: each rank holds several chunks, stage c * ranks + r on rank r."""

from itertools import accumulate

from minipipe.actions import Action, ScheduleError
from minipipe.schedules.rows import by_turns


def looped(ranks: int, microbatches: int, chunks: int = 1, group: int | None = None, hop: int = 1,
           back: str = "B") -> list[list[Action]]:  # fmt: skip
    """Rows of 1F1B and its kin: groups of micro-batches go round the ranks once a chunk.

    hop: by how many forwards a rank's warm-up is longer than the next rank's; as many times r
    backwards later the W of a split backward (`back` "I") follows on rank r.
    """
    low = min(ranks, microbatches)
    group = low if group is None else group
    if not low <= group <= microbatches:
        nearest = min(max(group, low), microbatches)
        raise ScheduleError(
            f"group={group} must be between min(ranks, microbatches) = {low} and microbatches = "
            f"{microbatches}; the nearest legal value is {nearest}"
        )
    groups = microbatches // group
    sizes = [microbatches // groups + (g < microbatches % groups) for g in range(groups)]

    def order(rank: int, chunk_order: range) -> list[tuple[int, int]]:
        ends = accumulate(sizes)
        return [
            (chunk * ranks + rank, m)
            for size, end in zip(sizes, ends, strict=True)
            for chunk in chunk_order
            for m in range(end - size, end)
        ]

    return [
        by_turns(order(rank, range(chunks)), order(rank, range(chunks)[::-1]),
                 (chunks - 1) * sizes[0] + hop * (ranks - 1 - rank), back, hop * rank)
        for rank in range(ranks)
    ]  # fmt: skip


def interleaved(ranks: int, microbatches: int, chunks: int = 2,
                group: int | None = None) -> list[list[Action]]:  # fmt: skip
    """1F1B over chunks: `group` micro-batches of one chunk, then the same of the next chunk.

    ```
    0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4B0 4B1 4B2 4B3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3 5B0 5B1 5B2 5B3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 2F3 6F0 6F1 6F2 6B0 6F3 6B1 6B2 6B3 2B0 2B1 2B2 2B3
    3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1 7F2 7B2 7F3 7B3 3B0 3B1 3B2 3B3
    ```
    The bubble is 1F1B's divided by the chunks; with groups of N, rank r keeps
    min(mv, (v - 1)N + 2(p - 1 - r) + 1) chunks. Megatron-LM, arXiv 2104.04473, section 2.2; any N
    from p to m is Llama 3's, arXiv 2407.21783, section 3.3.2. Where `group` does not divide m, the
    m // group groups get one micro-batch more each until all are placed: no smaller group is left
    over, which would lengthen the step or even block it.
    """
    return looped(ranks, microbatches, chunks, group, hop=2)


def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> list[list[Action]]:
    """All micro-batches through one chunk, then through the next; back likewise, last in first out.

    ```
    0F0 0F1 0F2 4F0 4F1 4F2 4B2 4B1 4B0 0B2 0B1 0B0
    1F0 1F1 1F2 5F0 5F1 5F2 5B2 5B1 5B0 1B2 1B1 1B0
    2F0 2F1 2F2 6F0 6F1 6F2 6B2 6B1 6B0 2B2 2B1 2B0
    3F0 3F1 3F2 7F0 7F1 7F2 7B2 7B1 7B0 3B2 3B1 3B0
    ```
    The makespan is interleaved 1F1B's; every rank keeps all m micro-batches. Breadth-First
    Pipeline Parallelism, arXiv 2211.05953, section 3.
    """
    return [
        [Action(c * ranks + rank, "F", m) for c in range(chunks) for m in range(microbatches)]
        + [
            Action(c * ranks + rank, "B", m)
            for c in reversed(range(chunks))
            for m in reversed(range(microbatches))
        ]
        for rank in range(ranks)
    ]
