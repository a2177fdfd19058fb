"""Zero bubble: the backward cut into I, which others wait for, and W, which fills the gaps."""

from collections import Counter
from fractions import Fraction
from itertools import product, takewhile
from math import inf

from minipipe.actions import Action
from minipipe.costs import Costs, Number, action_time, given
from minipipe.schedule import Schedule
from minipipe.schedules.rows import Rows, looped, require
from minipipe.simulate import simulate


def zb_h1(ranks: int, microbatches: int) -> Rows:
    """1F1B with a split backward, in 1F1B's memory: rank r does each W r backwards later.
    ```
    0F0 0F1 0F2 0F3 0I0 0W0 0F4 0I1 0W1 0F5 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1W1 1F5 1I3 1W2 1I4 1W3 1I5 1W4 1W5
    2F0 2F1 2I0 2F2 2I1 2F3 2I2 2W0 2F4 2I3 2W1 2F5 2I4 2W2 2I5 2W3 2W4 2W5
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3W0 3F4 3I4 3W1 3F5 3I5 3W2 3W3 3W4 3W5
    ```
    The bubble is (p - 1)(F + I - W) for W <= F, I and (p - 1)I for F < W <= I; rank r keeps (p - r)
    M_B + r M_W. Zero Bubble, arXiv 2401.10241, section 2 (I is called B there), in torch's order.
    """
    return looped(ranks, microbatches, back="I")


def zb_h2(ranks: int, microbatches: int) -> Rows:
    """ZB-H1 with twice the warm-up and twice the delay of W: nearly twice the memory.
    ```
    0F0 0F1 0F2 0F3 0F4 0F5 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1I2 1W0 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5
    2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2I4 2W0 2I5 2W1 2W2 2W3 2W4 2W5
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3W0 3W1 3W2 3W3 3W4 3W5
    ```
    The bubble is max(0, (p - 1)(F + I - 2W)) in a rank's own span; until a common end, (p - 1)F for
    F = I = W, as in ZB-H1. Rank r keeps (2p - 1 - 2r) M_B + 2r M_W. Zero Bubble, section 2;
    m >= 2p - 1 is useful, any m legal.
    """
    return looped(ranks, microbatches, hop=2, back="I")


def zb_1p(ranks: int, microbatches: int, chunks: int = 2, group: int | None = None) -> Rows:
    """ZB-H1 over chunks: groups as in interleaved 1F1B, half its warm-up, W delayed by r.
    ```
    0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 4I0 4W0 4I1 4W1 4I2 4W2 4I3 4W3 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1F1 1F2 1F3 5F0 5F1 5F2 5I0 5F3 5I1 5W0 5I2 5W1 5I3 5W2 1I0 5W3 1I1 1W0 1I2 1W1 1I3 1W2 1W3
    2F0 2F1 2F2 2F3 6F0 6F1 6I0 6F2 6I1 6F3 6I2 6W0 6I3 6W1 2I0 6W2 2I1 6W3 2I2 2W0 2I3 2W1 2W2 2W3
    3F0 3F1 3F2 3F3 7F0 7I0 7F1 7I1 7F2 7I2 7F3 7I3 7W0 3I0 7W1 3I1 7W2 3I2 7W3 3I3 3W0 3W1 3W2 3W3
    ```
    The bubble is (p - 1)(F + I - W)/v for W <= F, I; for groups of N a rank keeps min(mv, (v - 1)N
    + p) chunks. The order is torch's ScheduleInterleavedZeroBubble (the paper has no such chunks);
    for an m that it refuses the groups are those of interleaved 1F1B.
    """
    return looped(ranks, microbatches, chunks, group, back="I")


def zb_auto(ranks: int, microbatches: int, costs: Costs | None = None,
            memory_limit: Number | None = None) -> Rows:  # fmt: skip
    """Zero bubble for given times of F, I, W and messages, within given memory: the best of 8.
    ```
    0F0 0F1 0F2 0F3 0F4 0F5 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5
    1F0 1F1 1F2 1F3 1F4 1I0 1F5 1I1 1W0 1I2 1W1 1I3 1W2 1I4 1W3 1I5 1W4 1W5
    2F0 2F1 2F2 2I0 2F3 2I1 2F4 2I2 2F5 2I3 2W0 2I4 2W1 2I5 2W2 2W3 2W4 2W5
    3F0 3I0 3F1 3I1 3F2 3I2 3F3 3I3 3F4 3I4 3F5 3I5 3W0 3W1 3W2 3W3 3W4 3W5
    ```
    A warm-up of the forwards that fit in time and memory, then a forward and an I by turns, while
    W's fill gaps or make room. Three choices are tried both ways: a forward more in the warm-up,
    though the first I then waits; no forward where the next rank has two to go; a W in a gap
    shorter than it. The shortest step wins, then the shortest own span (the paper's only measure),
    then the least memory; without a limit, room for 2p - 1 micro-batches is tried too.
    Zero Bubble, arXiv 2401.10241, section 3.1, and its code, whose integer program is switched off.
    """
    one = Schedule(zb_h1(ranks, 1))
    costs, limit = given(one, costs), inf if memory_limit is None else memory_limit
    least = max(*costs.per_stage("forward_size", one), *costs.per_stage("weight_size", one))
    require(isinstance(limit, int | float | Fraction) and limit >= least, "memory_limit",
            memory_limit, "a number, at least what one micro-batch keeps", least)  # fmt: skip
    rooms = [limit] if memory_limit is not None else [limit, (2 * ranks - 1) * least]
    tries = [simulate(Schedule(_Try(one, costs, room, fill).rows(microbatches, late, skip)), costs)
             for late, skip, fill, room in product(*[(False, True)] * 3, rooms)]  # fmt: skip
    return min(tries, key=lambda t: (t.makespan, t.bubble.own_span,
                                     max(t.peak_activations))).schedule.rows  # fmt: skip


