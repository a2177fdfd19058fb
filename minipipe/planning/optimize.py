"""minipipe optimize --ranks 3 --microbatches 6 --placement v --memory 2

The rows with the least makespan, and the proof: CP-SAT of OR-Tools on start times. Rows without
overlapped pairs, recompute and updates; common start and common end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from fractions import Fraction
from math import ceil, gcd
from typing import TYPE_CHECKING

from minipipe.actions import ScheduleError
from minipipe.check import check
from minipipe.costs import Costs, Number, exact
from minipipe.planning.problem import Problem, Result
from minipipe.planning.search import improve
from minipipe.simulate import simulate

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel, IntVar

Progress = Callable[[Number | None, Number, float], None]  # best found, bound, seconds
_HORIZON = 2**40  # CP-SAT multiplies times; beyond, sums could overflow


def optimize(ranks: int, microbatches: int, placement: str = "straight", *,
             chunks: int | None = None, split: bool = True, memory: Number | None = None,
             costs: Costs | None = None, time_limit: float = 60, workers: int = 2,
             argument: bool = True, progress: Progress | None = None) -> Result:  # fmt: skip
    """The rows with the least makespan for a placement, a memory limit and costs, certified.

    placement, chunks, split, memory, costs: see `Problem`. time_limit: seconds for the solver;
    where it isn't enough, the result is not `proven` and `bound` says how far it may be from the
    optimum. workers: threads. argument: give the solver what `bounds.lower_bound` says; without it
    the solver's proof stands alone. progress: called with the best makespan (or None), the bound
    and the seconds so far. Times are in the unit of the costs. Raises ImportError without
    OR-Tools, ValueError (ScheduleError for sizes) naming the argument and what is legal.
    Model: start times, no overlap on a rank, precedences with latency, and for memory a cumulative
    resource; the micro-batches of a stage run in order, which loses nothing (see `problem`).
    """
    began = time.monotonic()
    cp_model = _solver_module()
    if not time_limit > 0 or workers < 1:
        raise ValueError(f"time_limit={time_limit} and workers={workers} must be greater than 0")
    problem = Problem(ranks, microbatches, placement, chunks=chunks, split=split, memory=memory,
                      costs=costs)  # fmt: skip
    if problem.costs.exchange:
        raise ValueError("costs: exchange is hidden by overlapped pairs, which optimize doesn't "
                         "make; legal is exchange=0")  # fmt: skip
    delays, named = _delays(problem), problem.best_named()
    order, span = improve(problem, steps=3000, deadline=began + time_limit / 4)
    known = problem.argument if argument else 0
    if progress is not None:
        progress(Fraction(span, problem.scale), known, time.monotonic() - began)
    model, starts = _model(cp_model, problem, delays, order, span, ceil(known * problem.scale))
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    watch = _Watch(cp_model, problem.scale, progress, began, Fraction(span, problem.scale), known)
    solver.best_bound_callback = watch.on_bound
    status = solver.solve(model, watch.solutions)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        order = _order(problem, [solver.value(start) for start in starts])
    elif status != cp_model.UNKNOWN:  # a legal order was given as a hint
        raise RuntimeError(f"CP-SAT says {solver.status_name(status)}: the model is wrong")
    bound = max(known, exact(Fraction(round(solver.best_objective_bound), problem.scale)))
    return _result(problem, order, bound, named, began, status)


def _solver_module():
    try:
        from ortools.sat.python import cp_model
    except ImportError:
        raise ImportError("optimize needs OR-Tools: pip install 'minipipe[optimize]'") from None
    return cp_model


def version() -> str:
    """The solver's name and version."""
    import ortools

    return f"OR-Tools {ortools.__version__} CP-SAT"


def _delays(problem: Problem) -> list[int]:
    """From the end of each action to the arrival of what it sends. Time on the wire is part of it
    where messages on a link can't meet, since the next action takes longer than one message."""
    shortest: dict[tuple[int, int], int] = {}
    for time_, link, (_, kind, _, _) in zip(
            problem.time, problem.links, problem.actions, strict=True):  # fmt: skip
        if kind != "W":
            shortest[link] = min(time_, shortest.get(link, time_))
    for wire, link in zip(problem.wire, problem.links, strict=True):
        if wire > shortest.get(link, wire):
            raise ValueError("costs: bandwidth lets messages queue on a link, which optimize has "
                             "no model for; legal are messages shorter than the actions that send "
                             "them")  # fmt: skip
    return [*map(sum, zip(problem.wire, problem.latency, strict=True))]


