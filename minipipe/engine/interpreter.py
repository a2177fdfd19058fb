"""Walks one rank's lowered program: an action, its messages before and behind it, the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch

from minipipe.actions import Action
from minipipe.engine.clock import Clock
from minipipe.engine.links import Links, Payload, describe, fits
from minipipe.engine.overlap import offered, run_offered
from minipipe.engine.stage import Stage, as_values
from minipipe.lower import Message, Program
from minipipe.memory import Meter
from minipipe.ranks.failure import PipelineError

# Receives are posted far ahead while their buffers take no more bytes than this.
SPARE = 1 << 20


@dataclass
class Work:
    """What one step needs besides the rows.

    inputs: for each micro-batch the values of stage 0, where this rank holds it. finish: for each
    micro-batch what becomes of the last stage's outputs (its loss), where this rank holds it.
    weights: what each micro-batch's loss counts. forms: the form of each activation and gradient
    by kind, stage and micro-batch, which `announce`d messages bring along.
    """

    inputs: list[tuple] | None
    single: bool
    finish: list[Callable] | None
    weights: list[float]
    forms: dict[tuple[str, int, int], Payload]
    announce: bool
    keep_graph: bool = True
    pieces: list[tuple] = field(default_factory=list)  # micro-batches of inputs and targets
    results: dict[int, torch.Tensor] = field(default_factory=dict)

    def form(self, message: Message) -> Payload:
        """The form of a message."""
        return self.forms[message[:3]]

    def learn(self, stage: int, microbatch: int, payload: Payload) -> None:
        """Remember the form of a stage's activation, from which that of its gradient follows."""
        self.forms["F", stage, microbatch] = payload
        self.forms["B", stage + 1, microbatch] = payload.gradients()


@dataclass
class Record:
    """When each action of a rank started and ended, and what was kept during and after it."""

    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    during: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    transfer: float = 0.0


