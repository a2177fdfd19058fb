"""Zero bubble: the backward cut into I, which others wait for, and W, which fills the gaps."""

from minipipe.actions import Action
from minipipe.schedules.interleaved import looped


def zb_h1(ranks: int, microbatches: int) -> list[list[Action]]:
    """1F1B with a split backward, in 1F1B's memory: rank r does each W r backwards later.

    ```
    0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1I4 1W3 1I5 1W4 1W5
    2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2I5 2W3 2W4 2W5
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3W3 3W4 3W5
    ```
    The bubble is (p - 1)(F + I - W) for W <= I; rank r keeps (p - r) M_B + r M_W. Zero Bubble,
    arXiv 2401.10241, section 2.3, where I is called B; the order is torch's
    ScheduleInterleavedZeroBubble with one stage a rank. Any M works, also M < P.
    """
    return looped(ranks, microbatches, back="I")


def zb_h2(ranks: int, microbatches: int) -> list[list[Action]]:
    """ZB-H1 with twice the warm-up and twice the delay of W: nearly twice the memory.

    ```
    0F0 0F1 0F2 0F3 0F4 0F5 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1I2 1W0 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
    2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2I4 2W0 2I5 2W1 2W2 2W3 2W4 2W5
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3W0 3W1 3W2 3W3 3W4 3W5
    ```
    A rank's own span has a bubble of max(0, (p - 1)(F + I - 2W)), none for F = I = W; with one
    common end of the step (p - 1)F remain, as in ZB-H1. Rank r keeps (2p - 1 - 2r) M_B + 2r M_W.
    Zero Bubble, arXiv 2401.10241, section 2.3; useful from M = 2P - 1 on, legal for any M.
    """
    return looped(ranks, microbatches, hop=2, back="I")


def zb_1p(ranks: int, microbatches: int, chunks: int = 2,
          group: int | None = None) -> list[list[Action]]:  # fmt: skip
    """ZB-H1 over chunks: groups as in interleaved 1F1B, half its warm-up, W delayed by r.

    ```
    0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4I0 4W0 4I1 4W1 4I2 4W2 4I3 4W3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1F2 1F3 5F0 5F1 5F2 5I0 5F3 5I1 5W0 5I2 5W1 5I3 5W2 1I0 5W3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    2F0 2F1 2F2 2F3 6F0 6F1 6I0 6F2 6I1 6F3 6I2 6W0 6I3 6W1 2I0 6W2 2I1 6W3 2I2 2W0 2I3 2W1 2W2 2W3
    3F0 3F1 3F2 3F3 7F0 7I0 7F1 7I1 7F2 7I2 7F3 7I3 7W0 3I0 7W1 3I1 7W2 3I2 7W3 3I3 3W0 3W1 3W2 3W3
    ```
    The bubble is (p - 1)(F + I - W)/v for W <= I; every rank keeps min(mv, (v - 1)N + p) chunks
    with groups of N. The order is torch's ScheduleInterleavedZeroBubble (the Zero Bubble paper has
    no chunks in a loop), which refuses an M that its groups don't divide; they are made as
    interleaved 1F1B makes them.
    """
    return looped(ranks, microbatches, chunks, group, back="I")
