"""What is to be scheduled: stages on ranks, exact integer times, messages, memory; and its answer.

Shared by `optimize` (certified) and `search` (heuristic). Micro-batches have equal costs, so one
that overtakes another gains nothing: take any legal rows and, for every stage and kind on a rank,
hand the times out again in the order of the micro-batches. If x_i + d <= y_i for all i, the same
holds for the sorted x and y, so everything still comes after what it waits for; and what a rank
keeps depends only on how many F, I and W of each stage are done. So here all actions of one stage
and kind run in the order of the micro-batches (in two-way placements: of those of one way).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from math import inf

from minipipe.actions import Action, ScheduleError
from minipipe.bounds import lower_bound
from minipipe.check import memory_peaks
from minipipe.costs import Costs, Number, action_time, checked, common_scale, decimal, is_number
from minipipe.schedule import Schedule
from minipipe.schedules import SCHEDULES, build
from minipipe.simulate import simulate

PLACEMENTS = ("straight", "loop", "v", "mirrored")
_MOST = 20_000  # actions; beyond, neither a model nor a search is of use


@dataclass(frozen=True)
class Result:
    """Rows and how good they are; times in the unit of the costs, `seconds` of the clock.

    bound: no legal rows take less. proven: the makespan is the bound. method: what found them.
    start: the best named schedule under the same limit and placement, and its makespan, or None.
    argument: the part of the bound that `bounds.lower_bound` gives without a solver.
    """

    schedule: Schedule
    makespan: Number
    bound: Number
    proven: bool
    seconds: float
    method: str
    start: tuple[str, Number] | None = None
    argument: Number = 0

    @property
    def word(self) -> str:
        """"optimal" only where that is proven, else "best found"."""
        return "optimal" if self.proven else "best found"

    @property
    def gap(self) -> float:
        """(makespan - bound) / makespan."""
        return float((self.makespan - self.bound) / self.makespan) if self.makespan else 0.0


class Problem:
    """Which rank does what, and what it costs, as ints: `scale` of them are one unit of the costs.

    placement: "straight" (stage r on rank r), "loop" (`chunks` stages a rank, stage s on rank
    s mod ranks), "v" (stages r and 2 * ranks - 1 - r), or "mirrored" (stages r and ranks - 1 - r:
    two copies; the first half of the micro-batches runs down, the second up). split: I and W
    apart, else B. memory: the most that a rank may keep, in whole-share micro-batches, or None.
    Actions are numbered (kind * stages + stage) * micro-batches + micro-batch, kind 0 being F,
    1 I or B, 2 W. Raises ValueError (ScheduleError for sizes), naming argument and legal values.
    """

    def __init__(self, ranks: int, microbatches: int, placement: str = "straight", *,
                 chunks: int | None = None, split: bool = True, memory: Number | None = None,
                 costs: Costs | None = None):  # fmt: skip
        _sizes(ranks, microbatches, placement, chunks)
        if not isinstance(split, bool):
            raise TypeError(f"split={split!r} must be True (I and W apart) or False (B)")
        self.ranks, self.microbatches, self.placement = ranks, microbatches, placement
        self.chunks = (chunks or 2) if placement == "loop" else 2 if placement == "v" else 1
        self.stages = ranks * self.chunks
        self.kinds = "FIW" if split else "FB"
        self.down = (microbatches + 1) // 2 if placement == "mirrored" else microbatches
        if self.stages * microbatches * len(self.kinds) > _MOST:
            least = max(1, _MOST // (self.stages * len(self.kinds)))
            raise ScheduleError(f"microbatches={microbatches} makes more than {_MOST} actions; the "
                                f"nearest legal value is {least}")  # fmt: skip
        self.costs = exact_costs(Costs() if costs is None else checked(costs, ranks))
        if memory is not None and not is_number(memory):
            raise TypeError(f"memory={memory!r} must be a number, or None")
        if memory is not None and not 0 <= memory < inf:
            raise ScheduleError(f"memory={memory} must be finite and not negative")
        self.memory = memory if memory is None else decimal(memory)
        self._price()
        least = max(memory_peaks(self.serial, self.costs))
        if self.memory is not None and self.memory < least:
            raise ScheduleError(f"memory={memory} can't hold one micro-batch at a time; the least "
                                f"legal value is {least}")  # fmt: skip

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that runs a stage for a micro-batch."""
        if self.placement == "loop":
            return stage % self.ranks
        if self.placement == "v":
            return min(stage, self.stages - 1 - stage)
        return stage if microbatch < self.down else self.ranks - 1 - stage

    @cached_property
    def serial(self) -> Schedule:
        """One micro-batch after the other: the least memory that any rows need."""
        rows: list[list[Action]] = [[] for _ in range(self.ranks)]
        for m in range(self.microbatches):
            for stage in range(self.stages):
                rows[self.rank_of(stage, m)].append(Action(stage, "F", m))
            for stage in reversed(range(self.stages)):
                rows[self.rank_of(stage, m)] += [Action(stage, k, m) for k in self.kinds[1:]]
        return Schedule(rows, "serial")

    def _price(self) -> None:
        """Flat lists by action: time, row, what it waits for, what its message takes, memory."""
        costs, serial, count = self.costs, self.serial, self.microbatches
        time = action_time(costs, serial)
        kinds, stages = self.kinds, range(self.stages)
        times = {(k, s): time(Action(s, k, 0)) for k in kinds for s in stages}
        for (kind, stage), value in times.items():
            if kind != "W" and not value:
                raise ValueError(f"costs: the time of {kind} of stage {stage} must be more than 0")
        names = ("forward_size", "weight_size", "message_size")
        kept, weights, sizes = (costs.per_stage(name, serial) for name in names)
        change = {("F", s): kept[s] for s in stages} | {("B", s): -kept[s] for s in stages}
        change |= {("I", s): weights[s] - kept[s] for s in stages}
        change |= {("W", s): -weights[s] for s in stages}
        actions = [Action(s, k, m) for k in kinds for s in stages for m in range(count)]
        self.actions, self.row = actions, [self.rank_of(a.stage, a.microbatch) for a in actions]
        links, wires, waits, self.need = [], [], [], []
        for number, (stage, kind, m, _) in enumerate(actions):
            source, target = (stage - 1, stage + 1) if kind == "F" else (stage + 1, stage - 1)
            crosses = kind != "W" and 0 <= target < self.stages
            link = (self.row[number], self.rank_of(target, m)) if crosses else (0, 0)
            size = sizes[min(stage, target)] if crosses else 0
            latency, wire = costs.link(*link, size)
            links.append(link)
            waits.append(latency)
            wires.append(wire)
            needs = kind != "W" and 0 <= source < self.stages
            self.need.append(number + (source - stage) * count if needs else -1)
        self.scale = common_scale([*times.values(), *waits, *wires])
        unit = common_scale([*change.values(), self.memory or 0])
        self.links = links
        self.latency = [int(each * self.scale) for each in waits]
        self.wire = [int(each * self.scale) for each in wires]
        self.time = [int(times[a.kind, a.stage] * self.scale) for a in actions]
        self.change = [int(change[a.kind, a.stage] * unit) for a in actions]
        self.room = None if self.memory is None else int(self.memory * unit)

    def schedule(self, order: Sequence[Sequence[int]], name: str = "") -> Schedule:
        """Rows of action numbers as a Schedule."""
        return Schedule([[self.actions[number] for number in row] for row in order], name)

    def times(self, order: Sequence[Sequence[int]]) -> tuple[list[int], int] | None:
        """Starts by action and the makespan of rows of action numbers, as `simulate` has them,
        only faster; None if the rows are stuck."""
        time, need, links, wire, latency = self.time, self.need, self.links, self.wire, self.latency
        queues, free = any(wire), {}
        starts, arrival = [-1] * len(time), [-1] * len(time)
        at, now = [0] * self.ranks, [0] * self.ranks
        waiting, ready = {}, [*range(self.ranks)]
        while ready:
            rank = ready.pop()
            clock, row = now[rank], order[rank]
            for place in range(at[rank], len(row)):
                number = row[place]
                source = need[number]
                if source >= 0:
                    came = arrival[source]
                    if came < 0:
                        waiting[source] = rank
                        at[rank] = place
                        break
                    if came > clock:
                        clock = came
                starts[number] = clock
                clock += time[number]
                sent = clock
                if queues and wire[number]:
                    sent = max(clock, free.get(links[number], 0)) + wire[number]
                    free[links[number]] = sent
                arrival[number] = sent + latency[number]
                if number in waiting:
                    ready.append(waiting.pop(number))
            now[rank] = clock
        return None if waiting else (starts, max(now))

    @cached_property
    def argument(self) -> Number:
        """What `bounds.lower_bound` says for this placement, these costs and this limit; with an
        exchange share for rows with pairs too, which hide it."""
        rows = [list(row) for row in self.serial.rows]
        if self.costs.exchange and self.microbatches > 1:  # one pair, and the bound counts on more
            first, back = rows[0][0], next(a for a in rows[0] if a.kind in "BI" and a.microbatch)
            rows[0] = [a for a in rows[0] if a.kind == "F" or a[::2] != back[::2]]
            rows[0][0] = first._replace(overlapped=back._replace(kind="B"))
        return lower_bound(Schedule(rows), self.costs, self.memory)

    def fits(self, schedule: Schedule) -> bool:
        """Whether no rank keeps more than the limit."""
        return self.memory is None or max(memory_peaks(schedule, self.costs)) <= self.memory

    @cached_property
    def named(self) -> list[Schedule]:
        """The named schedules with this placement, within the limit; fused ones if not split."""
        own = {"chunks": self.chunks, "costs": self.costs, "memory_limit": self.memory}
        found = []
        for name, make in SCHEDULES.items():
            takes = inspect.signature(make).parameters
            try:
                schedule = build(name, ranks=self.ranks, microbatches=self.microbatches,
                                 **{k: v for k, v in own.items() if k in takes})  # fmt: skip
                if schedule.forward_only or schedule.asynchronous or (
                        len(self.kinds) == 2 and schedule.splits_backward):  # fmt: skip
                    continue
                if schedule.holders == self.serial.holders and self.fits(schedule):
                    found.append(schedule)
            except (ValueError, TypeError):  # not in this size, or not with these costs
                continue
        return found

    def order(self, schedule: Schedule) -> list[list[int]]:
        """The rows of a schedule with this placement as action numbers: pairs one by one, B as I
        and W where the backward is split, micro-batches of each stage and kind in order."""
        first = {(stage, self.rank_of(stage, m)): m for m in reversed(range(self.microbatches))
                 for stage in range(self.stages)}  # fmt: skip
        result = []
        for rank, row in enumerate(schedule.parts):
            done: dict[tuple[str, int], int] = {}
            result.append([])
            for stage, kind, _, _ in row:
                for each in "IW" if kind == "B" and len(self.kinds) == 3 else kind:
                    m = done[each, stage] = done.get((each, stage), first[stage, rank] - 1) + 1
                    code = self.kinds.index(each) * self.stages + stage
                    result[-1].append(code * self.microbatches + m)
        return result

    def best_named(self) -> tuple[Schedule, Number] | None:
        """The named schedule with the least makespan, and that; None if none is legal here."""
        timed = [(simulate(s, self.costs).makespan, n, s) for n, s in enumerate(self.named)]
        return min(timed)[::-2] if timed else None


