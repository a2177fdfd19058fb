"""Forward only: what `evaluate` runs, and a serving engine."""

from minipipe.actions import Action


def inference(ranks: int, microbatches: int, chunks: int = 1) -> list[list[Action]]:
    """The staircase: a micro-batch after the other through all stages, nothing back.
    ```
    0F0 0F1 0F2 0F3
    1F0 1F1 1F2 1F3
    2F0 2F1 2F2 2F3
    3F0 3F1 3F2 3F3
    ```
    With chunks, groups of `ranks` micro-batches go round the ranks once a chunk. Idle/total is
    (p - 1)/(vm + p - 1) where p divides m.
    """
    return [[Action(stage, "F", m)
             for group in range(0, microbatches, ranks)
             for stage in range(rank, chunks * ranks, ranks)
             for m in range(group, min(group + ranks, microbatches))]
            for rank in range(ranks)]  # fmt: skip
