"""Two-way schedules: half of the micro-batches run down the ranks, the other half up.

Each stage has a copy on the mirrored rank. DualPipeV is one half of DualPipe, without copies.
"""

from minipipe.actions import Action
from minipipe.schedules.rows import Rows, phases, require


def dualpipe(ranks: int, microbatches: int) -> Rows:
    """Down and up at once, the forward of one way overlapped with the backward of the other.
    ```
    0F0 0F1 0F2 3F4 3I4 3W4 3F5 (0F3;3B5) (3F6;0B0) 3B6 (3F7;0B1) 3B7 0I2 0W2 0I3 0W3
    1F0 2F4 1F1 2F5 1F2 2B4 (2F6;1B0) (1F3;2B5) (2F7;1B1) 2B6 1B2 2I7 1I3 2W7 1W3
    1F4 2F0 1F5 2F1 1F6 2B0 (2F2;1B4) (1F7;2B1) (2F3;1B5) 2B2 1B6 2I3 1I7 2W3 1W7
    0F4 0F5 0F6 3F0 3I0 3W0 3F1 (0F7;3B1) (3F2;0B4) 3B2 (3F3;0B5) 3B3 0I6 0W6 0I7 0W7
    ```
    For even p, even m >= 2p. The bubble is (p/2 - 1)(pair + B - 3W), B the whole backward: exact
    only for F = I, W <= F. A rank keeps p + 1 micro-batches and twice the parameters. DeepSeek-V3,
    arXiv 2412.19437, section 3.2.1; the phases are the released code's, which give its figure.
    """
    require(ranks % 2 == 0, "ranks", ranks, "even", ranks + 1)
    require(microbatches % 2 == 0 and microbatches >= 2 * ranks, "microbatches", microbatches,
            f"even and at least 2 * ranks = {2 * ranks}",
            max(2 * ranks, microbatches + microbatches % 2))  # fmt: skip
    half = microbatches // 2
    down = [_dual(ranks // 2, rank, half, (0, half)) for rank in range(ranks // 2)]
    return down + [_dual(ranks // 2, rank, half, (half, 0)) for rank in reversed(range(ranks // 2))]


def dualpipev(ranks: int, microbatches: int) -> Rows:
    """DualPipe cut in half: the way up continues the way down, so no stage has a copy.
    ```
    0F0 0F1 0F2 0F3 0F4 0F5 0F6 7F0 7I0 7W0 7F1 7I1 7W1 7F2 7I2 7W2 7F3 (0F7;7B3) (7F4;0B0) 7B4 (7F5;0B1) 7B5 (7F6;0B2) 7B6 (7F7;0B3) 7B7 0I4 0W4 0I5 0W5 0I6 0W6 0I7 0W7
    1F0 1F1 1F2 1F3 1F4 6F0 1F5 6F1 6I0 6W0 6F2 6I1 6W1 6F3 (1F6;6B2) (6F4;1B0) (1F7;6B3) (6F5;1B1) 6B4 (6F6;1B2) 6B5 (6F7;1B3) 6B6 1B4 6I7 1I5 6W7 1I6 1W5 1I7 1W6 1W7
    2F0 2F1 2F2 5F0 2F3 5F1 2F4 5F2 5I0 5W0 5F3 (2F5;5B1) (5F4;2B0) (2F6;5B2) (5F5;2B1) (2F7;5B3) (5F6;2B2) 5B4 (5F7;2B3) 5B5 2B4 5B6 2I5 5I7 2I6 2W5 2I7 5W7 2W6 2W7
    3F0 4F0 3F1 4F1 3F2 4F2 3F3 4F3 3F4 4B0 (4F4;3B0) (3F5;4B1) (4F5;3B1) (3F6;4B2) (4F6;3B2) (3F7;4B3) (4F7;3B3) 4B4 3B4 4B5 3B5 4I6 3I6 4I7 3I7 4W6 3W6 4W7 3W7
    ```
    For m >= 2p. The bubble is DualPipe's for 2p ranks, (p - 1)F for F = I = W. A rank keeps p + 1/2
    micro-batches, and 1 share of the parameters (the README's 2x counts its two stages). DualPipe's
    README, "DualPipeV"; the order is torch's ScheduleDualPipeV.
    """  # noqa: E501
    require(microbatches >= 2 * ranks, "microbatches", microbatches,
            f"at least 2 * ranks = {2 * ranks}", 2 * ranks)  # fmt: skip
    return [_dual(ranks, rank, microbatches, (0, 0)) for rank in range(ranks)]


def _dual(ranks: int, rank: int, microbatches: int, first: tuple[int, int]) -> list[Action]:
    """The phases of a rank with `after` ranks behind it, on which the way down turns."""
    after, (half, odd) = ranks - 1 - rank, divmod(rank + 1, 2)
    return phases(
        (rank, 2 * ranks - 1 - rank), first, (2 * after, "F0"), (rank + 1, "F0 F1"),
        (after, "I1 W F1"), (1, "F0B1 F1B0" if after else "F0 B1 F1B0"),
        (microbatches - 2 * ranks + rank, "F0B1 F1B0"), (after, "B1 F1B0"), (half, "B1 B0"),
        (odd, "B1 I0"), (half, "I1 I0"), (after, "W I0"), (rank + 1, "W"),
    )  # fmt: skip


def chimera(ranks: int, microbatches: int) -> Rows:
    """Two 1F1B pipelines in opposite directions, each in the gaps of the other.
    ```
    0F0 0F1 3F2 3B2 3F3 3B3 0B0 0B1
    1F0 2F2 1F1 2F3 2B2 1B0 2B3 1B1
    1F2 2F0 1F3 2F1 2B0 1B2 2B1 1B3
    0F2 0F3 3F0 3B0 3F1 3B1 0B2 0B3
    ```
    For even p, m >= 2; of an odd m one more runs down. Units of p micro-batches stand in a chain.
    For B = F and p | m idle/total is (p - 2)/(2m + p - 2); B = 2F leaves gaps inside (0.25 for p =
    m = 4). A rank keeps p/2 + 1 to p micro-batches. Chimera, arXiv 2107.06925, section 3.
    """
    require(ranks % 2 == 0, "ranks", ranks, "even", ranks + 1)
    require(microbatches >= 2, "microbatches", microbatches, "at least 2, one for each way", 2)
    down = (microbatches + 1) // 2
    rows = []
    for rank in range(ranks):
        slots = {}
        for m in range(microbatches):
            stage, number = (rank, m) if m < down else (ranks - 1 - rank, m - down)
            unit, place = divmod(number, ranks // 2)
            start = 2 * (unit * ranks + place)  # F = B = one slot; the other way takes the rest
            slots[start + stage] = Action(stage, "F", m)
            slots[start + 2 * ranks - 1 - stage] = Action(stage, "B", m)
        rows.append([slots[time] for time in sorted(slots)])
    return rows
