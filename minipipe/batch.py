"""A batch and its micro-batches: how rows are shared out, and put together again."""

from __future__ import annotations

import torch


def row_counts(rows: int, microbatches: int) -> list[int]:
    """Rows of each micro-batch: the first rows mod microbatches get one more."""
    return [rows // microbatches + (m < rows % microbatches) for m in range(microbatches)]


def as_batch(batch) -> tuple | None:
    """A tensor, or a tuple or list of tensors, as a tuple."""
    if batch is None:
        return None
    return tuple(batch) if isinstance(batch, tuple | list) else (batch,)


def whole(values: tuple):
    """A single value as itself, several as a tuple."""
    return values[0] if len(values) == 1 else values


def problem(name: str, batch: tuple | None, least: int) -> str:
    """What is wrong with a batch that has to have `least` rows, if anything."""
    if not batch:
        return f"{name} are needed on this rank, but it was given none"
    for value in batch:
        if not isinstance(value, torch.Tensor) or not value.dim():
            shown = type(value).__name__ if not isinstance(value, torch.Tensor) else "a number"
            return f"{name} must be a tensor [rows, …] or a tuple of such, not {shown}"
    rows = [value.shape[0] for value in batch]
    if len(set(rows)) > 1:
        return f"{name} differ in their number of rows: {rows}"
    if rows[0] < least:
        needed = f"{least} micro-batches need at least {least}" if least > 1 else "1 at least"
        return f"{name} have {rows[0]} rows: {needed}"
    return ""


def split(batch: tuple, counts: list[int], device: torch.device) -> list[tuple]:
    """The values of each micro-batch; views where the batch is on the device already."""
    return list(zip(*(tensor.to(device).split(counts) for tensor in batch), strict=True))


def joined(parts: list):
    """The outputs of all micro-batches in row order: tensors one after the other, tuples member
    by member; what has no rows (numbers, None, dicts) as a list of the micro-batches' values."""
    first = parts[0]
    if isinstance(first, torch.Tensor) and first.dim():
        return torch.cat(parts)
    if isinstance(first, tuple | list):
        return tuple(joined(list(column)) for column in zip(*parts, strict=True))
    return None if first is None else parts