class Interpreter:
    """Runs a rank's program, whatever its schedule: each action calls a stage, each message a link.

    Results are found by stage and micro-batch, never by the order in which they come.
    """

    def __init__(self, program: Program, rank: int, stages: dict[int, Stage], links: Links):
        self.schedule = program.schedule
        self.steps = program.steps(rank)
        self.stages, self.links = stages, links
        self.last = self.schedule.stages - 1
        self._values: dict[tuple[str, int, int], tuple] = {}
        sent = {m[:3] for step in self.steps for m in step.sends}
        parts = [part for step in self.steps for part in step.action.parts]
        self._handed = {p[:3] for p in parts if p.kind == "F"} - {(s, k, m) for k, s, m in sent}
        self._receives = [(place, m) for place, s in enumerate(self.steps) for m in s.receives]
        self._next = 0
        self._dropped = {(p.stage, p.microbatch) for p in parts if p.kind == "R"}
        self._split = {(p.stage, p.microbatch) for p in parts if p.kind == "I"}

    def run(self, work: Work, clock: Clock, meter: Meter | None = None) -> Record:
        """Do all actions of one step."""
        record, links, values = Record(), self.links, self._values
        for stage in self.stages.values():
            stage.meter = meter
            if work.keep_graph:
                stage.begin(work.announce)
        form, final = work.form, len(self.steps) - 1
        self._next = 0
        self._post(work, -1)
        clock.reset()
        for place, (action, receives, sends) in enumerate(self.steps):
            blocked = 0.0
            for message in receives:
                before = perf_counter()
                if work.announce:
                    links.receive_announced(message, form)
                values[message[:3]] = links.take(message)
                blocked += perf_counter() - before
            if meter is not None:
                meter.high = meter.level
            start = clock.begin(blocked)
            end = clock.run(self._parts(action, work), start)
            record.starts.append(start)
            record.ends.append(end)
            if meter is not None:
                record.during.append(meter.high)
                record.after.append(meter.level)
            for message in sends:
                links.send(message, *values.pop(message[:3]), work.announce and message.kind == "F")
            self._post(work, place)
            if sends and place < final:
                record.transfer += perf_counter() - end
        links.finish()
        return record

    def clear(self) -> None:
        """Let go of everything, after a step that failed."""
        self._values.clear()
        for stage in self.stages.values():
            stage.clear()

    def _post(self, work: Work, place: int) -> None:
        """Post the receives of the actions that follow: a message travels at once where somebody
        waits for it. Never later than an action ahead, and as far ahead as little memory allows.
        """
        if work.announce:
            return
        links, receives = self.links, self._receives
        while self._next < len(receives):
            due, message = receives[self._next]
            if due > place + 2 and links.bytes_posted > SPARE:
                return
            links.post(message, work.form)
            self._next += 1

    def _parts(self, action: Action, work: Work) -> list[tuple[Action, int, Iterator]]:
        """The single actions with their numbers of segments and their work; one work for both
        where the stages of a pair run it by a method of their own."""
        if action.overlapped is None:
            return [self._part(action, work)]
        stages = [self.stages[part.stage] for part in action.parts]
        dropped = (action.stage, action.microbatch) in self._dropped
        if not dropped and offered(*stages):
            works = [self._part(part, work, paired=True)[2] for part in action.parts]
            return [(action, 1, run_offered(*works))]
        return [self._part(part, work) for part in action.parts]

    def _part(self, part: Action, work: Work, paired: bool = False) -> tuple[Action, int, Iterator]:
        """One action, its number of segments, and its work, which stops at each exchange."""
        stage, microbatch = self.stages[part.stage], part.microbatch
        match part.kind:
            case "F":
                return part, stage.segments, self._forward(stage, microbatch, work, paired)
            case "B" | "I":
                return part, stage.segments, self._backward(stage, microbatch, work, paired)
            case "W":
                return part, 1, _call(stage.backward_weight, microbatch)
            case "R":
                return part, 1, _call(stage.recompute, microbatch)
            case kind:
                raise PipelineError(f"{part}: actions of kind {kind} can't be run yet")

    def _forward(self, stage: Stage, microbatch: int, work: Work,
                 paired: bool) -> Iterator[None]:  # fmt: skip
        number = stage.number
        if number == 0:
            values, single = work.inputs[microbatch], work.single
            needs = (False,) * len(values)
        else:
            values, payload = self._values.pop(("F", number - 1, microbatch))
            single = payload.single
            needs = payload.needs
            if work.announce:
                work.learn(number - 1, microbatch, payload)
        finish = work.finish[microbatch] if number == self.last and work.finish else None
        if work.keep_graph:
            outputs = yield from stage.forward_parts(
                microbatch, values, single, needs, finish,
                drop=(number, microbatch) in self._dropped,
                split=(number, microbatch) in self._split, paired=paired)  # fmt: skip
        else:
            outputs = stage.infer(values, single, finish)
        if number == self.last:
            work.results[microbatch] = outputs if not work.keep_graph else outputs.detach()
            return
        values, single = as_values(outputs)
        known = work.forms.get(("F", number, microbatch))
        payload = known if known and fits(known, values) else describe(values, single, number)
        values = tuple(map(stage.apart, values))
        if work.announce:
            work.learn(number, microbatch, payload)
        elif payload is not known and payload != known:
            raise PipelineError(
                f"stage {number} gives {_shapes(payload)} for micro-batch {microbatch}, in an "
                f"earlier step {_shapes(known)} for a batch of the same shape: what goes from "
                "stage to stage must not depend on the data"
            )
        if (number, "F", microbatch) in self._handed:
            values = tuple(v.detach().clone() if isinstance(v, torch.Tensor) else v for v in values)
        self._values["F", number, microbatch] = values, payload

    def _backward(self, stage: Stage, microbatch: int, work: Work,
                  paired: bool) -> Iterator[None]:  # fmt: skip
        number = stage.number
        if number == self.last:
            weight = torch.full_like(work.results[microbatch], work.weights[microbatch])
            gradients = [weight] * stage.wants(microbatch)
        else:
            gradients, _ = self._values.pop(("B", number + 1, microbatch))
        gradients = yield from stage.backward_parts(microbatch, gradients, paired)
        if number:
            form = work.forms["B", number, microbatch]
            self._values["B", number, microbatch] = tuple(gradients), form


def _call(function: Callable, microbatch: int) -> Iterator[None]:
    """The call as work without a stop."""
    function(microbatch)
    return
    yield


def _shapes(payload: Payload) -> str:
    return ", ".join(
        "None" if item.shape is None else f"{tuple(item.shape)} {str(item.dtype)[6:]}"
        for item in payload.items
    )
