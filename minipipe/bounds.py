"""What no order of the actions can beat: a lower bound of the makespan."""

from __future__ import annotations

from fractions import Fraction

from minipipe.costs import Costs, Number, exact, given
from minipipe.schedule import Schedule


def lower_bound(schedule: Schedule, costs: Costs | None = None) -> Number:
    """The least makespan that the placement of the stages allows, whatever the order.

    For every rank: the earliest start of its first action, its work, and the shortest time from
    the end of its last action to the end of the step; and the same for its F and I alone, behind
    which a chain of I still leads to stage 0 and to one W there. The argument counts a pair as
    F + B (or less, where it hides an exchange), takes the latency of messages into account but
    no memory limit, and no update. Common start and common end.
    """
    costs = given(schedule, costs)
    names = ("forward", "backward_input", "backward_weight", "recompute", "message_size")
    forward, inputs, weights, again, sizes = (costs.per_stage(n, schedule) for n in names)
    last = schedule.stages - 1
    hide = Fraction(1) - costs.exchange if schedule.has_pairs and costs.exchange else 1

    def hop(stage: int, following: int) -> Number:
        """The least time of a message between two neighbouring stages."""
        pairs = [(a, b) for a in schedule.holders[stage] for b in schedule.holders[following]]
        size = sizes[min(stage, following)]
        return min(0 if a == b else sum(costs.link(a, b, size)) for a, b in pairs)

    arrive = [0] * (last + 1)  # earliest start of each stage's first forward
    for stage in range(1, last + 1):
        arrive[stage] = arrive[stage - 1] + forward[stage - 1] + hop(stage - 1, stage)
    fused = not schedule.splits_backward
    chain = [0] * (last + 1)  # from the end of this stage's B or I to the end of stage 0's
    leave = [0] * (last + 1)  # from the end of this stage's F to the end of the last one's
    for stage in range(1, last + 1):
        step = inputs[stage - 1] + (weights[stage - 1] if fused else 0)
        chain[stage] = chain[stage - 1] + step + hop(stage, stage - 1)
    for stage in reversed(range(last)):
        leave[stage] = leave[stage + 1] + forward[stage + 1] + hop(stage, stage + 1)

    time = {"F": forward, "B": [i + w for i, w in zip(inputs, weights, strict=True)],
            "I": inputs, "W": weights, "R": again, "U": [0] * (last + 1)}  # fmt: skip
    bounds: list[Number] = []
    for rank, count in enumerate(schedule.counts):
        if not count:
            continue
        stages = schedule.stages_of(rank)
        release = min(arrive[stage] for stage in stages)
        work = {kind: 0 for kind in time}
        for (kind, stage), number in count.items():
            work[kind] += number * time[kind][stage]
        total = sum(work.values()) * hide
        if schedule.forward_only:
            bounds.append(release + total + min(leave[stage] for stage in stages))
            continue
        bounds.append(release + total + (min(chain[stage] for stage in stages) if fused else 0))
        if not fused and not any(kind in "BR" for kind, _ in count):
            urgent = total - work["W"] * hide
            bounds.append(release + urgent + min(chain[s] for s in stages) + weights[0])
    return exact(max(bounds))
