"""What the engine's tests run inside ranks: models, batches, and one process to compare with."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

import torch
from torch import nn

import minipipe as mp
from minipipe.batch import row_counts
from minipipe.pipeline import Pipeline
from minipipe.ranks.launch import RankError, launch

LIMIT = 60  # seconds; a test that hangs fails
TOLERANCE = 1e-10  # of float64 results against one process
mse = nn.functional.mse_loss


def mean_mse(outputs, targets):
    """A mean over the rows."""
    return mse(outputs, targets)


def sum_mse(outputs, targets):
    """A sum over the rows."""
    return mse(outputs, targets, reduction="sum")


def keeps_nothing(outputs, targets):
    """A loss that lets autograd save nothing: every rank then keeps the same."""
    return outputs.sum()


def on_ranks(fn, *args, ranks: int, **options) -> list:
    """launch with a hard limit, quiet unless it fails."""
    return launch(fn, *args, ranks=ranks, timeout=LIMIT, **options)


def schedule(name: str, ranks: int, microbatches: int, **arguments) -> mp.Schedule:
    """build, for short; "gpipe+recompute" recomputes."""
    name, _, recompute = name.partition("+")
    arguments |= {"recompute": True} if recompute else {}
    return mp.build(name, ranks=ranks, microbatches=microbatches, **arguments)


# Models and batches, alike on every rank.


def mlp(layers: int = 4, width: int = 6, seed: int = 0, bias: bool = True) -> nn.Sequential:
    """`layers` layers, every second one without parameters."""
    torch.manual_seed(seed)
    make = (lambda: nn.Linear(width, width, bias), nn.Tanh)
    return nn.Sequential(*(make[n % 2]() for n in range(layers))).double()


def linears(stages: int = 4, width: int = 8, bias: bool = False, seed: int = 0) -> nn.Sequential:
    """Equal layers."""
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(width, width, bias) for _ in range(stages))).double()


def batch(rows: int, *shape: int, seed: int = 1) -> torch.Tensor:
    """Random float64 rows."""
    return torch.randn(rows, *(shape or (6,)), generator=torch.Generator().manual_seed(seed),
                       dtype=torch.float64)  # fmt: skip


# One process.


def chain(parts, value):
    """Apply modules one after the other; tuples are spread over the arguments."""
    for part in parts:
        value = part(*value) if isinstance(value, tuple) else part(value)
    return value


def one_process(model, inputs, targets, loss_fn=mean_mse, microbatches: int = 1,
                mean: bool = True) -> tuple[float, dict]:  # fmt: skip
    """Loss and gradients of a batch, the micro-batches one after the other, weighted by rows.

    model: a module, or a list of them whose parameters get the names "0.…", "1.…". inputs: a
    tensor or a tuple of them.
    """
    model = nn.ModuleList(model) if isinstance(model, list) else model
    parts = list(model) if isinstance(model, nn.ModuleList) else [model]
    many = isinstance(inputs, tuple)
    rows = len(inputs[0] if many else inputs)
    counts = row_counts(rows, microbatches)
    pieces = [list(zip(*(t.split(counts) for t in inputs), strict=True)) if many
              else inputs.split(counts), targets.split(counts)]  # fmt: skip
    total = 0.0
    for count, x, y in zip(counts, *pieces, strict=True):
        loss = loss_fn(chain(parts, x), y) * (count / rows if mean else 1.0)
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
    return total, gradients(model)


def gradients(model) -> dict:
    """Each parameter's gradient, by name; copies."""
    return {name: None if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}  # fmt: skip


def error(found: dict, wanted: dict) -> float:
    """The largest difference over the parameters, relative to each one's own largest value; inf
    where one has a gradient that the other lacks. `found` may be a part of `wanted`."""
    worst = 0.0
    for name, value in found.items():
        other = wanted[name]
        if value is None or other is None:
            # A parameter that nothing used may have no gradient or zeros.
            worst = max(worst, 0.0 if value is other or not _any(value, other) else float("inf"))
            continue
        if value.shape != other.shape or value.dtype != other.dtype:
            return float("inf")
        scale = float(other.abs().max()) or 1.0
        difference = float((value - other).abs().max()) / scale
        worst = max(worst, difference if difference == difference else float("inf"))
    return worst


def _any(*values) -> bool:
    return any(v is not None and bool(v.any()) for v in values)