class _Try:
    """One combination: for each rank its row, what it keeps, until when it is busy, its gaps."""

    def __init__(self, one: Schedule, costs: Costs, limit: Number, fill: bool):
        sizes = ("forward_size", "weight_size", "message_size")
        kept, left, size = (costs.per_stage(name, one) for name in sizes)
        time = action_time(costs, one)
        self.ranks, self.limit, self.fill = range(one.ranks), limit, fill
        self.time = {(kind, r): time(Action(r, kind, 0)) for kind in "FIW" for r in self.ranks}
        self.wire = {("F", r): sum(costs.link(r - 1, r, size[r - 1])) for r in self.ranks[1:]}
        self.wire |= {("I", r): sum(costs.link(r + 1, r, size[r])) for r in self.ranks[:-1]}
        self.change = {(kind, r): {"F": kept[r], "I": left[r] - kept[r], "W": -left[r]}[kind]
                       for kind, r in self.time}  # fmt: skip
        self.done, self.ends = Counter(), {}
        self.level, self.clock, self.gaps = ([0] * one.ranks for _ in range(3))
        self.made: Rows = [[] for _ in self.ranks]

    def put(self, kind: str, rank: int) -> None:
        """The rank's next action of that kind, and before it each W that makes room or fills."""
        action, here, arrival = Action(rank, kind, self.done[kind, rank]), (kind, rank), 0
        if here in self.wire:
            source = action._replace(stage=rank - 1 if kind == "F" else rank + 1)
            arrival = self.ends[source] + self.wire[here]
        while kind != "W" and self.done["W", rank] < self.done["I", rank]:
            gap = arrival - self.clock[rank]
            worst = gap > max(self.gaps) - self.gaps[rank]
            fills = gap > 0 and (self.fill or worst or gap >= self.time["W", rank])
            if self.level[rank] + self.change[here] <= self.limit and not fills:
                break
            self.put("W", rank)
        start = max(arrival, self.clock[rank])
        self.gaps[rank] += start - self.clock[rank] if self.made[rank] else 0
        self.clock[rank] = self.ends[action] = start + self.time[here]
        self.level[rank] += self.change[here]
        self.done[here] += 1
        self.made[rank].append(action)

    def warm_up(self, most: int, late: bool) -> list[int]:
        """How many forwards each rank does before its first I, besides the first one."""
        more, back = [0] * len(self.ranks), self.clock[-1]
        for r in reversed(self.ranks[:-1]):
            back += self.time["I", r + 1] + self.wire["I", r]
            now, time, size = self.clock[r], self.time["F", r], self.change["F", r]
            room = self.limit - self.level[r] - max(0, self.change["I", r])
            while more[r] < most and (more[r] + 1) * size <= room and (
                    now + time <= back or late and now < back):  # fmt: skip
                now += time
                more[r] += 1
            back = max(now, back)
        for r in self.ranks[1:]:  # a rank is a forward ahead of the next one, while there are any
            more[r] = min(more[r], max(0, more[r - 1] - (more[r - 1] < most)))
        return more

    def skips(self, r: int) -> bool:
        """Whether a forward can wait: the next rank has two to go, and no new largest gap comes."""
        if r == self.ranks[-1] or self.done["F", r] < self.done["F", r + 1] + 2:
            return False
        back = sum(self.time[kind, r + 1] for kind in "FI") + self.clock[r + 1] + self.wire["I", r]
        wait = back - self.clock[r]
        return wait < self.time["F", r] and wait <= max(self.gaps) - self.gaps[r]

    def rows(self, microbatches: int, late: bool, skip: bool) -> Rows:
        """Warm-up, then a forward and an I by turns on all ranks, then the W's left."""
        for step in range(microbatches):
            able = takewhile(lambda r: self.done["F", r] < microbatches and not (
                skip and self.skips(r)), reversed(self.ranks))  # fmt: skip
            for r in reversed([*able]):
                self.put("F", r)
            for r, more in enumerate([] if step else self.warm_up(microbatches - 1, late)):
                for _ in range(more):
                    self.put("F", r)
            for r in reversed(self.ranks):
                self.put("I", r)
        for r in self.ranks:
            while self.done["W", r] < microbatches:
                self.put("W", r)
        return self.made
