"""GPipe: all forwards, then all backwards."""

from minipipe.actions import Action


def gpipe(ranks: int, microbatches: int, recompute: bool = False) -> list[list[Action]]:
    """All micro-batches forward, then all backward, first in, first out as torch has it.
    ```
    0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
    1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
    2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
    3F0 3F1 3F2 3F3 3B0 3B1 3B2 3B3
    ```
    Idle/total is (p - 1)/(m + p - 1); every rank keeps all m micro-batches, or with recompute
    (`0R0 0B0 0R1 0B1 …`) their inputs and one micro-batch. GPipe, arXiv 1811.06965, section 2.3.
    """
    back = "RB" if recompute else "B"
    return [[Action(rank, "F", m) for m in range(microbatches)]
            + [Action(rank, kind, m) for m in range(microbatches) for kind in back]
            for rank in range(ranks)]  # fmt: skip
