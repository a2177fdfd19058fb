"""What actions, messages and kept activations cost: numbers in, exact numbers a stage out."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from numbers import Rational

from minipipe.actions import ScheduleError
from minipipe.schedule import Schedule

Number = int | float | Fraction
PerStage = Number | Sequence[Number]
_TIMES = {"F": "forward", "I": "backward_input", "W": "backward_weight", "R": "recompute",
          "U": "update"}  # fmt: skip
PerLink = Number | Mapping[tuple[int, int], Number] | None


def exact(value: Number) -> Number:
    """A fraction that is whole as an int; everything else as it is."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return value.numerator
    return value


def is_number(value) -> bool:
    """Whether it is a `Number`: True and False are none."""
    return isinstance(value, int | float | Fraction) and not isinstance(value, bool)


def decimal(value: Number) -> Number:
    """A float as the decimal that it is written as, so that 0.1 is 1/10."""
    if isinstance(value, float) and math.isfinite(value):
        return exact(Fraction(str(value)))
    return value


@dataclass(frozen=True)
class Costs:
    """Times and sizes; the unit of time is the caller's own, ints and fractions stay exact.
    What is kept in memory is always exact, so that 4 times 0.1 fit into 0.4.

    A number is the cost of one rank's whole share of the model (1/ranks of it) for one
    micro-batch, of which a stage takes ranks / stages; a list gives each stage's own cost as it
    is. B costs backward_input + backward_weight.

    forward, backward_input, backward_weight, recompute: times of F, I, W and R (R: as F).
    update: time of U. exchange: the share (0 … 1) of every action that is an exchange inside the
    stage, which an overlapped pair hides behind the other micro-batch's compute.
    latency: time of one message; bandwidth: message sizes a unit of time (None: no limit); both a
    number for all links, or a mapping from (source rank, target rank), other links being free.
    message_size: size of what crosses the border behind a stage; each gradient has it too.
    input_size, forward_size, weight_size: what a micro-batch keeps in memory as a stage's input
    (only where R computes the rest again), from F to the end of B or I, and from I to W.
    """

    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    latency: PerLink = 0
    bandwidth: PerLink = None
    exchange: Number = 0
    recompute: PerStage | None = None
    update: PerStage = 0
    message_size: PerStage = 0
    input_size: PerStage = 0
    forward_size: PerStage = 1
    weight_size: PerStage = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name, legal = getattr(self, field.name), field.name, Sequence
            if name in ("latency", "bandwidth"):
                legal = Mapping
                keys = value if isinstance(value, Mapping) else ()
                if not all(isinstance(k, tuple) and [*map(type, k)] == [int, int] for k in keys):
                    raise TypeError(f"{name} needs pairs (source rank, target rank) as keys")
                for source, target in keys:
                    if source == target or min(source, target) < 0:
                        raise ValueError(f"{name} has a link {source, target}: legal are two "
                                         "different ranks, numbered from 0")  # fmt: skip
            if name == "exchange" or not isinstance(value, legal) or isinstance(value, str | bytes):
                values = [value]
            else:
                values = value.values() if legal is Mapping else value
            for number in values:
                if number is None and field.default is None:
                    continue
                if not is_number(number):
                    more = " or a mapping from (source rank, target rank) to numbers"
                    raise TypeError(f"{name} must be a number{more if legal is Mapping else ''}, "
                                    f"not {number!r}")  # fmt: skip
                if not number >= 0 or number == math.inf:
                    raise ValueError(f"{name} must be finite and not negative, not {number}")
                if name == "bandwidth" and number == 0:
                    raise ValueError("bandwidth must be greater than 0 (None: no limit)")
        if self.exchange > 1:
            raise ValueError(f"exchange is a share between 0 and 1, not {self.exchange}")

    def per_stage(self, name: str, schedule: Schedule) -> list[Number]:
        """The costs called `name` of each stage of a schedule, exact."""
        if len(schedule.holders) < schedule.stages:
            there, last = len(schedule.holders), schedule.stages - 1
            raise ScheduleError(f"only {there} of the stages 0 to {last} are in the rows; check "
                                "says which are not")  # fmt: skip
        value = getattr(self, name)
        if name == "recompute" and value is None:
            return self.per_stage("forward", schedule)
        if name in ("input_size", "forward_size", "weight_size"):
            value = [*map(decimal, value)] if isinstance(value, Sequence) else decimal(value)
        if isinstance(value, Sequence):
            if len(value) != schedule.stages:
                raise ValueError(f"{name} has {len(value)} costs, but the schedule has "
                                 f"{schedule.stages} stages")  # fmt: skip
            return list(value)
        if name in ("message_size", "update"):
            return [value] * schedule.stages
        return [exact(value * Fraction(schedule.ranks, schedule.stages))] * schedule.stages

    def link(self, source: int, target: int, size: Number) -> tuple[Number, Number]:
        """Latency and time on the wire of a message of `size` from rank to rank; a rank hands
        over to itself without a message."""
        if source == target:
            return 0, 0
        latency, bandwidth = (value.get((source, target)) if isinstance(value, Mapping) else value
                              for value in (self.latency, self.bandwidth))  # fmt: skip
        wire = 0 if bandwidth is None or not size else Fraction(size) / Fraction(bandwidth)
        floats = isinstance(size, float) or isinstance(bandwidth, float)
        return latency or 0, float(wire) if floats else exact(wire)


