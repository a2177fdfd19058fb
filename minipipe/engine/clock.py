"""The clock by which the actions of a rank are run and recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from minipipe.actions import Action


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

    def run(self, parts: list[tuple[Action, int, Iterator]], start: float) -> float:
        """Do an action, or both of an overlapped pair, and return its end.

        parts: for each single action its number of segments and the work, which stops at each
        exchange between them; while one part of a pair exchanges, the other one computes.
        """
        works = [work for _, _, work in parts]
        while works:
            works = [work for work in works if next(work, self) is not self]
        if self._gpu is not None:
            torch.cuda.synchronize(self._gpu)
        return time.perf_counter()
