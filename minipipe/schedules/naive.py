"""Naive model parallelism: one micro-batch at a time, so one rank computes and the others wait."""

from minipipe.actions import Action


def naive(ranks: int, microbatches: int) -> list[list[Action]]:
    """Each micro-batch goes all the way forward and back before the next one starts.
    ```
    0F0 0B0 0F1 0B1
    1F0 1B0 1F1 1B1
    2F0 2B0 2F1 2B1
    3F0 3B0 3F1 3B1
    ```
    Idle/total is (p - 1)/p (GPipe, arXiv 1811.06965, figure 2b); a rank keeps 1 micro-batch.
    """
    return [[Action(rank, kind, m) for m in range(microbatches) for kind in "FB"]
            for rank in range(ranks)]  # fmt: skip
