"""From rows to programs: the one place that decides who sends what to whom, and when.

A forward hands its activation to the next stage's forward, a backward (B or I) hands its gradient
to the stage before. Where both stages stand on one rank, that rank hands over by itself; else
there is a message. Simulator and engine run the same lowered program.
"""

from __future__ import annotations

from typing import NamedTuple

from minipipe.actions import Action
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
    """The lowered schedule as flat arrays, one entry an action, row after row.

    Messages and local hand-overs are numbered: `stage * M + m` is the activation of `<stage>F<m>`,
    `S * M + stage * M + m` the gradient that `<stage>B<m>` or `<stage>I<m>` computes.

    first: where each rank's actions begin, with the end behind. needs: the number of what an
    action waits for from another rank, or -1. gives: the number of what it sends to another rank,
    or -1. Both name the forward's part in a pair, whose backward part stands in pair_needs and
    pair_gives under the action's place. source, target: ranks by number, -1 where nobody is.
    """

    def __init__(self, schedule: Schedule, first, needs, gives, pair_needs, pair_gives, source,
                 target):  # fmt: skip
        self.schedule = schedule
        self.first: list[int] = first
        self.needs: list[int] = needs
        self.gives: list[int] = gives
        self.pair_needs: dict[int, int] = pair_needs
        self.pair_gives: dict[int, int] = pair_gives
        self.source: list[int] = source
        self.target: list[int] = target

    def message(self, number: int) -> Message:
        """The message with this number."""
        half = self.schedule.stages * self.schedule.microbatches
        stage, microbatch = divmod(number % half, self.schedule.microbatches)
        kind = "F" if number < half else "B"
        return Message(kind, stage, microbatch, self.source[number], self.target[number])

    def steps(self, rank: int) -> tuple[Step, ...]:
        """What a rank does, action by action, with the messages before and behind each."""

        def messages(one, pair, place) -> tuple[Message, ...]:
            numbers = (one[place], pair.get(place, -1))
            return tuple(self.message(number) for number in numbers if number >= 0)

        return tuple(
            Step(action, messages(self.needs, self.pair_needs, place),
                 messages(self.gives, self.pair_gives, place))
            for place, action in enumerate(self.schedule.rows[rank], self.first[rank])
        )  # fmt: skip

    def channel(self, source: int, target: int) -> tuple[Message, ...]:
        """All messages of one ordered pair of ranks, in the order in which they are sent: the
        receives are posted in this order too, since NCCL knows no tags."""
        return tuple(m for step in self.steps(source) for m in step.sends if m.target == target)

    def sent(self) -> list[int]:
        """The numbers of all messages, in the order of the rows of their senders."""
        if not self.pair_gives:
            return [number for number in self.gives if number >= 0]
        return [
            number
            for place, one in enumerate(self.gives)
            for number in (one, self.pair_gives.get(place, -1))
            if number >= 0
        ]


def lower(schedule: Schedule) -> Program:
    """Add the sends and receives that follow from the rows.

    Raises ScheduleError with all reasons (see `check`) if the rows are not a legal schedule, but
    for a cycle between ranks, which shows when the program is run or simulated.
    """
    program = _lower(schedule)
    if program is None:
        from minipipe.check import problems

        raise problems(schedule).error()
    return program


def _lower(schedule: Schedule) -> Program | None:
    """The program, or None as soon as the rows can't be legal; `check` then finds out why."""
    stages, microbatches = schedule.stages, schedule.microbatches
    half = stages * microbatches
    maker = [-1] * (2 * half)  # where in the flat arrays the maker of each number stands
    first, flat, weights = [0], [], set()
    count = 0
    for row in schedule.rows:
        begin = count
        for action in row:
            for stage, kind, microbatch, _ in (action,) if action[3] is None else action.parts:
                number = stage * microbatches + microbatch
                if kind == "F":
                    if maker[number] >= 0:
                        return None
                    maker[number] = count
                elif kind == "B" or kind == "I":
                    if maker[number] < begin or maker[half + number] >= 0:
                        return None
                    maker[half + number] = count
                    if kind == "I":
                        weights.add(number)
                elif kind == "W":
                    if number not in weights or maker[half + number] < begin:
                        return None
                    weights.discard(number)
                elif maker[number] < begin:
                    return None
            flat.append(action)
            count += 1
        first.append(count)
    made = sum(place >= 0 for place in maker)
    if weights or made not in (half, 2 * half) or -1 in maker[:half]:
        return None
    if schedule.recomputes or schedule.asynchronous or not _even(schedule):
        from minipipe.check import problems

        if problems(schedule).found:
            return None
    return _connect(schedule, first, flat, maker)


def _even(schedule: Schedule) -> bool:
    """Whether every stage from 0 on stands on equally many rows."""
    counts = {len(ranks) for ranks in schedule.holders.values()}
    return len(counts) == 1 and len(schedule.holders) == schedule.stages


def _connect(schedule: Schedule, first, flat, maker) -> Program | None:
    """Find for every action what it waits for, and who has it."""
    microbatches = schedule.microbatches
    half = schedule.stages * microbatches
    last = schedule.stages - 1
    source, target = [-1] * (2 * half), [-1] * (2 * half)
    needs, gives = [-1] * len(flat), [-1] * len(flat)
    pair_needs: dict[int, int] = {}
    pair_gives: dict[int, int] = {}
    owner = [rank for rank in range(schedule.ranks) for _ in range(first[rank], first[rank + 1])]
    for place, action in enumerate(flat):
        rank = owner[place]
        for stage, kind, microbatch, _ in (action,) if action[3] is None else action.parts:
            if kind == "F" and stage:
                wanted = (stage - 1) * microbatches + microbatch
            elif (kind == "B" or kind == "I") and stage != last:
                wanted = half + (stage + 1) * microbatches + microbatch
            else:
                continue
            at = maker[wanted]
            if owner[at] == rank:
                if at >= place:
                    return None
                continue
            source[wanted], target[wanted] = owner[at], rank
            if action[3] is None or kind == "F":
                needs[place] = wanted
            else:
                pair_needs[place] = wanted
            if wanted < half or flat[at][3] is None:
                gives[at] = wanted
            else:
                pair_gives[at] = wanted
    return Program(schedule, first, needs, gives, pair_needs, pair_gives, source, target)
