"""Zero bubble: the backward cut into I, which others wait for, and W, which fills the gaps."""

from collections import Counter
from itertools import product
from math import inf

from minipipe.actions import Action
from minipipe.costs import Costs, Number, decimal, given, is_number, stage_times
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
    What can begin first is next: a forward or an I, by turns where both can, and a W in the gaps or
    to make room. Three choices are tried both ways: a forward although an I on its way then waits;
    no more micro-batches under way than in 1F1B; a W in a gap shorter than it. The shortest step
    wins, then the shortest own span (the paper's only measure), then the least memory; room for
    2p - 1 micro-batches is tried too where there is more. Zero Bubble, arXiv 2401.10241, section
    3.1, and its code, whose integer program is switched off; those go on by turns of the ranks, not
    by time, and give a W also to a gap that would be the largest. A rule of thumb, not the optimum.
    """
    one = Schedule([[Action(r, "F", 0)] for r in range(ranks)])  # what costs are asked with
    costs, limit = given(one, costs), inf if memory_limit is None else decimal(memory_limit)
    least = max(*costs.per_stage("forward_size", one), *costs.per_stage("weight_size", one))
    require(is_number(limit) and limit >= least, "memory_limit", memory_limit,
            "a number, at least what one micro-batch keeps", least)  # fmt: skip
    rooms = sorted({limit, min(limit, (2 * ranks - 1) * least)})
    tries = [simulate(Schedule(_in_time(one, costs, microbatches, *choices)), costs)
             for choices in product(rooms, *[(False, True)] * 3)]  # fmt: skip
    return min(tries, key=lambda t: (t.makespan, t.bubble.own_span,
                                     max(t.peak_activations))).schedule.rows  # fmt: skip


def _in_time(one: Schedule, costs: Costs, microbatches: int, room: Number, late: bool, short: bool,
             fill: bool) -> Rows:  # fmt: skip
    """The rows of one combination of choices."""
    kept, left, size = (costs.per_stage(f"{n}_size", one) for n in ("forward", "weight", "message"))
    times, done, sent = stage_times(costs, one), Counter(), Counter()
    ranks, free, back = range(one.ranks), [0] * one.ranks, [False] * one.ranks
    rows, ready = [[] for _ in ranks], {(0, "F", m): 0 for m in range(microbatches)}

    def choice(r: int) -> tuple[Number, int, str]:
        """When the rank goes on, and with which kind of action."""
        ahead, due = done[r, "F"] - done[r, "I"], done[r, "I"] - done[r, "W"]
        space = room - ahead * kept[r] - due * left[r]
        needs = {"F": max(kept[r], left[r]), "I": left[r] - kept[r], "W": 0}
        f, i, w = (max(free[r], ready.get((r, kind, done[r, kind]), inf))
                   if need <= space else inf for kind, need in needs.items())  # fmt: skip
        f = inf if short and ahead >= one.ranks - r or not late and f < i < f + times["F"][r] else f
        when, _, kind = min((f, back[r], "F"), (i, not back[r], "I"))
        return (w, r, "W") if w < when and (fill or w + times["W"][r] <= when) else (when, r, kind)

    plan = [*map(choice, ranks)]
    for _ in range(3 * microbatches * one.ranks):
        when, r, kind = min(plan)
        free[r], back[r] = when + times[kind][r], kind == "F"
        after = {"F": [(r + 1, "F") if r + 1 in ranks else (r, "I")], "I": [(r - 1, "I"), (r, "W")]}
        for s, then in after.get(kind, ()):
            latency, wire = costs.link(r, s, size[min(r, s)])
            sent[r, s] = max(free[r], sent[r, s]) + wire
            ready[s, then, done[r, kind]] = sent[r, s] + latency
        rows[r].append(Action(r, kind, done[r, kind]))
        done[r, kind] += 1
        plan[max(0, r - 1) : r + 2] = map(choice, ranks[max(0, r - 1) : r + 2])
    return rows
