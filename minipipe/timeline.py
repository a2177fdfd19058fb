"""When each action ran: one class for what was predicted and for what was measured."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import accumulate, islice, pairwise
from operator import sub
from typing import NamedTuple

from minipipe.actions import Action
from minipipe.costs import Number, exact
from minipipe.schedule import Schedule


class Span(NamedTuple):
    """One action of one rank, from `start` to `end`."""

    rank: int
    action: Action
    start: Number
    end: Number


class Bubble(NamedTuple):
    """The four bubbles in use (they differ, so every table and figure names its own).

    idle_over_total: 1 - busy / (ranks x makespan), as in GPipe and Chimera.
    idle_over_ideal: (makespan - ideal) / ideal, as in Megatron-LM and Llama 3.
    own_span: the largest over the ranks of (own span - busy) / own span, where a rank's own span
    goes from its first start to its last end: the rate of the Zero Bubble papers.
    time: makespan - ideal, in the unit of the timeline.
    """

    idle_over_total: Number
    idle_over_ideal: Number
    own_span: Number
    time: Number


class Waiting(NamedTuple):
    """A rank's idle time: before its first action, between its actions, and after its last."""

    fill: Number
    inside: Number
    drain: Number


def ratio(part: Number, whole: Number) -> Number:
    """part / whole, exact where both are; 0 of nothing is 0."""
    if not whole:
        return 0
    if isinstance(part, float) or isinstance(whole, float):
        return part / whole
    return exact(Fraction(part) / Fraction(whole))


Levels = Sequence[Sequence[tuple[Number, Number]]]


class Timeline:
    """Starts and ends of all actions of a schedule, on one clock that starts at 0.

    starts, ends: flat, in the order of the rows. levels: for each action what its rank keeps in
    memory during and after it, a list a rank; or a function that makes these lists when they are
    asked for, and `peaks` has each rank's largest. busy: the time that each rank works, where it is
    known already. origin: "predicted", "measured" or "emulated" (real processes, paced as devices
    of their own). time_unit: "" for the unit of the costs, "s" for seconds; memory_unit:
    "micro-batches" (whole-share) or "bytes".
    time_scale: what the stored times have to be divided by, so that exact times can be ints.
    """

    def __init__(self, schedule: Schedule, starts: Sequence[Number], ends: Sequence[Number],
                 levels: Levels | Callable[[], Levels], *, origin: str = "predicted",
                 time_unit: str = "", memory_unit: str = "micro-batches", time_scale: int = 1,
                 bytes_sent: Sequence[Number] = (), messages: int = 0,
                 transfers: Sequence[Number] = (), peaks: Sequence[Number] | None = None,
                 lower_bound: Number | None = None,
                 busy: Sequence[Number] | None = None):  # fmt: skip
        self.schedule = schedule
        self._levels, self._peaks, self._known_busy = levels, peaks, busy
        self.origin, self.time_unit, self.memory_unit = origin, time_unit, memory_unit
        self.bytes_sent = tuple(bytes_sent)
        self.messages = messages
        self.transfers = tuple(transfers)
        self.lower_bound = lower_bound
        self._starts, self._ends, self._scale = starts, ends, time_scale
        self._first = [0, *accumulate(map(len, schedule.rows))]

    def _time(self, stored: Number) -> Number:
        return stored if self._scale == 1 else exact(Fraction(stored, self._scale))

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """All actions with their times, rank after rank."""
        actions = ((rank, a) for rank, row in enumerate(self.schedule.rows) for a in row)
        times = zip(map(self._time, self._starts), map(self._time, self._ends), strict=True)
        return tuple(Span(*one, *time) for one, time in zip(actions, times, strict=True))

    def spans_of(self, rank: int) -> tuple[Span, ...]:
        """The actions of one rank, in its order."""
        if not 0 <= rank < self.schedule.ranks:
            raise IndexError(f"rank {rank}: the ranks are 0 to {self.schedule.ranks - 1}")
        return self.spans[self._first[rank] : self._first[rank + 1]]

    @cached_property
    def _makespan(self) -> Number:
        return max(self._ends[end - 1] for begin, end in pairwise(self._first) if end > begin)

    @cached_property
    def _busy(self) -> Sequence[Number]:
        if self._known_busy is not None:
            return self._known_busy
        took = map(sub, self._ends, self._starts)
        return [sum(islice(took, len(row))) for row in self.schedule.rows]

    @property
    def _own(self) -> list[tuple[Number, Number, Number]]:
        """Each rank's first start, last end (of nothing: the makespan), and busy time."""
        return [
            (self._starts[begin], self._ends[end - 1], busy) if end > begin else
            (self._makespan, self._makespan, 0)
            for (begin, end), busy in zip(pairwise(self._first), self._busy, strict=True)
        ]  # fmt: skip

    @property
    def makespan(self) -> Number:
        """Time from the first start to the last end, of all ranks."""
        return self._time(self._makespan)

    @property
    def busy(self) -> tuple[Number, ...]:
        """The time that each rank computes."""
        return tuple(map(self._time, self._busy))

    @property
    def ideal(self) -> Number:
        """Busy time of the busiest rank: the makespan without any bubble."""
        return self._time(max(self._busy))

    @cached_property
    def bubble(self) -> Bubble:
        """The four bubbles, each under its own name."""
        total, ideal = self._makespan, max(self._busy)
        own = (ratio(end - begin - busy, end - begin) for begin, end, busy in self._own)
        return Bubble(
            idle_over_total=ratio(total * self.schedule.ranks - sum(self._busy),
                                  total * self.schedule.ranks),
            idle_over_ideal=ratio(total - ideal, ideal),
            own_span=max(own),
            time=self._time(total - ideal),
        )  # fmt: skip

    @cached_property
    def waiting(self) -> tuple[Waiting, ...]:
        """Each rank's idle time, split into fill, inside and drain."""
        last = self._makespan
        parts = ((begin, end - begin - busy, last - end) for begin, end, busy in self._own)
        return tuple(Waiting(*map(self._time, part)) for part in parts)

    @cached_property
    def levels(self) -> Levels:
        """For every rank and action what the rank keeps during the action, and after it."""
        return self._levels() if callable(self._levels) else self._levels

    @cached_property
    def peak_activations(self) -> tuple[Number, ...]:
        """The most that each rank keeps at once, in `memory_unit`."""
        if self._peaks is not None:
            return tuple(self._peaks)
        return tuple(max((during for during, _ in levels), default=0) for levels in self.levels)

    def memory_curve(self, rank: int) -> tuple[tuple[Number, Number], ...]:
        """(time, kept from then on) of one rank, in `memory_unit`."""
        curve: list[tuple[Number, Number]] = [(0, 0)]
        for span, (during, after) in zip(self.spans_of(rank), self.levels[rank], strict=True):
            curve += [(span.start, during), (span.end, after)]
        return tuple(curve)
