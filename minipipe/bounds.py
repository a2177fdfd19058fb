"""What no order of the actions can beat: a lower bound of the makespan."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import inf

from minipipe.costs import Costs, Number, decimal, exact, given, is_number, stage_times
from minipipe.schedule import Schedule


def lower_bound(schedule: Schedule, costs: Costs | None = None,
                memory_limit: Number | None = None) -> Number:  # fmt: skip
    """The least makespan that the placement of the stages allows, whatever the order.

    For every rank: the earliest start of its first action, its work, and the shortest time from
    the end of its last action to the end of the step; and the same for its F and I alone, behind
    which a chain of I still leads to stage 0 and to one W there. A pair counts as F + B (or less,
    where it hides an exchange), messages with their latency, updates not. Common start and end.
    With memory_limit (whole-share micro-batches, sizes from `costs`; not used for R): where not
    all F of a rank fit at once, only those that fit precede its first backward, and only their
    backwards follow its last F (V placement: 6m + 6p - 1 - 3k stage times); sizes times least
    lifetimes fit too; and where stage 0 holds k, each k micro-batches start a whole way forth and
    back after the k before (p = 4, m = 8, F = 1, B = 2: 33, 39, 51 for k = 4, 3, 2, the optima).
    """
    costs = given(schedule, costs)
    if memory_limit is not None and not (is_number(memory_limit) and memory_limit > 0):
        raise TypeError(f"memory_limit must be a number greater than 0, not {memory_limit!r}")
    time = stage_times(costs, schedule) | {"U": [0] * schedule.stages}
    kept, late = (costs.per_stage(n, schedule) for n in ("forward_size", "weight_size"))
    fused, hidden = not schedule.splits_backward, schedule.has_pairs and costs.exchange
    forward, back, weights = time["F"], time["B" if fused else "I"], time["W"]
    arrive, leave, chain = _ways(schedule, costs, forward, back)
    # From the end of a stage's F to the end of its B or I; and what then is left at the very end.
    turn = [ahead + chain[-1] + back[-1] - behind
            for ahead, behind in zip(leave, chain, strict=True)]  # fmt: skip
    end = 0 if fused else weights[0]
    limit = None if schedule.recomputes or schedule.forward_only else decimal(memory_limit)
    windows = [(0, schedule.microbatches)]  # so many micro-batches all start at or after that time
    if limit is not None and kept[0] and not schedule.copies:
        room = max(1, int(limit // kept[0]))
        rounds = (schedule.microbatches - 1) // room
        trip = forward[0] + turn[0] + (end if late[0] >= kept[0] else 0)
        windows.append((rounds * trip, schedule.microbatches - rounds * room))
    bounds: list[Number] = []
    for (begin, left), count in product(windows, filter(None, schedule.counts)):
        stages = {stage for _, stage in count}
        numbers = [(k, s, n * left // schedule.microbatches) for (k, s), n in count.items()]
        urgent, work = (sum(n * time[kind][s] for kind, s, n in numbers if kind != without)
                        * (Fraction(1) - costs.exchange if hidden else 1) for without in "W ")
        release = begin + min(arrive[s] for s in stages)
        tail = min((leave if schedule.forward_only else chain)[s] for s in stages)
        if not fused:
            if not any(kind in "BR" for kind, _ in count):
                bounds.append(release + urgent + tail + end)
            tail = 0
        if limit is not None:
            forwards = [(s, n) for kind, s, n in numbers if kind == "F"]
            held = sum(n * (kept[s] * (forward[s] + turn[s]) + min(kept[s], late[s])
                       * (time["B"][s] - back[s])) for s, n in forwards)  # fmt: skip
            bounds.append(release + exact(Fraction(held) / Fraction(limit)) + tail)
            if limit < sum(n * kept[s] for s, n in forwards):
                lasting = [(time["B"][s], kept[s]) for s in stages]
                lasting += [(weights[s], late[s]) for s in stages if not fused]
                head = min(arrive[s] + forward[s] + turn[s] - back[s] for s in stages)
                head -= _most(limit, [(forward[s], kept[s]) for s in stages])
                rest = min(turn[s] + chain[s] for s in stages) + end - _most(limit, lasting)
                release, tail = max(release, begin + head), max(tail, rest)
        bounds.append(release + work + tail)
    return exact(max(bounds))


def _ways(schedule: Schedule, costs: Costs, forward, back) -> tuple[list, list, list]:
    """By stage: the earliest start of its first F, the least time from the end of an F to the end
    of the last stage's, and from the end of a B or I to the end of stage 0's."""
    stages, sizes = schedule.stages, costs.per_stage("message_size", schedule)
    arrive, leave, chain = ([0] * stages for _ in range(3))

    def hop(stage: int, following: int) -> Number:
        pairs = product(schedule.holders[stage], schedule.holders[following])
        size = sizes[min(stage, following)]
        return min(sum(costs.link(a, b, size)) for a, b in pairs)

    for s in range(1, stages):
        arrive[s] = arrive[s - 1] + forward[s - 1] + hop(s - 1, s)
        chain[s] = chain[s - 1] + back[s - 1] + hop(s, s - 1)
    for s in reversed(range(stages - 1)):
        leave[s] = leave[s + 1] + forward[s + 1] + hop(s, s + 1)
    return arrive, leave, chain


def _most(limit: Number, items: list[tuple[Number, Number]]) -> Number:
    """At most so much time have those of the items (time, size) that fit into the limit at once."""
    sizes = [size for time, size in items if time]
    return limit // min(sizes) * max(items)[0] if all(sizes) and sizes else inf if sizes else 0