def _model(cp_model, problem: Problem, delays: list[int], order, span: int,
           known: int) -> tuple[CpModel, list]:  # fmt: skip
    """The model and its start variables; `order` with its makespan is the hint and the horizon."""
    if span > _HORIZON:
        raise ValueError("costs: the times have too fine a common unit; legal are a makespan of "
                         f"{_HORIZON} such units at most, not {span}")  # fmt: skip
    model = cp_model.CpModel()
    count, kinds, stages = problem.microbatches, len(problem.kinds), problem.stages
    starts: list[IntVar] = [model.new_int_var(0, span - t, "") for t in problem.time]
    ends = [start + t for start, t in zip(starts, problem.time, strict=True)]
    makespan = model.new_int_var(known, span, "makespan")
    model.minimize(makespan)
    busy = defaultdict(list)
    for number, start in enumerate(starts):
        interval = model.new_fixed_size_interval_var(start, problem.time[number], "")
        busy[problem.row[number]].append(interval)
        need = problem.need[number]
        if need >= 0:
            model.add(start >= ends[need] + delays[need])
        kind, rest = divmod(number, stages * count)
        if kind:  # I and B after their F, W after its I
            model.add(start >= ends[number - stages * count])
        if kind == kinds - 1:
            model.add(makespan >= ends[number])
        m = rest % count
        if m and m != problem.down:  # micro-batches in order, see the module `problem`
            model.add(start >= ends[number - 1])
    for intervals in busy.values():
        model.add_no_overlap(intervals)
    if problem.room is not None:
        _memory(model, problem, starts, ends, span)
    times, _ = problem.times(order)
    for start, value in zip(starts, times, strict=True):
        model.add_hint(start, value)
    return model, starts


def _memory(model: CpModel, problem: Problem, starts, ends, span: int) -> None:
    """What a rank keeps, from the start of an F to the end of its I and of its W (or B). In each
    stage what needs the room waits for what frees it, as micro-batches run in order; where a rank
    keeps things of several kinds, they also share the room."""
    block = problem.stages * problem.microbatches
    kept = defaultdict(list)
    for number in range(block):
        first, change = number, problem.change
        backward, final = number + block, number + (len(problem.kinds) - 1) * block
        whole = change[number]
        late = whole + change[backward] if final != backward else 0
        both = min(whole, late) if final != backward else whole
        spans = [(first, final, both)]
        if final != backward:
            spans += [(first, backward, whole - both), (backward, final, late - both)]
        kept[problem.row[number]] += [(a, b, size) for a, b, size in spans if size]
    for spans in kept.values():
        groups: dict[tuple, list] = defaultdict(list)
        for a, b, size in spans:
            way = a % problem.microbatches >= problem.down
            groups[a // problem.microbatches, way, b // block, size].append((a, b))
        for (*_, size), same in groups.items():
            for (_, freed), (needs, _) in zip(same, same[problem.room // size :], strict=False):
                model.add(starts[needs] >= ends[freed])
        if len(groups) > 1:
            intervals = []
            for a, b, _ in spans:
                lasts = model.new_int_var(0, span, "")
                intervals.append(model.new_interval_var(starts[a], lasts, ends[b], ""))
            unit = gcd(*(size for *_, size in spans))
            model.add_cumulative(intervals, [size // unit for *_, size in spans],
                                 problem.room // unit)  # fmt: skip


def _order(problem: Problem, starts: list[int]) -> list[list[int]]:
    """Rows by start; at the same moment what takes no time (a W) stands before what does."""
    rows: list[list[int]] = [[] for _ in range(problem.ranks)]
    for number in sorted(range(len(starts)), key=lambda n: (starts[n], problem.time[n], n)):
        rows[problem.row[number]].append(number)
    return rows


def _result(problem: Problem, order, bound: Number, named, began: float, status) -> Result:
    """The rows, checked and simulated again: nothing is taken from the solver on trust."""
    schedule = problem.schedule(order)
    check(schedule, memory_limit=problem.memory, costs=problem.costs)
    makespan = simulate(schedule, problem.costs).makespan
    if makespan < bound:
        raise ScheduleError(f"makespan {makespan} below the bound {bound}: the model is wrong")
    schedule.name = "optimal" if makespan == bound else "best-found"
    start = (named[0].name, named[1]) if named else None
    return Result(schedule, makespan, bound, makespan == bound, time.monotonic() - began,
                  version(), start, problem.argument)  # fmt: skip


class _Watch:
    """Tells `progress` of every better solution and every better bound."""

    def __init__(self, cp_model, scale: int, progress: Progress | None, began: float,
                 best: Number, bound: Number):  # fmt: skip
        self.scale, self.progress, self.began = scale, progress, began
        self.best, self.bound = best, bound
        watch = self

        class Solutions(cp_model.CpSolverSolutionCallback):
            def on_solution_callback(self) -> None:
                watch.on_solution(self.objective_value)

        self.solutions = Solutions()

    def on_solution(self, value: float) -> None:
        self.best = min(self.best, exact(Fraction(round(value), self.scale)))
        self._tell()

    def on_bound(self, value: float) -> None:
        self.bound = max(self.bound, exact(Fraction(round(value), self.scale)))
        self._tell()

    def _tell(self) -> None:
        if self.progress is not None:
            self.progress(self.best, self.bound, time.monotonic() - self.began)