def compare(rank, make, rows, inputs, targets, loss_fn=mean_mse, split: bool = False,
            plain=None, **arguments) -> float:  # fmt: skip
    """One batch by a pipeline and in one process: the largest error of a gradient or of the loss.

    make: a function that makes the model, or the list of stages; plain: the same for one process
    where that can't run it. split: whether one process also goes by micro-batches (for models in
    which rows of one micro-batch see each other).
    """
    model, other = make(), (plain or make)()
    pipe = Pipeline(model, rows, loss_fn, **arguments)
    mean = arguments.get("reduction", "mean") == "mean"
    many = isinstance(inputs, tuple)  # clones: a model may begin in place
    loss = pipe.step(tuple(x.clone() for x in inputs) if many else inputs.clone(), targets).loss
    microbatches = rows.microbatches if split else 1
    wanted_loss, wanted = one_process(other, inputs, targets, loss_fn, microbatches, mean)
    return max(error(gradients(pipe), wanted),
               abs(loss - wanted_loss) / max(1.0, abs(wanted_loss)))  # fmt: skip


# Models whose stages are made by hand, on three ranks.

ROWS = [("gpipe", 3, 3), ("1f1b+recompute", 3, 4), ("1f1b", 3, 2)]
# Neighbouring stages on one rank: what is handed over must not be one tensor for both. And a rank
# that holds nothing.
LOCAL = mp.Schedule.parse("""
    0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1
    -
    2F0 2B0 2F1 2B1
""")
LOCAL_RECOMPUTE = mp.Schedule.parse("""
    0F0 1F0 0F1 1F1 1R0 1B0 0R0 0B0 1R1 1B1 0R1 0B1
    2F0 2R0 2B0 2F1 2R1 2B1
    -
""")


def check_edges(make, inputs, targets, **options):
    """The model trains as in one process: under some schedules, and where two stages are
    neighbours on one rank."""
    tables = [*(schedule(*row) for row in ROWS), LOCAL, LOCAL_RECOMPUTE]
    wrong = on_ranks(compare_each, make, tables, inputs, targets, options, ranks=3)
    assert max(map(max, wrong)) < TOLERANCE, wrong


def compare_each(rank, make, tables, inputs, targets, options):
    return [compare(rank, make, rows, inputs, targets, **options) for rows in tables]


def linear(width=6, out=None, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(width, out or width).double()


class Apply(nn.Module):
    """A function as a stage, with a linear layer before it so that every stage learns."""

    def __init__(self, fn, width=6, learns=True, seed=0):
        super().__init__()
        self.layer = linear(width, seed=seed) if learns else nn.Identity()
        self.fn = fn

    def forward(self, x, *others):
        return self.fn(self.layer(x), *others)


def three_stages() -> list[nn.Module]:
    """The model of tests in which only the batch or what surrounds the model is special."""
    return [linear(), Apply(torch.tanh, seed=1), linear(seed=2)]


class Start(nn.Module):
    """x becomes a tuple of x and more."""

    def __init__(self, extra):
        super().__init__()
        self.layer, self.extra = linear(), extra

    def forward(self, x):
        return (self.layer(x), *self.extra(x))


# What goes wrong.


def failures(fn, *args, ranks: int, directory: str) -> list[dict | None]:
    """Run fn on ranks and return what each one raised: type, text, secondary, seconds.

    Each rank writes its own exception down and waits for the others' before it ends, as the
    first end would stop them.
    """
    try:
        launch(_write_down, fn, args, directory, ranks=ranks, timeout=LIMIT, output=False)
    except RankError as failure:
        missing = [r for r in range(ranks) if not (Path(directory) / str(r)).exists()]
        if missing:
            raise AssertionError(f"ranks {missing} hang: {failure}") from failure
    return [json.loads((Path(directory) / str(rank)).read_text()) for rank in range(ranks)]


def _write_down(rank, fn, args, directory):
    start, found = time.monotonic(), None
    try:
        fn(rank, *args)
    except Exception as raised:
        found = {"type": type(raised).__name__, "text": str(raised),
                 "value": isinstance(raised, ValueError),
                 "secondary": getattr(raised, "secondary", False),
                 "seconds": time.monotonic() - start}  # fmt: skip
    path = Path(directory) / str(rank)
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)
    end = time.monotonic() + 15
    while time.monotonic() < end:
        with contextlib.suppress(OSError):
            names = [name for name in os.listdir(directory) if name.isdigit()]
            if len(names) == int(os.environ["WORLD_SIZE"]):
                return
        time.sleep(0.02)
