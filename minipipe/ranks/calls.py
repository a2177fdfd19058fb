"""What a rank is about to do: all ranks hear it from all before they begin, in messages of one
size, so that different calls or arguments become one error on every rank, and not a gloo abort."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from minipipe.ranks.failure import InputError

CALLS = ("evaluate", "step", "clip_grad_norm_")
NUMBERS = 4  # that go with each call


def agree_on_call(exchange: Callable, pipeline: int, call: str, trouble: str, metered: bool,
                  numbers: list[int]) -> list[list[int]]:  # fmt: skip
    """The NUMBERS of each rank. InputError on every rank where one has trouble (what is wrong with
    its arguments), or where they call different things, or Pipelines (numbered as made)."""
    numbers = numbers + [0] * (NUMBERS - len(numbers))
    own = [bool(trouble), metered, CALLS.index(call), pipeline, *numbers]
    seen = exchange(torch.tensor(own)).tolist()
    if any(row[0] for row in seen):
        troubles: list = [None] * len(seen)
        dist.all_gather_object(troubles, trouble)
        rank = next(rank for rank, text in enumerate(troubles) if text)
        raise InputError(f"rank {rank}: {troubles[rank]}")
    if len({(*row[2:4],) for row in seen}) > 1:
        several = len({row[3] for row in seen}) > 1
        listed = ", ".join(
            f"rank {rank} calls {CALLS[row[2]]}" + f" of its Pipeline no. {row[3]}" * several
            for rank, row in enumerate(seen)
        )
        raise InputError(f"the ranks don't do the same: {listed}")
    _same("memory_meter", [bool(row[1]) for row in seen])
    return [row[4:] for row in seen]


def _same(name: str, values: list) -> None:
    if len(set(values)) > 1:
        listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        raise InputError(f"{name} must be the same on every rank, but is {listed}")


def same(name: str, bits: Sequence[int]) -> None:
    """InputError where an argument, as bits, differs between the ranks."""
    if len(set(bits)) > 1:
        _same(name, [*map(as_float, bits)])


def as_bits(value) -> int:
    """A float among ints."""
    return struct.unpack("q", struct.pack("d", value))[0]


def as_float(bits: int) -> float:
    """The float again."""
    return struct.unpack("d", struct.pack("q", bits))[0]


def wrong(name: str, value, legal: str, is_legal: Callable[[float], bool]) -> str:
    """What is wrong with a number, if anything."""
    try:
        right = not isinstance(value, str) and is_legal(float(value))
    except (TypeError, ValueError, RuntimeError, OverflowError):
        right = False
    return "" if right else f"{name} must be {legal}, not {value!r}"
