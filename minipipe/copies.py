"""Stages that stand on several ranks: one gradient for all copies, and the same buffers."""

from __future__ import annotations

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from minipipe.ranks.channels import collective_device
from minipipe.schedule import Schedule


class Copies:
    """The copies that this rank holds of stages that stand on other ranks too; made alike, and at
    the same time, on every rank.

    bytes_sent: what this rank sent for the sums of the last step, by the formula of a ring, which
    gloo and NCCL use: each of k ranks sends 2 (k - 1) / k of the reduced bytes, a pair all of them.
    """

    bytes_sent = 0

    def __init__(self, schedule: Schedule, parts: dict[int, nn.Module]):
        groups = {ranks: dist.new_group(list(ranks))
                  for ranks in sorted({*schedule.holders.values()}) if len(ranks) > 1}  # fmt: skip
        self._shared = [(part, groups[schedule.holders[stage]], len(schedule.holders[stage]))
                        for stage, part in parts.items() if stage in schedule.copies]  # fmt: skip

    @contextmanager
    def summed(self, together):
        """Add up the gradients that the copies of a stage get within this context, once, after the
        last backward pass; what was there before is added behind. together: the context in which
        collective operations run, so that a failure reaches every rank."""
        grads, buffers = [], []
        self.bytes_sent = 0
        for part, _, _ in self._shared:
            grads.append([parameter.grad for parameter in part.parameters()])
            buffers.append([buffer.clone() for buffer in part.buffers()])
            for parameter in part.parameters():
                parameter.grad = None
        yield
        with together(collective=True):
            for (part, group, count), known, before in zip(self._shared, grads, buffers,
                                                           strict=True):  # fmt: skip
                pairs = list(zip(part.parameters(), known, strict=True))
                reduced = 0
                for dtype in sorted({p.dtype for p, _ in pairs}, key=str):
                    reduced += _sum_gradients(group, [p for p in pairs if p[0].dtype == dtype])
                for buffer, old in zip(part.buffers(), before, strict=True):
                    reduced += _same_buffer(group, count, buffer, old)
                self.bytes_sent += 2 * (count - 1) * reduced // count


def _sum_gradients(group, pairs: list[tuple[nn.Parameter, torch.Tensor | None]]) -> int:
    """One all-reduce for the gradients of one dtype, and for which of them there are; its bytes."""
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p, _ in pairs]
    there = grads[0].new_tensor([p.grad is not None for p, _ in pairs])
    flat = torch.cat([*(g.flatten() for g in grads), there]).to(collective_device())
    dist.all_reduce(flat, group=group)
    *parts, there = flat.to(grads[0].device).split([*(g.numel() for g in grads), len(grads)])
    for (parameter, known), part, used in zip(pairs, parts, there.tolist(), strict=True):
        total = part.view_as(parameter).clone() if used else None
        parameter.grad = total if known is None else known if total is None else known + total
    return flat.nbytes


def _same_buffer(group, count: int, buffer: torch.Tensor, before: torch.Tensor) -> int:
    """The mean of a floating buffer, such as a running statistic; of whole numbers, such as a
    count of micro-batches, the sum of what they grew by; how many bytes were reduced."""
    if buffer.dtype == torch.bool:
        return 0
    floating = buffer.is_floating_point() or buffer.is_complex()
    total = (buffer if floating else buffer - before).detach().clone().to(collective_device())
    dist.all_reduce(total, group=group)
    with torch.no_grad():
        total = total.to(buffer.device)
        buffer.copy_(total / count if floating else before + total)
    return total.nbytes
