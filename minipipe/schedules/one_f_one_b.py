"""1F1B: one forward, one backward, so that a rank keeps few micro-batches."""

from minipipe.schedules.rows import Rows, looped


def one_f_one_b(ranks: int, microbatches: int, recompute: bool = False) -> Rows:
    """Warm-up of forwards, a steady state of one forward and one backward, cool-down.
    ```
    0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5
    1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5
    2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5
    3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5
    ```
    The bubble is GPipe's, but rank r keeps min(m, p - r) micro-batches. With recompute, R stands
    before each B. PipeDream-Flush (PipeDream-2BW, arXiv 2006.09503, section 3.2), DAPPLE; the
    warm-up is Megatron-LM's min(p - 1 - r, m), so m < p works too.
    """
    return looped(ranks, microbatches, back="RB" if recompute else "B")
