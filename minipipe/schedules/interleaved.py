"""Looped schedules: each rank holds several chunks, stage c * ranks + r on rank r."""

from itertools import product

from minipipe.actions import Action
from minipipe.schedules.rows import Rows, looped


def interleaved(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Rows:
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


def breadth_first(ranks: int, microbatches: int, chunks: int = 2) -> Rows:
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
    rows = []
    for rank in range(ranks):
        pairs = [*product(range(rank, chunks * ranks, ranks), range(microbatches))]
        rows.append([Action(stage, "F", m) for stage, m in pairs]
                    + [Action(stage, "B", m) for stage, m in reversed(pairs)])  # fmt: skip
    return rows
