"""Emulated devices: each action takes the time that it would take on a device of its own.

Four ranks on two cores can't show a pipeline's speed. So the real work of an action is done first,
then the rank sleeps until its device would have finished. A device goes on where its last action
ended, unless it had to wait for a message.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.distributed as dist

from minipipe.actions import Action
from minipipe.costs import Costs, action_time, checked
from minipipe.engine.clock import Clock
from minipipe.lower import Message
from minipipe.schedule import Schedule

# A rank that was blocked for longer than this on a message has waited, and starts when the message
# is there; else its device starts where its last action ended. Fixed, and well under a slot.
TOLERANCE = 0.0003
# time.sleep wakes up late, by about this much.
OVERSHOOT = 0.0001


def unfit(pace, schedule: Schedule) -> str:
    """Let a step's pace, if any, take the schedule's slots; what is wrong with it, if anything."""
    if pace is None:
        return ""
    if not hasattr(pace, "attach"):
        return f"pace must be a Pace, not {type(pace).__name__}"
    try:
        pace.attach(schedule)
    except (TypeError, ValueError) as error:
        return f"pace: {error}"
    return ""


class Pace(Clock):
    """The clock of an emulated device.

    costs: times in seconds, sizes in bytes; latency and bandwidth are those of emulated links, on
    top of the real ones. overruns: how many actions took longer than their slot, of `actions`.
    """

    def __init__(self, costs: Costs):
        super().__init__()
        self.costs = checked(costs)
        self.actions = self.overruns = 0
        self._time = None
        self._planned = 0.0
        self._couriers: dict[int, _Courier] = {}

    def attach(self, schedule: Schedule) -> None:
        """Take the slots of a schedule's actions."""
        checked(self.costs, schedule.ranks)
        self._time = action_time(self.costs, schedule)

    @property
    def links(self) -> bool:
        """Whether links are emulated too."""
        return bool(self.costs.latency) or self.costs.bandwidth is not None

    def carry(self, message: Message, size: int, post: Callable[[], list]) -> _Carried:
        """Send a message of `size` bytes over an emulated link; a handle to wait for."""
        latency, wire = self.costs.link(message.source, message.target, size)
        if message.target not in self._couriers:
            self._couriers[message.target] = _Courier()
        return self._couriers[message.target].take(post, float(latency), float(wire))

    def close(self) -> None:
        """A step is over: end the threads of emulated links."""
        for courier in self._couriers.values():
            courier.stop()
        self._couriers.clear()

    def reset(self) -> None:
        self.actions = self.overruns = 0
        self._planned = 0.0

    def begin(self, blocked: float) -> float:
        now = time.perf_counter()
        return now if blocked > TOLERANCE or not self._planned else self._planned

    def run(self, parts: list[tuple[Action, int, Iterator]], start: float) -> float:
        """As `Clock.run`, every segment in a slot of its own. A device computes one thing at a
        time; what exchanges leaves it free."""
        free, due = start, [start] * len(parts)
        todo = list(range(len(parts)))
        left = [segments for _, segments, _ in parts]
        times = [float(self._time(action)) for action, _, _ in parts]
        while todo:
            # Of what can go on, first that with the most left to do.
            soonest = max(free, min(due[part] for part in todo))
            now = max((part for part in todo if due[part] <= soonest),
                      key=lambda part: left[part] * times[part] / parts[part][1])  # fmt: skip
            _, segments, work = parts[now]
            whole = times[now]
            exchange = whole * float(self.costs.exchange)
            done = next(work, self) is self
            compute = (whole - exchange) / segments
            if segments == 1:  # no place to hide it in
                compute = whole
            free = max(free, due[now]) + compute
            self._wait_until(free)
            left[now] -= 1
            if done:
                todo.remove(now)
                due[now] = free
            else:
                due[now] = free + exchange / (segments - 1)
        self._planned = max(due)
        return self._planned

    def _wait_until(self, deadline: float) -> None:
        left = deadline - time.perf_counter()
        self.actions += 1
        self.overruns += left < 0
        if left > OVERSHOOT:
            time.sleep(left - OVERSHOOT)


class _Courier:
    """An emulated link: holds each message for its time on the wire, one after the other, and
    for the latency, then sends it; a thread of its own, so that the rank can compute."""

    def __init__(self):
        self._queue: queue.SimpleQueue = queue.SimpleQueue()
        self._free = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def take(self, post: Callable[[], list], latency: float, wire: float) -> _Carried:
        self._free = max(self._free, time.perf_counter()) + wire
        carried = _Carried()
        self._queue.put((self._free + latency, post, carried))
        return carried

    def stop(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            due, post, carried = job
            time.sleep(max(0.0, due - time.perf_counter()))
            try:
                carried.works = post()
            except RuntimeError as error:
                carried.error = error
            carried.posted.set()


class _Carried:
    """The handle of a message that an emulated link carries."""

    def __init__(self):
        self.works: list = []
        self.error: RuntimeError | None = None
        self.posted = threading.Event()

    def wait(self) -> None:
        self.posted.wait()
        if self.error is not None:
            raise self.error
        for work in self.works:
            work.wait()


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
