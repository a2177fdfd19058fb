"""Every schedule by name: `build("1f1b", ranks=4, microbatches=8)`."""

import difflib
import inspect
import math
from collections.abc import Callable

from minipipe.actions import ScheduleError
from minipipe.schedule import Schedule
from minipipe.schedules.bidirectional import chimera, dualpipe, dualpipev
from minipipe.schedules.gpipe import gpipe
from minipipe.schedules.inference import inference
from minipipe.schedules.interleaved import breadth_first, interleaved
from minipipe.schedules.naive import naive
from minipipe.schedules.one_f_one_b import one_f_one_b
from minipipe.schedules.v_shape import v_half, v_min, zb_v
from minipipe.schedules.wave import hanayo
from minipipe.schedules.zero_bubble import zb_1p, zb_auto, zb_h1, zb_h2

SCHEDULES: dict[str, Callable] = {
    "naive": naive, "gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved,
    "breadth-first": breadth_first, "zb-h1": zb_h1, "zb-h2": zb_h2, "zb-1p": zb_1p,
    "zb-auto": zb_auto, "zb-v": zb_v, "v-half": v_half, "v-min": v_min, "dualpipe": dualpipe,
    "dualpipev": dualpipev, "chimera": chimera, "hanayo": hanayo, "inference": inference,
}  # fmt: skip
_MOST = 10_000_000  # stages times micro-batches
_SIZES = ("ranks", "microbatches", "chunks", "group", "waves")


def build(name: str, *, ranks: int, microbatches: int, **arguments) -> Schedule:
    """The rows of a named schedule.

    ranks, microbatches: at least 1. Further arguments are the schedule's own: chunks (stages a
    rank), group (micro-batches of one chunk in a row), waves, recompute, costs and memory_limit.
    Raises ScheduleError, naming the argument and its nearest legal value.
    """
    if not isinstance(name, str) or name not in SCHEDULES:
        near = difflib.get_close_matches(str(name), SCHEDULES, 1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise ScheduleError(f"name '{name}' is no schedule: {', '.join(SCHEDULES)}{hint}")
    make = SCHEDULES[name]
    legal = inspect.signature(make).parameters
    given = {"ranks": ranks, "microbatches": microbatches, **arguments}
    sizes = {}
    for argument, value in given.items():
        if argument not in legal:
            takes = ", ".join(legal)
            raise ScheduleError(f"{name} takes no argument '{argument}'; it takes {takes}")
        if argument == "recompute" and not isinstance(value, bool):
            raise ScheduleError(f"recompute={value!r} must be True or False")
        if argument in _SIZES and (argument, value) != ("group", None):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ScheduleError(f"{argument}={value!r} must be a whole number, at least 1")
            sizes[argument] = value if argument != "group" else 1
    largest = max(sizes, key=sizes.get)
    rest = math.prod(sizes.values()) // sizes[largest]
    if sizes[largest] * rest > _MOST:
        raise ScheduleError(f"{largest}={sizes[largest]} makes too many actions to handle; the "
                            f"nearest legal value is {max(1, _MOST // rest)}")  # fmt: skip
    label = name + "+recompute" if arguments.get("recompute") else name
    return Schedule(make(**given), label)
