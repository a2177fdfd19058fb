"""What all ranks have to agree on before they start: schedule, model and machine."""

from __future__ import annotations

import hashlib
import math
import platform
import warnings
import weakref
from pathlib import Path

import torch.distributed as dist
from torch import nn

from minipipe.schedule import Schedule

# Layers that have been part of a Pipeline: ranks differ in what they have trained of them.
_seen: weakref.WeakSet = weakref.WeakSet()


def one_machine() -> bool:
    """Whether all ranks run on one machine, so that they have one clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")  # on Linux; names may be alike in containers
    names: list = [None] * dist.get_world_size()
    dist.all_gather_object(names, (platform.node(), boot.read_text() if boot.exists() else ""))
    return len(set(names)) == 1


def agree_on_model(schedule: Schedule, parts: list[nn.Sequential], settings: tuple) -> None:
    """Refuse ranks with different schedules or models; warn where only the weights differ."""
    names = [([n for n, _ in part.named_children()],
              [(n, p.shape, p.dtype) for n, p in part.named_parameters()]) for part in parts]
    weights = [float(p.detach().double().sum()) for part in parts for p in part.parameters()]
    layers = [layer for part in parts for layer in part]
    trained = any(layer in _seen for layer in layers)  # then ranks differ in what they trained
    _seen.update(layers)
    digest = hashlib.sha256(f"{schedule}{names}{settings}".encode()).hexdigest()
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (digest, weights))
    for rank, (other, other_weights) in enumerate(everyone):
        if other != everyone[0][0]:
            raise ValueError(f"rank {rank} has another schedule, model, cut, reduction or "
                             "optimizer than rank 0: every rank passes the same")  # fmt: skip
        same = trained or all(math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-5) or a != a
                   for a, b in zip(everyone[0][1], other_weights, strict=True))  # fmt: skip
        if not same and schedule.copies:
            raise ValueError(f"rank {rank}'s model has other weights than rank 0's, but copies of "
                             "a stage must be equal: seed it alike on every rank")  # fmt: skip
        if not same and dist.get_rank() == rank:
            warnings.warn(f"rank {rank}'s model has other weights than rank 0's: seed it alike on "
                          "every rank, or training can't be compared with one process",
                          stacklevel=3)  # fmt: skip
