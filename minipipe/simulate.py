"""Predict a run: event by event over the lowered program, exact."""

from collections.abc import Iterator
from functools import partial
from itertools import chain

from minipipe.actions import Action
from minipipe.bounds import lower_bound
from minipipe.check import memory_levels, memory_peaks, problems
from minipipe.costs import Costs, Number, action_time, common_scale, exact, given
from minipipe.lower import Program, lower
from minipipe.schedule import Schedule
from minipipe.timeline import Timeline


def simulate(schedule: Schedule | Program, costs: Costs | None = None) -> Timeline:
    """Run the lowered rows on paper; a rank computes one action at a time, in its row's order.

    A message leaves at the end of its action (of the pair), follows the one before it on its link,
    and arrives after its time on the wire and the latency; sending takes no rank's time.
    Integers and fractions stay exact. Raises ScheduleError with the reasons if the rows are not
    legal, or if they would hang: then with who waits for whom.
    """
    costs = given(schedule.schedule if isinstance(schedule, Program) else schedule, costs)
    program = schedule if isinstance(schedule, Program) else lower(schedule)
    schedule = program.schedule
    sizes = costs.per_stage("message_size", schedule)
    routes = program.routes()
    ways = {}
    bytes_sent, transfers = [0] * schedule.ranks, [0] * schedule.ranks
    for (kind, stage, source, target), count in routes.items():
        # What crosses the border behind a stage has its size; a gradient crosses the one before.
        size = sizes[stage if kind == "F" else stage - 1]
        way = ways[kind, stage, source, target] = costs.link(source, target, size)
        bytes_sent[source] += size * count
        transfers[source] += sum(way) * count
    *prices, scale = _prices(program, costs, ways)
    starts, ends, busy, finished = _run(program, *prices)
    if not finished:
        raise problems(schedule).error()
    return Timeline(
        schedule, starts, ends, partial(memory_levels, schedule, costs),
        peaks=memory_peaks(schedule, costs, program), time_scale=scale, bytes_sent=bytes_sent,
        transfers=map(exact, transfers), messages=routes.total(), busy=busy,
        lower_bound=lower_bound(schedule, costs),
    )  # fmt: skip


def _prices(program: Program, costs: Costs, ways: dict) -> tuple[list, dict, list, int]:
    """Times by code, times a scale that makes exact ones ints: of the actions, of the pairs (by
    their forward), of the messages (latency, time on the wire, link; empty without); the scale."""
    count, time = program.schedule.microbatches, action_time(costs, program.schedule)
    keys = list(program.code)
    times = [time(Action(stage, kind, 0)) for kind, stage in keys]
    both = {(code // count, other // count) for code, other in program.paired.items()}
    pairs = {(one, other): time(Action(keys[one][1], "F", 0, Action(keys[other][1], "B", 0)))
             for one, other in both}  # fmt: skip
    scale = common_scale(chain(times, pairs.values(), *ways.values()))

    def scaled(value: Number) -> Number:
        return int(value * scale) if scale > 1 else value

    delays: list = []
    ways = {key: (*map(scaled, way), key[2:]) for key, way in ways.items() if any(way)}
    for kind, stage in keys if ways else ():
        target = stage + 1 if kind == "F" else stage - 1
        if kind in "FBI" and 0 <= target < program.schedule.stages:
            links = zip(program.ranks(stage), program.ranks(target), strict=True)
            delays += [ways.get(("F" if kind == "F" else "B", stage, *link)) for link in links]
        else:
            delays += [None] * count
    pairs = {code: scaled(pairs[code // count, other // count])
             for code, other in program.paired.items()}  # fmt: skip
    return [t for value in times for t in [scaled(value)] * count], pairs, delays, scale


def _run(program: Program, times, pairs, delays) -> tuple[list, list, list, bool]:
    """Starts and ends of all actions in the order of the rows, each rank's time of work, and
    whether all of them ran."""
    paired, ranks = program.paired, range(program.schedule.ranks)
    needs = [need for key in program.code for need in program.needs(*key)]
    arrival: list = [None] * len(needs) + [0]  # by code; the last is what waits for nothing
    waiting: dict[int, int] = {}  # code -> the rank that waits for it
    free: dict = {}  # by link
    starts: list = [None] * program.first[-1]
    ends: list = [None] * program.first[-1]
    busy: list[Number] = [0] * len(ranks)

    def send(code: int, now: Number) -> None:
        if delays and delays[code]:
            latency, wire, link = delays[code]
            if wire:
                now = free[link] = max(now, free.get(link, now)) + wire
            now += latency
        arrival[code] = now
        if code in waiting:
            ready.append(waiting.pop(code))

    def runs(rank: int) -> Iterator[None]:
        """One rank's program; yields where it has to wait."""
        now = worked = 0
        places, codes = range(*program.first[rank : rank + 2]), program.codes[rank]
        for place, code, need, time in zip(places, codes, map(needs.__getitem__, codes),
                                           map(times.__getitem__, codes), strict=True):  # fmt: skip
            if arrival[need] is None:
                waiting[need] = rank
                yield
            if arrival[need] > now:
                now = arrival[need]
            if paired and code in paired:
                time, need = pairs[code], needs[paired[code]]
                if arrival[need] is None:
                    waiting[need] = rank
                    yield
                now = max(now, arrival[need])
            starts[place] = now
            worked += time
            now += time
            ends[place] = now
            if delays:
                send(code, now)
            else:
                arrival[code] = now
                if code in waiting:
                    ready.append(waiting.pop(code))
            if paired and code in paired:
                send(paired[code], now)
        busy[rank] = worked

    running = [runs(rank) for rank in ranks]
    ready = list(ranks)
    while ready:
        next(running[ready.pop()], None)
    return starts, ends, busy, not waiting
