"""From rows to programs: the one place that decides who sends what to whom, and when.

A forward hands its activation to the next stage's forward, a backward (B or I) hands its gradient
to the stage before. Where both stages stand on one rank, that rank hands over by itself; else
there is a message. Simulator and engine run the same lowered program.
"""

from bisect import bisect_right
from collections import Counter
from itertools import accumulate, chain
from operator import ge, lt
from typing import NamedTuple

from minipipe.actions import Action
from minipipe.check import problems
from minipipe.costs import given
from minipipe.schedule import Schedule


class Message(NamedTuple):
    """The activation (`kind` F) that `stage` computed for the next stage, or the gradient (`kind`
    B) that it computed for the stage before, on its way from rank `source` to rank `target`."""

    kind: str
    stage: int
    microbatch: int
    source: int
    target: int

    def __str__(self) -> str:
        what = "activation" if self.kind == "F" else "gradient"
        return f"the {what} of {self.stage}{self.kind}{self.microbatch}"


class Step(NamedTuple):
    """One action of a rank's program, the messages that it waits for and those that it sends."""

    action: Action
    receives: tuple[Message, ...]
    sends: tuple[Message, ...]


class Program:
    """The lowered schedule, flat: every single action is known by its code, an int.

    code: (kind, stage) -> the code of its micro-batch 0; those of the others follow on it.
    first: where each rank's row begins in the joined rows, with the end behind. codes: those of
    each rank's actions, of the forwards in pairs; paired: the code of the backward behind such a
    forward. place: by code, where the action stands in the joined rows, or -1.
    """

    def __init__(self, schedule: Schedule):
        self.schedule = schedule
        self.first = [0, *accumulate(map(len, schedule.rows))]
        stages, microbatches = schedule.stages, schedule.microbatches
        kinds = sorted({kind for count in schedule.counts for kind, _ in count} | {*"FB"})
        keys = [(kind, stage) for kind in kinds for stage in range(stages)]
        self.code = {key: number * microbatches for number, key in enumerate(keys)}
        base = {kind: [self.code[kind, stage] for stage in range(stages)] for kind in kinds}
        self.codes = [[base[kind][stage] + m for stage, kind, m, _ in row]
                      for row in schedule.rows]  # fmt: skip
        self.paired: dict[int, int] = {}
        if schedule.has_pairs:
            actions = (action for row in schedule.rows for action in row)
            for code, (_, _, _, other) in zip(chain(*self.codes), actions, strict=True):
                if other is not None:
                    self.paired[code] = base[other.kind][other.stage] + other.microbatch
        places = self.place = [-1] * (len(keys) * microbatches)
        for place, code in enumerate(chain(*self.codes)):
            places[code] = place
        for code, other in self.paired.items():
            self.place[other] = self.place[code]

    def places(self, kind: str, stage: int) -> list[int]:
        """Where the actions of one kind and stage stand, by micro-batch; -1 for none."""
        microbatches = self.schedule.microbatches
        begin = self.code.get((kind, stage))
        return [-1] * microbatches if begin is None else self.place[begin : begin + microbatches]

    def ranks(self, stage: int, places: list[int] | None = None) -> list[int]:
        """The rank that runs a stage, by micro-batch; or that of some of its places."""
        holders = self.schedule.holders[stage]
        if len(holders) == 1:
            return list(holders) * self.schedule.microbatches
        places = self.places("F", stage) if places is None else places
        return [bisect_right(self.first, place) - 1 for place in places]

    def needs(self, kind: str, stage: int) -> list[int]:
        """What the actions of one kind and stage wait for, by micro-batch: the code of another
        action, or len(place) for nothing."""
        back = kind in "BI"
        source = stage + 1 if back else stage - 1
        if kind not in "FBI" or not 0 <= source < self.schedule.stages:
            return [len(self.place)] * self.schedule.microbatches
        made = self.code["B" if back else "F", source]
        codes = range(made, made + self.schedule.microbatches)
        halves = self.code.get(("I", source))
        if not back or halves is None:
            return list(codes)
        return [code if self.place[code] >= 0 else code - made + halves for code in codes]

    def routes(self) -> Counter[tuple[str, int, int, int]]:
        """How many messages there are of each kind and stage, from and to which rank."""
        routes: Counter[tuple[str, int, int, int]] = Counter()
        for stage in range(self.schedule.stages - 1):
            one, other = self.schedule.holders[stage], self.schedule.holders[stage + 1]
            if len(one) == len(other) == 1:
                pairs = {one + other: self.schedule.microbatches}
            else:
                pairs = Counter(zip(self.ranks(stage), self.ranks(stage + 1), strict=True))
            for (one, other), count in pairs.items():
                if one != other:
                    routes["F", stage, one, other] = count
                    if not self.schedule.forward_only:
                        routes["B", stage + 1, other, one] = count
        return routes

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What a rank does, action by action, with the messages before and behind each."""
        where = {stage: self.ranks(stage) for stage in range(self.schedule.stages)}
        last = self.schedule.stages - 1
        steps = []
        for action in self.schedule.rows[rank]:
            receives, sends = [], []
            for stage, kind, m, _ in action.parts:
                if kind not in "FBI":
                    continue
                back, forth = (-1, 1) if kind == "F" else (1, -1)
                kind = "F" if kind == "F" else "B"
                source, target = stage + back, stage + forth
                if 0 <= source <= last and where[source][m] != rank:
                    receives.append(Message(kind, source, m, where[source][m], rank))
                if 0 <= target <= last and where[target][m] != rank:
                    sends.append(Message(kind, stage, m, rank, where[target][m]))
            steps.append(Step(action, tuple(receives), tuple(sends)))
        return tuple(steps)

    def channel(self, source: int, target: int) -> tuple[Message, ...]:
        """All messages of one ordered pair of ranks, in the order in which they are sent: the
        receives are posted in this order too, since NCCL knows no tags."""
        return tuple(m for step in self.steps(source) for m in step.sends if m.target == target)


def lower(schedule: Schedule) -> Program:
    """Add the sends and receives that follow from the rows.

    Raises ScheduleError with all reasons (see `check`) if the rows are not a legal schedule, but
    for actions that wait in a cycle, or for a later one on their own rank: that shows in `check`
    and when the program is simulated.
    """
    given(schedule, None)
    # Counted first: a table with gaps, such as 0F999999999, must not become lists of that size.
    full = schedule.stages * schedule.microbatches <= sum(map(len, schedule.parts))
    if full and not schedule.asynchronous:
        program = Program(schedule)
        if _legal(program):
            return program
    found = problems(schedule)
    if found:
        raise found.error()
    return Program(schedule)


def _legal(program: Program) -> bool:
    """Whether the rows are legal but for cycles, in next to no time: whole lists of places are
    compared, one for each kind and stage. `problems` then finds out what is wrong."""
    schedule, count = program.schedule, program.schedule.microbatches
    copies = {len(ranks) for ranks in schedule.holders.values()}
    placed = len(program.place) - program.place.count(-1)
    if (placed < sum(map(len, schedule.parts)) or len(copies) > 1
            or len(schedule.holders) < schedule.stages):  # fmt: skip
        return False
    if any((code - other) % count == 0 for code, other in program.paired.items()):
        return False
    for stage in range(schedule.stages):
        forward, whole, inputs, weights, again = (program.places(k, stage) for k in "FBIWR")
        split = inputs.count(-1)
        fused = split == count  # no I of this stage: neither has it a W, or the counts differ
        gradients = whole if fused else list(map(max, whole, inputs))
        done = gradients if fused else list(map(max, gradients, weights))
        ends = [forward] if schedule.forward_only else [forward, done]
        if schedule.recomputes:
            if not all(f < r < g or r < 0 for f, r, g in
                       zip(forward, again, gradients, strict=True)):  # fmt: skip
                return False
            ends.append(list(map(max, forward, again)))
        if -1 in forward or copies != {1} and len({
            tuple(program.ranks(stage, places)) for places in ends
        }) > 1:  # fmt: skip
            return False
        if not schedule.forward_only and not (
            all(map(lt, forward, gradients)) and whole.count(-1) + split == count
            and weights.count(-1) == split and (fused or all(map(ge, weights, inputs)))
        ):  # fmt: skip
            return False
    return True
