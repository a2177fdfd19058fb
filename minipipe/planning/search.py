"""minipipe search --ranks 4 --microbatches 16 --costs F=1:2:1:1

Good rows in seconds, for sizes beyond certificates: from the best named schedules and from list
schedules (each rank takes the most urgent action that is ready), then simulated annealing with the
moves of job-shop search: an action on the longest chain changes places with what held it up.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator
from fractions import Fraction

from minipipe.check import check
from minipipe.costs import Costs, Number, exact
from minipipe.planning.problem import Problem, Result
from minipipe.simulate import simulate

Order = list[list[int]]
Progress = Callable[[Number | None, Number, float], None]  # best found, bound, seconds


def search(ranks: int, microbatches: int, placement: str = "straight", *,
           chunks: int | None = None, split: bool = True, memory: Number | None = None,
           costs: Costs | None = None, seconds: float | None = None, steps: int = 20_000,
           seed: int = 0, progress: Progress | None = None) -> Result:  # fmt: skip
    """Good rows for a placement, a memory limit and costs: never worse than any named schedule.

    placement, chunks, split, memory, costs: see `Problem`. steps: moves that are tried, the same
    rows every time for the same seed; seconds: stop then, however many were tried. The result is
    `proven` only where it meets `bounds.lower_bound`, and then the search ends at once. Times are
    in the unit of the costs. Raises ValueError (ScheduleError for sizes) naming the argument and
    what is legal.
    Moves: van Laarhoven, Aarts, Lenstra, Job shop scheduling by simulated annealing (1992).
    """
    began = time.monotonic()
    if steps < 0 or seconds is not None and not seconds > 0:
        raise ValueError(f"steps={steps} must be at least 0, and seconds={seconds} more than 0")
    problem = Problem(ranks, microbatches, placement, chunks=chunks, split=split, memory=memory,
                      costs=costs)  # fmt: skip
    named, bound = problem.best_named(), problem.argument

    def tell(span: int) -> None:
        if progress is not None:
            progress(exact(Fraction(span, problem.scale)), bound, time.monotonic() - began)

    order, _ = improve(problem, steps, seed, began + seconds if seconds else None, tell)
    schedule = problem.schedule(order, "best-found")
    check(schedule, memory_limit=problem.memory, costs=problem.costs)
    makespan = simulate(schedule, problem.costs).makespan
    if makespan == bound:
        schedule.name = "optimal"
    if named and named[1] < makespan:  # with pairs, which hide an exchange
        schedule, makespan = named
    start = (named[0].name, named[1]) if named else None
    return Result(schedule, makespan, bound, makespan == bound, time.monotonic() - began, "search",
                  start, bound)  # fmt: skip


def improve(problem: Problem, steps: int, seed: int = 0, deadline: float | None = None,
            tell: Callable[[int], None] | None = None) -> tuple[Order, int]:  # fmt: skip
    """The best rows found and their makespan in the problem's ints; see `search`. Stops as soon as
    the lower bound is met."""
    candidates, floor = [], math.ceil(problem.argument * problem.scale)
    for order in _starts(problem):
        timed = problem.times(order) if _legal(problem, order) else None
        if timed is not None:
            candidates.append((timed[1], len(candidates), order))
            if timed[1] <= floor:
                break
    candidates.sort()
    least, _, best = candidates[0]
    if tell is not None:
        tell(least)
    if least <= floor:
        return best, least
    distinct = list({span: order for span, _, order in reversed(candidates)}.values())[::-1][:3]
    for number, order in enumerate(distinct):
        for found, span in _anneal(problem, order, steps // len(distinct), seed + number, deadline):
            if span < least:
                best, least = found, span
                if tell is not None:
                    tell(least)
            if least <= floor:
                return best, least
    return best, least


def _starts(problem: Problem) -> Iterator[Order]:
    """Rows to begin with: the named ones, one micro-batch at a time, and list schedules."""
    yield problem.order(problem.serial)
    for schedule in problem.named:
        yield problem.order(schedule)
    for ahead in range(1, 2 * problem.ranks + 2):
        for slope in (0, 1, 2):
            order = _listed(problem, ahead, slope)
            if order:
                yield order


def _legal(problem: Problem, order: Order) -> bool:
    return all(_fits(problem, row) for row in order)


def _fits(problem: Problem, row: list[int]) -> bool:
    """Whether each action comes after its F and I, in the order of the micro-batches, and the
    rank never keeps more than the limit."""
    block, count = problem.stages * problem.microbatches, problem.microbatches
    change, room, level = problem.change, problem.room, 0
    done: dict[int, int] = {}
    for number in row:
        kind = number // count
        done[kind] = done.get(kind, 0) + 1
        if number >= block and done.get((number - block) // count, 0) < done[kind]:
            return False
        level += change[number]
        if room is not None and level > room:
            return False
    return True


def _listed(problem: Problem, ahead: int, slope: int) -> Order | None:
    """Rows of a list scheduler: whichever rank can begin first takes the I (or B) that is ready,
    else an F, if no more than `ahead` micro-batches (by `slope` fewer on each later stage) are
    under way there and memory suffices, else a W. None if it gets stuck."""
    block, count, last = problem.stages * problem.microbatches, problem.microbatches, problem.stages
    time_, delay = problem.time, [*map(sum, zip(problem.wire, problem.latency, strict=True))]
    rank_of, ranks = problem.rank_of, range(problem.ranks)
    types = [sorted({(kind * last + s, down) for s in range(last) for kind in range(
             len(problem.kinds)) for down in (True, False) if (down or problem.down < count)
             and rank_of(s, 0 if down else problem.down) == rank}) for rank in ranks]  # fmt: skip
    upto = {True: problem.down, False: count}
    following = {key: key[0] * count + (0 if key[1] else problem.down)
                 for each in types for key in each}  # fmt: skip
    ends: dict[int, int] = {}
    order: Order = [[] for _ in ranks]
    now, level = [0] * problem.ranks, [0] * problem.ranks

    def ready(rank: int) -> Iterator[tuple[int, int, int, tuple[int, bool]]]:
        for key in types[rank]:
            number = following[key]
            kind, stage = divmod(key[0], last)
            if number - key[0] * count >= upto[key[1]]:
                continue
            if problem.room is not None and level[rank] + problem.change[number] > problem.room:
                continue
            before = [problem.need[number], number - block if kind else -1]
            if any(each >= 0 and each not in ends for each in before):
                continue
            begun = number - following[(len(problem.kinds) - 1) * last + stage, key[1]] % count
            if not kind and begun - key[0] * count >= max(1, ahead * problem.chunks
                                                          - slope * stage // problem.chunks):
                continue
            start = max(now[rank], *(0 if each < 0 else ends[each] + (
                delay[each] if each == before[0] else 0) for each in before))  # fmt: skip
            yield start, (1, 0, 2)[kind], -stage, key

    for _ in range(block * len(problem.kinds)):
        choices = [(*option, rank) for rank in ranks for option in [min(ready(rank), default=None)]
                   if option]  # fmt: skip
        if not choices:
            return None
        start, _, _, key, rank = min(choices)
        number = following[key]
        following[key] += 1
        order[rank].append(number)
        level[rank] += problem.change[number]
        now[rank] = ends[number] = start + time_[number]
    return order


def _anneal(problem: Problem, order: Order, steps: int, seed: int, deadline: float | None,
            ) -> Iterator[tuple[Order, int]]:  # fmt: skip
    """Rows and their makespan, each time that they are better than before."""
    chance = random.Random(seed)
    starts, span = problem.times(order)
    least, heat = span, span * 0.01
    for step in range(steps):
        if deadline is not None and step % 64 == 0 and time.monotonic() > deadline:
            return
        moved = _move(problem, order, starts, span, chance)
        if moved is None:
            continue
        timed = problem.times(moved)
        if timed is None:
            continue
        now = heat * (1 - step / steps) ** 2 + 1e-9
        if timed[1] <= span or chance.random() < math.exp((span - timed[1]) / now):
            order, (starts, span) = moved, timed
            if span < least:
                least = span
                yield order, span


def _move(problem: Problem, order: Order, starts: list[int], span: int,
          chance: random.Random) -> Order | None:  # fmt: skip
    """One action of a longest chain put before, or behind, another action of its row."""
    rank, place = chance.choice(_critical(problem, order, starts, span))
    row = order[rank]
    jump = 1 if chance.random() < 0.5 else chance.randint(1, 2 * problem.ranks)
    source, target = place, max(0, place - jump)
    if chance.random() < 0.3:
        source, target = place - 1, min(place - 1 + jump, len(row) - 1)
    kinds = [number // problem.microbatches for number in row]
    kinds.insert(target, kinds.pop(source))
    following: dict[int, int] = {}
    for number in sorted(row):
        following.setdefault(number // problem.microbatches, number)
    changed = []
    for kind in kinds:
        changed.append(following[kind])
        following[kind] += 1
    if changed == row or not _fits(problem, changed):
        return None
    return [*order[:rank], changed, *order[rank + 1 :]]


def _critical(problem: Problem, order: Order, starts: list[int],
              span: int) -> list[tuple[int, int]]:  # fmt: skip
    """Rank and place of the actions that began when the one before them on the rank ended, along
    one chain from the end to the start of the step."""
    place = {number: (rank, at) for rank, row in enumerate(order) for at, number in enumerate(row)}
    time_, found = problem.time, []
    number = next(row[-1] for row in order if row and starts[row[-1]] + time_[row[-1]] == span)
    while True:
        rank, at = place[number]
        before = order[rank][at - 1] if at else -1
        if before >= 0 and starts[before] + time_[before] == starts[number]:
            found.append((rank, at))
            number = before
        elif problem.need[number] >= 0:
            number = problem.need[number]
        else:
            return found or [(rank, len(order[rank]) - 1)]
