"""Every schedule at one size: what `minipipe show --all` puts into one table and one figure."""

from __future__ import annotations

import inspect

from minipipe.actions import ScheduleError
from minipipe.costs import Costs, Number, checked
from minipipe.schedule import Schedule
from minipipe.schedules import SCHEDULES, build
from minipipe.simulate import simulate
from minipipe.timeline import Timeline, ratio

# Families and the modules of minipipe.schedules that they are in, in the order of tables.
FAMILIES = {
    "one stage a rank": ("naive", "gpipe", "one_f_one_b"),
    "chunks in a loop": ("interleaved",),
    "zero bubble": ("zero_bubble",),
    "V shape": ("v_shape",),
    "waves": ("wave",),
    "two ways": ("bidirectional",),
    "asynchronous": ("asynchronous",),
    "forward only": ("inference",),
}
OWN = "own"


def family(schedule: Schedule) -> str:
    """The family of a named schedule; "own" for any other table."""
    make = SCHEDULES.get(schedule.name.split("+")[0])
    module = make.__module__.rpartition(".")[2] if make else ""
    return next((name for name, modules in FAMILIES.items() if module in modules), OWN)


def takes(name: str, argument: str) -> bool:
    """Whether a named schedule has an argument, such as chunks."""
    return argument in inspect.signature(SCHEDULES[name]).parameters


def by_family(timelines) -> list[Timeline]:
    """Timelines in the order of the families, within one in the given order."""
    order = [*FAMILIES, OWN]
    return sorted(timelines, key=lambda t: order.index(family(t.schedule)))


def everything(ranks: int, microbatches: int, costs: Costs | None = None,
               **own) -> tuple[list[Timeline], list[tuple[str, str]]]:  # fmt: skip
    """All named schedules simulated, by family, and (name, reason) of those that can't be.

    own: arguments such as chunks, for the schedules that take them.
    """
    costs = Costs() if costs is None else checked(costs, ranks)
    own = {"costs": costs, **own}
    timelines, refused = [], []
    for name in SCHEDULES:
        more = {key: value for key, value in own.items()
                if value not in (None, False) and takes(name, key)}  # fmt: skip
        try:
            schedule = build(name, ranks=ranks, microbatches=microbatches, **more)
            timelines.append(simulate(schedule, costs))
        except ScheduleError as error:
            refused.append((name, error.reasons[0]))
        except ValueError as error:  # a cost a stage, and not as many as this schedule has
            if not any(isinstance(value, list | tuple) for value in vars(costs).values()):
                raise
            refused.append((name, f"costs: {error}"))
    return by_family(timelines), refused


def distance(t: Timeline) -> dict[str, Number] | None:
    """How far the makespan is above the lower bound: as a time, and as a share of the bound."""
    if t.lower_bound is None:
        return None
    above = t.makespan - t.lower_bound
    return {"time": above, "share": ratio(above, t.lower_bound)}
