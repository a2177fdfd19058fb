"""A model, a schedule and a loss: `Pipeline.step` trains on one batch, `evaluate` only looks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from minipipe.batch import as_batch, joined, problem, row_counts, split, whole
from minipipe.check import check
from minipipe.copies import Copies
from minipipe.emulation import Pace, unfit
from minipipe.engine.clock import Clock
from minipipe.engine.interpreter import Interpreter, Record, Work
from minipipe.engine.links import Links
from minipipe.engine.overlap import make_stage
from minipipe.lower import lower
from minipipe.memory import Meter
from minipipe.partition import cut
from minipipe.ranks.agreement import agree_on_model, one_machine
from minipipe.ranks.calls import agree_on_call, as_bits, as_float, same, wrong
from minipipe.ranks.channels import channels, collective_device
from minipipe.ranks.failure import InputError, PipelineError, broken, fail
from minipipe.results import Evaluation, StepResult, pack, unpack
from minipipe.schedule import Schedule


class Pipeline:
    """One rank's part of a model that is trained by a schedule; made alike on every rank.

    model: an nn.Sequential, cut by `cuts` (layers a stage), by `costs` (one number a layer) or by
    its numbers of parameters; or a list of one module a stage. Every rank passes the same model
    and keeps its own stages of it. loss_fn(outputs, targets): a mean over the rows, or with
    reduction="sum" a sum. optimizer: a function from parameters to an optimizer, whose step each
    rank then takes at its own end of every `step`; without it the caller steps.
    device: where the stages live; by default a GPU where there is one, else the CPU.
    memory_meter: count the bytes that autograd keeps, at 1 to 8 % of a step's time (without it,
    received tensors stay until their backward pass even where no operation saved them). pace:
    emulate devices (see `Pace`). Both are attributes too, and may change between steps.

    Raises ValueError for arguments that don't fit, on every rank.
    """

    def __init__(self, model, schedule: Schedule, loss_fn: Callable, reduction: str = "mean",
                 optimizer: Callable | None = None, *, cuts: list[int] | None = None,
                 costs: list | None = None, device=None, memory_meter: bool = True,
                 pace: Pace | None = None):  # fmt: skip
        _check_arguments(schedule, loss_fn, reduction, optimizer, pace)
        self.rank = dist.get_rank()
        self.schedule, self.loss_fn, self.reduction = schedule, loss_fn, reduction
        self.device = _device(self.rank, device)
        parts = cut(model, schedule.stages, cuts, costs)
        self._own = schedule.stages_of(self.rank)
        self._parts = {stage: parts[stage].to(self.device) for stage in self._own}
        agree_on_model(schedule, parts, (reduction, optimizer is None))
        self._modules = [m for part in self._parts.values() for m in part.modules()]
        tensors = [t for p in self._parts.values() for t in (*p.parameters(), *p.buffers())]
        self._meter = Meter(tensors)
        self.memory_meter = memory_meter
        self._stages = {s: make_stage(part, s) for s, part in self._parts.items()}
        self._copies = Copies(schedule, self._parts)
        self.pace = pace
        self.optimizer = None
        parameters = list(self.parameters())
        if optimizer is not None and parameters:
            self.optimizer = optimizer(parameters)
            if not hasattr(self.optimizer, "step") or not hasattr(self.optimizer, "zero_grad"):
                raise TypeError("optimizer must return an optimizer, not "
                                f"{type(self.optimizer).__name__}")  # fmt: skip
        self._first, self._last = 0 in self._own, schedule.stages - 1 in self._own
        self._channels = channels()
        self._channels.pipelines += 1
        self._number = self._channels.pipelines
        self._clock_offset = 0.0 if one_machine() else self._channels.clock_offset()
        self._runners: dict = {}
        self._forms: dict = {}
        self._broken = ""

    # The model's parts on this rank.

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the full model."""
        for part in self._parts.values():
            yield from part.named_parameters()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This rank's part of the model's state, under the full model's names."""
        return {k: v for part in self._parts.values() for k, v in part.state_dict().items()}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take this rank's part from the full model's state."""
        if not isinstance(state, Mapping):
            raise TypeError("state must be a mapping from names to tensors, as state_dict() gives, "
                            f"not {type(state).__name__}")  # fmt: skip
        for part in self._parts.values():
            names = part.state_dict().keys()
            missing = [name for name in names if name not in state]
            if missing:
                raise ValueError(f"the state lacks {missing[0]} (and {len(missing) - 1} more)")
            part.load_state_dict({name: state[name] for name in names})

    def train(self, mode: bool = True) -> Pipeline:
        """Set the mode of this rank's stages."""
        for part in self._parts.values():
            part.train(mode)
        return self

    def eval(self) -> Pipeline:
        """Set this rank's stages to evaluation mode (`evaluate` does so by itself)."""
        return self.train(False)

    def zero_grad(self) -> None:
        """Forget this rank's gradients."""
        for parameter in self.parameters():
            parameter.grad = None

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> float:
        """Scale all gradients so that their norm over all stages is at most `max_norm`.

        Returns the norm before clipping, the same on every rank. All ranks have to call it, those
        without parameters too, and alike: else InputError on every rank.
        """
        trouble = (wrong("max_norm", max_norm, "a number of at least 0", lambda n: n >= 0)
                   or wrong("norm_type", norm_type, "a number above 0", lambda n: n > 0))
        arguments = [0, 0] if trouble else [as_bits(max_norm), as_bits(norm_type)]
        own = 0.0 if trouble else self._own_norm(norm_type)
        seen = self._tell("clip_grad_norm_", trouble, [*arguments, as_bits(own)])
        for place, name in enumerate(("max_norm", "norm_type")):
            same(name, [row[place] for row in seen])
        total = torch.tensor([as_float(row[2]) for row in seen], dtype=torch.float64)
        infinite = math.isinf(norm_type)
        norm = float(total.max() if infinite else total.sum() ** (1 / norm_type))
        # Not `min`: a norm that is not a number must reach every gradient, on every rank.
        factor = 1.0 if norm <= max_norm else max_norm / (norm + 1e-6)
        if factor != 1.0:
            for parameter in self.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        return norm

    def _own_norm(self, norm_type: float) -> float:
        """This rank's largest gradient, or its sum of powers; each copy of a stage once."""
        counted = [p for stage, part in self._parts.items() for p in part.parameters()
                   if self.schedule.holders[stage][0] == self.rank]
        norms = [torch.linalg.vector_norm(p.grad.double(), norm_type)
                 for p in counted if p.grad is not None]  # fmt: skip
        own = torch.stack([n.cpu() for n in norms]) if norms else torch.zeros(1)
        return float(own.max() if math.isinf(norm_type) else (own.double() ** norm_type).sum())

    # One batch.

    def step(self, inputs=None, targets=None, *, loss_scale: float = 1.0,
             pace: Pace | None = None) -> StepResult:  # fmt: skip
        """Forward and backward over one batch; `.grad` then holds the whole batch's gradients.

        inputs: a tensor or a tuple of tensors [rows, …], needed on the ranks that hold stage 0;
        targets likewise for the last stage; other ranks may pass None. Rows that don't divide
        evenly are spread over the micro-batches, and count by rows. loss_scale multiplies the
        gradients. Raises InputError (a ValueError) on every rank for a batch that doesn't fit; what
        fails on one rank is raised there, and as PipelineError with its reason on all others.
        """
        if self.schedule.forward_only:
            raise ValueError("schedule has no backward passes: use evaluate")
        pace = self.pace if pace is None else pace
        trouble = unfit(pace, self.schedule)
        inputs, targets = as_batch(inputs), as_batch(targets)
        microbatches = self.schedule.microbatches
        rows, forms, announce = self._agree(
            "step", inputs, targets, microbatches, loss_scale, trouble
        )
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        counts = row_counts(rows, microbatches)
        shares = self._shares(counts)
        work = self._work(inputs, targets, counts, forms, announce)
        work.weights = [share * loss_scale for share in shares]
        meter = self._meter if self.memory_meter else None
        if meter is not None:
            meter.batch(t for pieces in work.pieces for t in pieces)
        with self._copies.summed(self._together):
            record, links = self._run(self.schedule, work, pace, meter)
        if self.optimizer is not None:
            self.optimizer.step()
        loss = sum(shares[m] * float(value) for m, value in work.results.items())
        own = pack(self.schedule, record, loss, links.bytes_sent, self.memory_meter,
                   self._clock_offset)  # fmt: skip
        origin = "emulated" if pace else "measured"
        return unpack(self.schedule, self._exchange(own), self.rank, self.memory_meter, origin,
                      self._copies.bytes_sent)  # fmt: skip

    def evaluate(self, inputs=None, targets=None) -> Evaluation:
        """Forward only, in evaluation mode, over any batch of at least one row.

        inputs and targets as in `step`; without targets there is no loss. Gradients, graphs,
        running statistics and the modules' modes stay as they are.
        """
        inputs, targets = as_batch(inputs), as_batch(targets)
        with self._evaluating():
            most = self.schedule.microbatches
            rows, forms, announce = self._agree("evaluate", inputs, targets, 1)
            schedule = _forward_rows(self.schedule, min(rows, most))
            counts = row_counts(rows, schedule.microbatches)
            work = self._work(inputs, None, counts, forms, announce)
            work.keep_graph = False
            self._run(schedule, work)
        return self._outputs(work, targets, counts)

    def _outputs(self, work: Work, targets, counts: list[int]) -> Evaluation:
        """Bring outputs and loss from the ranks with the last stage to every rank."""
        own: dict[int, tuple] = {}
        with self._together(), torch.no_grad():
            if self._last:
                pieces = targets and split(targets, counts, self.device)
                for m, part in work.results.items():
                    loss = float(self._loss(part, whole(pieces[m]))) if targets else None
                    own[m] = loss, part
        found: dict[int, tuple] = {}
        for source in self.schedule.holders[self.schedule.stages - 1]:
            box = [own]
            with self._together(collective=True):
                dist.broadcast_object_list(box, source, device=collective_device())
            found |= box[0]
        losses, parts = zip(*(found[m] for m in range(len(counts))), strict=True)
        shares = self._shares(counts)
        loss = None
        if None not in losses:
            loss = sum(share * value for share, value in zip(shares, losses, strict=True))
        return Evaluation(loss, joined(list(parts)))

    def _shares(self, counts: list[int]) -> list[float]:
        """What each micro-batch's loss counts in the whole batch's."""
        return [n / sum(counts) if self.reduction == "mean" else 1.0 for n in counts]

    # How a step runs.

    def _work(self, inputs, targets, counts, forms, announce) -> Work:
        work = Work(None, True, None, [], forms, announce)
        if self._first:
            work.single = len(inputs) == 1
            work.inputs = split(inputs, counts, self.device)
            work.pieces += work.inputs
        if self._last and targets is not None:
            pieces = split(targets, counts, self.device)
            work.pieces += pieces
            work.finish = [lambda outputs, piece=piece: self._loss(outputs, whole(piece))
                           for piece in pieces]  # fmt: skip
        return work

    def _loss(self, outputs, targets) -> torch.Tensor:
        loss = self.loss_fn(outputs, targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise PipelineError(f"loss_fn must return one number, a {self.reduction} over the "
                                f"rows, not {what}")  # fmt: skip
        reached = [v for v in as_batch(outputs) if isinstance(v, torch.Tensor) and v.requires_grad]
        if reached and torch.is_grad_enabled() and not loss.requires_grad:
            raise PipelineError("loss_fn must return a loss that depends on the outputs: this one "
                                "has no gradient (was it detached?)")  # fmt: skip
        return loss.reshape(())

    def _runner(self, schedule: Schedule) -> tuple[Interpreter, Links]:
        if schedule not in self._runners:
            program = lower(schedule)
            links = Links(program, self._channels, self.device)
            interpreter = Interpreter(program, self.rank, self._stages, links)
            self._runners[schedule] = interpreter, links
        return self._runners[schedule]

    def _run(self, schedule: Schedule, work: Work, pace: Pace | None = None,
             meter: Meter | None = None) -> tuple[Record, Links]:  # fmt: skip
        interpreter, links = self._runner(schedule)
        links.begin()
        if pace is not None:
            links.carry = pace.carry if pace.links else None
        try:
            with self._together():
                return interpreter.run(work, pace or Clock(self.device), meter), links
        finally:
            interpreter.clear()
            links.carry = None
            if pace is not None:
                pace.close()

    @contextmanager
    def _together(self, collective: bool = False):
        """What fails here on one rank ends the step on every rank, with that rank's reason."""
        try:
            yield
        except BaseException as raised:
            error = broken(raised) if collective else raised
            own = f"rank {self.rank} failed: {type(error).__name__}: {error}"
            self._broken = str(error) if getattr(error, "secondary", False) else own
            fail(self._channels, self._broken)
            if error is raised:
                raise
            raise error from raised

    def _agree(self, use: str, inputs, targets, least: int, loss_scale: float = 1.0,
               trouble: str = ""):  # fmt: skip
        """Let all ranks know the number of rows, and whether this form of batch is a new one.

        Returns rows, the known forms of what goes between stages, and whether they are unknown yet.
        """
        wanted = [("inputs", inputs, self._first), ("targets", targets, self._last)]
        trouble = trouble or wrong("loss_scale", loss_scale, "a finite number", math.isfinite)
        rows = [-1, -1]
        if use == "step" and not torch.is_grad_enabled():
            trouble = "step needs gradients, but was called under no_grad or inference_mode"
        for place, (name, batch, held) in enumerate(wanted):
            if not held or (use == "evaluate" and name == "targets" and batch is None):
                continue
            trouble = trouble or problem(name, batch, least)
            rows[place] = -1 if trouble else batch[0].shape[0]
        numbers = [as_bits(loss_scale) if not trouble else 0, *rows, self._signature(use, inputs)]
        seen = self._tell(use, trouble, numbers, bool(self.memory_meter))
        same("loss_scale", [row[0] for row in seen])
        found = {n for row in seen for n in row[1:3] if n >= 0}
        if len(found) != 1:
            own = [sorted({row[place] for row in seen if row[place] >= 0}) for place in (1, 2)]
            raise InputError("inputs and targets differ in their number of rows: inputs have "
                             f"{own[0]}, targets {own[1]}")  # fmt: skip
        key = tuple(tuple(row[1:]) for row in seen)
        return found.pop(), self._forms.setdefault(key, {}), not self._forms[key]

    def _tell(self, call: str, trouble: str, numbers: list[int], metered: bool = False):
        """Tell all ranks what this one is about to do; the numbers of all."""
        if self._broken:
            raise PipelineError(f"an earlier step failed and broke the connections: {self._broken}")
        return agree_on_call(self._exchange, self._number, call, trouble, metered, numbers)

    def _signature(self, use: str, inputs) -> int:
        """A number that changes when what this rank sends may change its form."""
        form = tuple((t.shape, t.dtype) if isinstance(t, torch.Tensor) else t is None
                     for t in inputs or ())  # fmt: skip
        modes = tuple(m.training for m in self._modules)
        flags = tuple((p.requires_grad, p.dtype) for p in self.parameters())
        kind = self.device.type
        cast = torch.is_autocast_enabled(kind) and str(torch.get_autocast_dtype(kind))
        return hash((use, form, modes, flags, cast, torch.get_default_dtype())) >> 1

    def _exchange(self, own: torch.Tensor) -> torch.Tensor:
        """The vectors [n] of all ranks as [ranks, n]."""
        with self._together(collective=True):
            return self._channels.exchange(own)

    @contextmanager
    def _evaluating(self):
        modes = [module.training for module in self._modules]
        self.eval()
        try:
            yield
        finally:
            for module, mode in zip(self._modules, modes, strict=True):
                module.training = mode


def _check_arguments(schedule, loss_fn, reduction, optimizer, pace) -> None:
    if not dist.is_initialized():
        raise ValueError("a Pipeline is made inside a rank: call it in a function that launch runs")
    if not isinstance(schedule, Schedule):
        raise TypeError(f"schedule must be a Schedule, not {type(schedule).__name__}")
    check(schedule)
    if schedule.ranks != dist.get_world_size():
        raise ValueError(f"schedule has {schedule.ranks} rows, but there are "
                         f"{dist.get_world_size()} ranks")  # fmt: skip
    if schedule.asynchronous:
        raise ValueError("schedule has actions U (updates within the table), not run yet")
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, not {type(loss_fn).__name__}")
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
    if optimizer is not None and not callable(optimizer):
        raise TypeError("optimizer must be a function from parameters to an optimizer")
    if pace is not None and not hasattr(pace, "attach"):
        raise TypeError(f"pace must be a Pace, not {type(pace).__name__}")


def _device(rank: int, device) -> torch.device:
    if device is not None:
        return torch.device(device)
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", rank % torch.cuda.device_count())


def _forward_rows(schedule: Schedule, microbatches: int) -> Schedule:
    """The forwards of the first micro-batches, each on its row: legal, as the full rows are."""
    return Schedule(
        [part for action in row for part in action.parts
         if part.kind == "F" and part.microbatch < microbatches]
        for row in schedule.rows
    )  # fmt: skip