def _sizes(ranks, microbatches, placement, chunks) -> None:
    for name, value in (("ranks", ranks), ("microbatches", microbatches), ("chunks", chunks)):
        if not (name == "chunks" and value is None) and (
                isinstance(value, bool) or not isinstance(value, int) or value < 1):  # fmt: skip
            raise ScheduleError(f"{name}={value!r} must be a whole number, at least 1")
    if placement not in PLACEMENTS:
        raise ValueError(f"placement={placement!r} must be one of {', '.join(PLACEMENTS)}")
    if chunks is not None and placement != "loop" and chunks != 1 + (placement == "v"):
        raise ScheduleError(f"chunks={chunks} goes with placement=loop; {placement} has its own")
    if placement == "mirrored" and ranks % 2:
        raise ScheduleError(f"ranks={ranks} must be even for placement=mirrored; the nearest legal "
                            f"value is {ranks + 1}")  # fmt: skip
    if placement == "mirrored" and microbatches < 2:
        raise ScheduleError(f"microbatches={microbatches} must be at least 2, one for each way, "
                            "for placement=mirrored; the nearest legal value is 2")  # fmt: skip


def exact_costs(costs: Costs) -> Costs:
    """The same costs without floats: 0.1 becomes 1/10."""
    changed = {}
    for field in fields(costs):
        value = getattr(costs, field.name)
        if isinstance(value, Mapping):
            changed[field.name] = {key: decimal(each) for key, each in value.items()}
        elif isinstance(value, Sequence):
            changed[field.name] = [*map(decimal, value)]
        else:
            changed[field.name] = decimal(value)
    return replace(costs, **changed)