def checked(costs: Costs, ranks: int | None = None) -> Costs:
    """The costs; TypeError for anything else, ValueError for links that `ranks` don't have."""
    if not isinstance(costs, Costs):
        what = "the class itself" if costs is Costs else type(costs).__name__
        raise TypeError(f"costs must be Costs(...), not {what}")
    for name in ("latency", "bandwidth"):
        value = getattr(costs, name)
        for link in value if ranks is not None and isinstance(value, Mapping) else ():
            if max(link) >= ranks:
                raise ValueError(f"{name} has a link {link}, but with {ranks} ranks the ranks are "
                                 f"0 to {ranks - 1}")  # fmt: skip
    return costs


def given(schedule: Schedule, costs: Costs | None) -> Costs:
    """The costs, or the default ones; TypeError where arguments are not what they should be,
    ValueError for links between ranks that the schedule hasn't got."""
    if not isinstance(schedule, Schedule):
        raise TypeError(f"a Schedule is needed, not {type(schedule).__name__}; build makes one by "
                        "name, Schedule.parse from text")  # fmt: skip
    return Costs() if costs is None else checked(costs, schedule.ranks)


def pair_time(forward: Number, backward: Number, exchange: Number) -> Number:
    """Time of an overlapped pair: its exchange hides behind the other one's compute."""
    if not exchange:
        return forward + backward
    return exact(max((1 - exchange) * (forward + backward), forward, backward))


def stage_times(costs: Costs, schedule: Schedule) -> dict[str, list[Number]]:
    """The times of each kind of action, by stage."""
    times = {kind: costs.per_stage(name, schedule) for kind, name in _TIMES.items()}
    return times | {"B": [i + w for i, w in zip(times["I"], times["W"], strict=True)]}


def action_time(costs: Costs, schedule: Schedule) -> Callable:
    """A function from an action, or an overlapped pair, to its time."""
    times = stage_times(costs, schedule)

    def time(action) -> Number:
        stage, kind, _, other = action
        if other is None:
            return times[kind][stage]
        return pair_time(times["F"][stage], times["B"][other.stage], costs.exchange)

    return time


def common_scale(numbers) -> int:
    """The least factor that makes all fractions whole; 1 where a float is among them."""
    numbers = list(numbers)
    exact = all(isinstance(n, Rational) for n in numbers)
    return math.lcm(*(n.denominator for n in numbers)) if exact else 1
