"""Predict a run: event by event over the lowered program, exact."""

from __future__ import annotations

from minipipe.bounds import lower_bound
from minipipe.check import memory_levels, problems
from minipipe.costs import Costs, Number, action_time, common_scale
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
    program = schedule if isinstance(schedule, Program) else lower(schedule)
    schedule = program.schedule
    costs = costs or Costs()
    durations, delays, scale = _scaled(program, costs)
    starts, ends = _run(program, durations, delays)
    if starts is None:
        raise problems(schedule).error()
    sent = program.sent()
    sizes = costs.per_stage("message_size", schedule)
    bytes_sent, transfers = [0] * schedule.ranks, [0] * schedule.ranks
    if any(sizes) or costs.latency:
        half = schedule.stages * schedule.microbatches
        for number in sent:
            size = sizes[_border(program, number, half)]
            source, target = program.source[number], program.target[number]
            bytes_sent[source] += size
            transfers[source] += sum(costs.link(source, target, size))
    return Timeline(
        schedule, starts, ends, memory_levels(schedule, costs), time_scale=scale,
        bytes_sent=bytes_sent, transfers=transfers, messages=len(sent),
        lower_bound=lower_bound(schedule, costs),
    )  # fmt: skip


def _border(program: Program, number: int, half: int) -> int:
    """The stage behind whose border a message crosses: s for its activation, s - 1 for the
    gradient that stage s computed."""
    stage = number % half // program.schedule.microbatches
    return stage if number < half else stage - 1


def _scaled(program: Program, costs: Costs):
    """Durations of the actions and of the messages' ways, as ints where all are exact."""
    schedule = program.schedule
    time = action_time(costs, schedule)
    table: dict = {}
    keys = []
    for row in schedule.rows:
        for action in row:
            key = action[0], action[1], action[3] and action[3][0]
            keys.append(key)
            if key not in table:
                table[key] = time(action)
    half = schedule.stages * schedule.microbatches
    ways: dict[tuple[int, int, int], tuple[Number, Number]] = {}
    way_keys = [None] * (2 * half)
    if costs.latency or costs.bandwidth is not None:
        sizes = costs.per_stage("message_size", schedule)
        for number in program.sent():
            border = _border(program, number, half)
            key = way_keys[number] = program.source[number], program.target[number], border
            if key not in ways:
                ways[key] = costs.link(key[0], key[1], sizes[border])
    scale = common_scale([*table.values(), *(t for way in ways.values() for t in way)])
    if scale > 1:
        table = {key: int(value * scale) for key, value in table.items()}
        ways = {key: (int(a * scale), int(b * scale)) for key, (a, b) in ways.items()}
    delays = [ways[k] + k[:2] if k else None for k in way_keys] if ways else None
    return [table[key] for key in keys], delays, scale


def _run(program: Program, durations, delays):
    """Starts and ends of all actions, or (None, None) if some can never start."""
    needs, gives, first = program.needs, program.gives, program.first
    pair_needs, pair_gives = program.pair_needs, program.pair_gives
    arrival: list = [None] * len(program.source)
    waiting = [-1] * len(program.source)
    link_free: dict = {}
    starts: list = [None] * len(durations)
    ends: list = [None] * len(durations)
    position, free = first[:-1], [0] * program.schedule.ranks
    ready = [rank for rank in range(program.schedule.ranks) if first[rank] < first[rank + 1]]
    left = len(durations)

    def send(number: int, now: Number) -> None:
        if delays is None:
            arrival[number] = now
        else:
            latency, wire, source, target = delays[number]
            if wire:
                now = max(now, link_free.get((source, target), now)) + wire
                link_free[source, target] = now
            arrival[number] = now + latency
        if waiting[number] >= 0:
            ready.append(waiting[number])

    while ready:
        rank = ready.pop()
        place, now, end = position[rank], free[rank], first[rank + 1]
        while place < end:
            number = needs[place]
            if number >= 0:
                there = arrival[number]
                if there is None:
                    waiting[number] = rank
                    break
                if there > now:
                    now = there
            if pair_needs and place in pair_needs:
                there = arrival[pair_needs[place]]
                if there is None:
                    waiting[pair_needs[place]] = rank
                    break
                if there > now:
                    now = there
            starts[place] = now
            now += durations[place]
            ends[place] = now
            number = gives[place]
            if number >= 0:
                send(number, now)
            if pair_gives and place in pair_gives:
                send(pair_gives[place], now)
            place += 1
        left -= place - position[rank]
        position[rank], free[rank] = place, now
    return (None, None) if left else (starts, ends)
