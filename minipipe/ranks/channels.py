"""Process groups for messages between two ranks: a connection of its own for each direction."""

from __future__ import annotations

import contextlib
import time
from datetime import timedelta

import torch
import torch.distributed as dist

# Tags: what goes between stages, what all ranks tell each other, and what is never sent.
MESSAGE, EXCHANGE, NOBODY = 0, 1, 99


_made: list[Channels] = []


def channels() -> Channels:
    """Those of the ranks' process group, made by all ranks at the same time when first asked for.
    All Pipelines share them: so ranks that use different ones can tell each other."""
    if not _made or _made[0].world is not dist.group.WORLD:
        _made[:] = [Channels()]
    return _made[0]


def collective_device() -> torch.device:
    """Where tensors have to be for collective operations."""
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")


class Channels:
    """Sends and receives of this rank; made alike, and at the same time, on every rank.

    NCCL runs all messages of one communicator in one order, so each ordered pair of ranks gets a
    communicator. gloo would do with one group, but a connection that carries both directions makes
    its thread spin while the rank sends: a group for messages to higher ranks and one for messages
    to lower ones halve the time of a step of many small messages.
    """

    def __init__(self):
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.nccl = dist.get_backend() == "nccl"
        everyone = list(range(self.ranks))
        self.world = self._up = dist.group.WORLD
        self._down = self._up if self.nccl or self.ranks == 1 else dist.new_group(everyone)
        self._pairs: dict[tuple[int, int], object] = {}
        self.pipelines = 0  # how many have used them

    def connect(self, edges: list[tuple[int, int]], device: torch.device) -> None:
        """Make the connections of these ordered pairs, one after the other and in the same order
        on every rank, so that no first use can block another."""
        probe = torch.zeros(1, device=device)
        for source, target in edges:
            if self.nccl and (source, target) not in self._pairs:
                self._pairs[source, target] = dist.new_group([source, target])
            if self.rank == source:
                self.send(target, probe).wait()
            elif self.rank == target:
                self.receive(source, probe).wait()

    def send(self, target: int, tensor: torch.Tensor, tag: int = MESSAGE):
        """Begin to send; the handle has to be kept and waited for."""
        if self.nccl:
            return self._pairs[self.rank, target].send([tensor], int(target > self.rank), tag)
        group = self._up if target > self.rank else self._down
        return group.send([tensor], target, tag)

    def receive(self, source: int, buffer: torch.Tensor, tag: int = MESSAGE):
        """Begin to receive into a buffer; the handle has to be kept and waited for."""
        if self.nccl:
            return self._pairs[source, self.rank].recv([buffer], int(source > self.rank), tag)
        group = self._up if source < self.rank else self._down
        return group.recv([buffer], source, tag)

    def exchange(self, own: torch.Tensor) -> torch.Tensor:
        """The vectors [n] of all ranks as [ranks, n].

        On gloo rank 0 collects and hands round, which takes a third of its all-gather's time.
        """
        if self.nccl:
            own = own.cuda()
            everyone = [torch.empty_like(own) for _ in range(self.ranks)]
            dist.all_gather(everyone, own)
            return torch.stack(everyone).cpu()
        table = own.new_empty((self.ranks, *own.shape))
        if self.rank:
            self._wait([self.receive(0, table, EXCHANGE), self.send(0, own, EXCHANGE)])
        else:
            first, *others = table.unbind()
            first.copy_(own)
            self._wait([self.receive(r, row, EXCHANGE) for r, row in enumerate(others, 1)])
            self._wait([self.send(r, table, EXCHANGE) for r in range(1, self.ranks)])
        return table

    def clock_offset(self, rounds: int = 10) -> float:
        """Seconds that rank 0's clock is ahead of this rank's, from the fastest of some rounds
        there and back; for ranks on several machines, whose clocks started at different times."""
        best, offset = float("inf"), 0.0
        device = torch.device("cuda") if self.nccl else torch.device("cpu")
        mine = torch.zeros(1, dtype=torch.float64, device=device)
        self.connect([pair for r in range(1, self.ranks) for pair in ((0, r), (r, 0))], device)
        for other in range(1, self.ranks):
            for _ in range(rounds):
                if self.rank == 0:
                    self.receive(other, mine).wait()
                    self.send(other, torch.full_like(mine, time.perf_counter())).wait()
                elif self.rank == other:
                    left = time.perf_counter()
                    self.send(0, mine).wait()
                    self.receive(0, mine).wait()
                    there = float(mine)
                    back = time.perf_counter()
                    if back - left < best:
                        best, offset = back - left, there - (left + back) / 2
        return offset

    @staticmethod
    def _wait(works: list) -> None:
        for work in works:
            work.wait()

    def sever(self) -> None:
        """Break all connections, so that nobody waits for this rank any more."""
        if self.nccl:
            self._up.abort()
            return
        # gloo has no call for it, but a receive that runs out of time breaks the connections of
        # its group to all ranks at once; one from a rank that is gone already does not.
        for group in {self._up, self._down}:
            for other in range(self.ranks):
                if other != self.rank:
                    with contextlib.suppress(RuntimeError):
                        work = group.recv([torch.zeros(1)], other, NOBODY)
                        work.wait(timedelta(milliseconds=1))
