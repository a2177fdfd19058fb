"""One training run on one rank: alone, with DDP, or as a part of a pipeline."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from minipipe import models
from minipipe.costs import Costs
from minipipe.datasets import Dataset, batches, load
from minipipe.emulation import Pace, measure_latency
from minipipe.memory import Meter
from minipipe.pipeline import Pipeline
from minipipe.schedule import Schedule

STEP = "@step"  # how rank 0 tells its launcher that a step is done
loss_fn = nn.functional.cross_entropy


@dataclass(frozen=True)
class Job:
    """What every entry of a comparison trains: the same weights, batches and optimizer."""

    setting: models.Setting
    seed: int = 0
    data: str | None = None

    def dataset(self) -> Dataset:
        """The data set."""
        return load(self.setting.dataset, self.data)

    def model(self, dataset: Dataset) -> nn.Sequential:
        """The model, with the same weights on every rank."""
        return models.build(self.setting.model, dataset, self.seed)

    def batches(self, dataset: Dataset) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """The batches, the same on every rank."""
        return batches(dataset, self.setting.batch, self.setting.steps, self.seed)


@dataclass
class Run:
    """What one rank measured: loss of each step, seconds a step, accuracy on the test images,
    largest difference of the first step's gradients from one process, bytes kept, held and sent."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    accuracy: float = 0.0
    gradient_error: float = 0.0
    activation_bytes: int = 0
    parameter_bytes: int = 0
    bytes_sent: int | None = 0


@dataclass
class Paced:
    """Steps on emulated devices: timelines, one-way latency in seconds, overruns of actions."""

    latency: float
    timelines: list
    overruns: int
    actions: int


def reference_gradients(job: Job, dataset: Dataset, batch) -> dict[str, torch.Tensor]:
    """The gradients of one process over the whole batch, by name."""
    model = job.model(dataset)
    loss_fn(model(batch[0]), batch[1]).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def gradient_error(reference: dict[str, torch.Tensor],
                   parameters: Iterable[tuple[str, nn.Parameter]]) -> float:  # fmt: skip
    """The largest over the parameters of max|difference| / max|reference|, the divisor at least a
    thousandth of the largest gradient of all."""
    least = max(float(g.abs().max()) for g in reference.values()) / 1000
    return max(
        (float((p.grad - reference[name]).abs().max())
         / max(float(reference[name].abs().max()), least) for name, p in parameters),
        default=0.0,
    )  # fmt: skip


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> float:
    """The share of rows [rows, classes] whose largest output is the target."""
    return float((outputs.argmax(1) == targets).float().mean())


def _train(job: Job, dataset: Dataset, step: Callable, optimizer, zero_grad: Callable,
           parameters: Callable) -> Run:  # fmt: skip
    """The loop of every entry: step gives the loss of one batch and leaves the gradients."""
    run = Run()
    for number, (inputs, targets) in enumerate(job.batches(dataset)):
        start = time.perf_counter()
        zero_grad()
        run.losses.append(float(step(inputs, targets)))
        if not number:
            reference = reference_gradients(job, dataset, (inputs, targets))
            run.gradient_error = gradient_error(reference, parameters())
        if optimizer is not None:
            optimizer.step()
        run.seconds.append(time.perf_counter() - start)
        if not dist.get_rank():
            print(STEP, number + 1, flush=True)
    return run


def train_alone(rank: int, job: Job) -> Run:
    """One process, whole batches."""
    dataset = job.dataset()
    model = job.model(dataset)
    return _train_whole(job, dataset, model, model, lambda batch: batch)


def train_ddp(rank: int, job: Job) -> Run:
    """torch's DistributedDataParallel: the whole model on every rank, a part of the batch each.

    The loss is the mean of all ranks' means: the batch's, as all parts have equally many rows.
    """
    ranks = dist.get_world_size()
    if job.setting.batch % ranks:
        raise ValueError(f"batch {job.setting.batch} can't be split evenly over {ranks} ranks")
    dataset = job.dataset()
    model = job.model(dataset)
    return _train_whole(job, dataset, model, DistributedDataParallel(model),
                        lambda batch: batch.chunk(ranks)[rank])  # fmt: skip


def _train_whole(job: Job, dataset: Dataset, model, wrapped, share: Callable) -> Run:
    """Train a model that this rank holds as a whole, on its share of each batch."""
    optimizer = job.setting.optimizer(model.parameters())
    meter = Meter([*model.parameters(), *model.buffers()])
    marks: list = []

    def step(inputs, targets):
        inputs, targets = share(inputs), share(targets)
        marks.append(tcp_bytes_sent())
        if len(marks) == 1:  # counting costs time: one step shows it
            meter.batch([inputs, targets])
            with meter.watch():
                loss = loss_fn(wrapped(inputs), targets)
        else:
            loss = loss_fn(wrapped(inputs), targets)
        loss.backward()
        loss = loss.detach()
        marks.append(tcp_bytes_sent())
        if model is not wrapped:
            dist.all_reduce(loss)
            loss /= dist.get_world_size()
        return loss

    run = _train(job, dataset, step, optimizer, optimizer.zero_grad, model.named_parameters)
    with torch.no_grad():
        run.accuracy = accuracy(model.eval()(dataset.test_inputs), dataset.test_targets)
    run.activation_bytes = meter.high
    run.parameter_bytes = sum(p.nbytes for p in model.parameters())
    if model is wrapped:
        run.bytes_sent = 0
    else:
        sent = [b - a for a, b in zip(marks[2::2], marks[3::2], strict=True) if a is not None]
        run.bytes_sent = int(median(sent)) if sent else None
    return run


def train_pipeline(rank: int, job: Job, schedule: Schedule, slot: float, paced_steps: int,
                   own_step: bool = False) -> tuple[Run, Paced]:  # fmt: skip
    """A pipeline at full speed, then a few steps paced at `slot` seconds a forward.

    own_step: each rank updates its weights at its own end of a step, without waiting for others.
    """
    dataset = job.dataset()
    model = job.model(dataset)
    make = job.setting.optimizer
    pipe = Pipeline(model, schedule, loss_fn, memory_meter=False,
                    optimizer=make if own_step else None)  # fmt: skip
    parameters = list(pipe.parameters())
    optimizer = make(parameters) if parameters and not own_step else None
    result = None

    def step(inputs, targets):
        nonlocal result
        result = pipe.step(inputs, targets)
        return result.loss

    run = _train(job, dataset, step, optimizer, pipe.zero_grad, pipe.named_parameters)
    outputs = pipe.evaluate(dataset.test_inputs, dataset.test_targets).outputs
    run.accuracy = accuracy(outputs, dataset.test_targets)
    run.parameter_bytes = sum(p.nbytes for p in parameters)
    run.bytes_sent = result.bytes_sent
    pipe.memory_meter, pipe.optimizer = True, None
    inputs, targets = next(iter(job.batches(dataset)))
    run.activation_bytes = pipe.step(inputs, targets).peak_activation_bytes
    pace = Pace(Costs(slot, slot, slot))
    paced = Paced(measure_latency(slot), [], 0, 0)
    for _ in range(paced_steps):
        pipe.zero_grad()
        paced.timelines.append(pipe.step(inputs, targets, pace=pace).timeline)
        paced.overruns += pace.overruns
        paced.actions += pace.actions
    return run, paced


def tcp_bytes_sent() -> int | None:
    """Bytes that this process has sent over TCP so far and that have arrived, by the kernel's own
    count for each open connection; None where the system has no such count (not Linux)."""
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return None
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
        except OSError:
            continue
        if len(info) >= 128:
            total += struct.unpack_from("Q", info, 120)[0]
    return total
