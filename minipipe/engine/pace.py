"""Emulated devices: each action takes the time that it would take on a device of its own.

Four ranks on two cores can't show a pipeline's speed. So the real work of an action is done first,
then the rank sleeps until its device would have finished. A device goes on where its last action
ended, unless it had to wait for a message.
"""

from __future__ import annotations

import time
from statistics import median

import torch
import torch.distributed as dist

from minipipe.actions import Action
from minipipe.costs import Costs, action_time
from minipipe.lower import Message
from minipipe.schedule import Schedule

# A rank that was blocked for longer than this on a message has waited, and starts when the message
# is there; else its device starts where its last action ended. Fixed, and well under a slot.
TOLERANCE = 0.0003
# time.sleep wakes up late, by about this much.
OVERSHOOT = 0.0001


class Clock:
    """The real clock: an action starts when its inputs are there, and ends when it is done; on a
    GPU too, which is waited for."""

    def __init__(self, device: torch.device | None = None):
        self._gpu = device if device is not None and device.type == "cuda" else None

    def reset(self) -> None:
        """A step begins."""

    def begin(self, blocked: float) -> float:
        """The start of an action, in seconds, after `blocked` seconds of waiting for messages."""
        return time.perf_counter()

    def end(self, action: Action, start: float) -> float:
        """The end of the action that began at `start`."""
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        return time.perf_counter()


class Pace(Clock):
    """The clock of an emulated device.

    costs: times in seconds, sizes in bytes; latency and bandwidth are those of emulated links, on
    top of the real ones. overruns: how many actions took longer than their slot, of `actions`.
    """

    def __init__(self, costs: Costs):
        super().__init__()
        self.costs = costs
        self.actions = self.overruns = 0
        self._time = None
        self._planned = 0.0

    def attach(self, schedule: Schedule) -> None:
        """Take the slots of a schedule's actions."""
        self._time = action_time(self.costs, schedule)

    def delay(self, message: Message, size: int) -> tuple[float, float]:
        """Latency and time on the wire, in seconds, of an emulated link."""
        latency, wire = self.costs.link(message.source, message.target, size)
        return float(latency), float(wire)

    @property
    def delays(self) -> bool:
        """Whether links are emulated too."""
        return bool(self.costs.latency) or self.costs.bandwidth is not None

    def reset(self) -> None:
        self.actions = self.overruns = 0
        self._planned = 0.0

    def begin(self, blocked: float) -> float:
        now = time.perf_counter()
        return now if blocked > TOLERANCE or not self._planned else self._planned

    def end(self, action: Action, start: float) -> float:
        deadline = start + float(self._time(action))
        left = deadline - time.perf_counter()
        self.actions += 1
        self.overruns += left < 0
        if left > OVERSHOOT:
            time.sleep(left - OVERSHOOT)
        self._planned = deadline
        return deadline


def measure_latency(slot: float = 0.02, repeats: int = 15, size: int = 4096) -> float:
    """Seconds from the planned end of a paced action on one rank until its message of `size`
    bytes is there on the next rank, where all ranks send at once; the median of all ranks.

    Measured on its own, before a paced step, so that a prediction can take it into account. Every
    rank has to call it; one rank alone has no latency.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    if ranks == 1:
        return 0.0
    group, seen = dist.group.WORLD, []
    start = torch.tensor([time.perf_counter() + slot], dtype=torch.float64)
    dist.broadcast(start, 0)
    for repeat in range(repeats):
        arriving, leaving = torch.zeros(2, size, dtype=torch.uint8)
        receive = group.recv([arriving], (rank - 1) % ranks, 0)
        deadline = float(start) + repeat * slot
        left = deadline - time.perf_counter()
        if left > OVERSHOOT:
            time.sleep(left - OVERSHOOT)
        send = group.send([leaving], (rank + 1) % ranks, 0)
        receive.wait()
        seen.append(time.perf_counter() - deadline)
        send.wait()
    own = torch.tensor([median(seen)], dtype=torch.float64)
    everyone = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(everyone, own)
    return max(0.0, median(float(value) for value in everyone))
