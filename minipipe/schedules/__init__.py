"""Every schedule by name: `build("1f1b", ranks=4, microbatches=8)`."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable

from minipipe.actions import ScheduleError
from minipipe.schedule import Schedule
from minipipe.schedules.gpipe import gpipe
from minipipe.schedules.inference import inference
from minipipe.schedules.interleaved import breadth_first, interleaved
from minipipe.schedules.naive import naive
from minipipe.schedules.one_f_one_b import one_f_one_b

SCHEDULES: dict[str, Callable] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "breadth-first": breadth_first,
    "inference": inference,
}

_MOST = 10_000_000  # stages times micro-batches


def build(name: str, *, ranks: int, microbatches: int, **arguments) -> Schedule:
    """The rows of a named schedule.

    ranks, microbatches: at least 1. Further arguments are the schedule's own: chunks (stages a
    rank), group (micro-batches of one chunk in a row), recompute.
    Raises ScheduleError, naming the argument and its nearest legal value.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        near = difflib.get_close_matches(str(name), SCHEDULES, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ScheduleError(f"name '{name}' is no schedule: {', '.join(SCHEDULES)}{hint}")
    make = SCHEDULES[name]
    legal = inspect.signature(make).parameters
    for argument, value in arguments.items():
        if argument not in legal:
            takes = ", ".join(legal)
            raise ScheduleError(f"{name} takes no argument '{argument}'; it takes {takes}")
        if argument == "recompute" and not isinstance(value, bool):
            raise ScheduleError(f"recompute={value!r} must be True or False")
    given = {"ranks": ranks, "microbatches": microbatches, **arguments}
    for argument in ("ranks", "microbatches", "chunks", "group"):
        value = given.get(argument)
        if value is None and (argument == "group" or argument not in given):
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ScheduleError(f"{argument}={value!r} must be a whole number, at least 1")
    sizes = {name: given.get(name, 1) for name in ("ranks", "microbatches", "chunks")}
    largest = max(sizes, key=sizes.get)
    rest = math.prod(sizes.values()) // sizes[largest]
    if sizes[largest] * rest > _MOST:
        raise ScheduleError(
            f"{largest}={sizes[largest]} makes too many actions to handle; the nearest legal value "
            f"is {max(1, _MOST // rest)}"
        )
    label = name + "+recompute" if arguments.get("recompute") else name
    return Schedule(make(**given), label)
