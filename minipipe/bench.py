"""Side-by-side benchmarks: `minipipe bench`. Both sides are measured in one run, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from fractions import Fraction
from statistics import median

from minipipe.costs import Costs
from minipipe.ranks.launch import launch
from minipipe.schedule import Schedule
from minipipe.schedules import build
from minipipe.simulate import simulate

REPEATS = 21
LIMIT = 240.0  # seconds that one launch may take
TORCH = "torch.distributed.pipelining"


@dataclass(frozen=True)
class Case:
    """Medians of one benchmark's two sides in `unit`, and their ratio."""

    name: str
    case: str
    ours: float
    theirs: float
    unit: str
    ratio: float
    peer: str

    def as_dict(self) -> dict:
        """For JSON."""
        return asdict(self)

    def line(self) -> str:
        """One line of text."""
        return (f"{self.name:<18}{self.case:<34}{self.ours:>12.4g} {self.unit:<10}"
                f"{self.peer} {self.theirs:.4g}: ratio {self.ratio:.3f}")  # fmt: skip


def _case(name: str, case: str, ours: list[float], theirs: list[float], unit: str,
          peer: str) -> Case:  # fmt: skip
    """The medians of both sides, whose repetitions took turns."""
    return Case(name, case, median(ours), median(theirs), unit,
                median(ours) / median(theirs), peer)  # fmt: skip


def in_turns(repeats: int, *sides: Callable[[], object]) -> list[list[float]]:
    """Seconds of each side in each repetition, one after the other; the first is not counted. All
    ranks start at the same moment, which rank 0 names."""
    import torch
    import torch.distributed as dist

    times: list[list[float]] = [[] for _ in sides]
    for repetition in range(repeats + 1):
        for side, measured in zip(sides, times, strict=True):
            dist.barrier()
            moment = torch.tensor([time.perf_counter() + 0.01], dtype=torch.float64)
            dist.broadcast(moment, 0)
            start = float(moment)
            time.sleep(max(0.0, start - time.perf_counter()))
            side()
            if repetition:
                measured.append(time.perf_counter() - start)
    return times


def slowest(results: list[list[list[float]]]) -> list[list[float]]:
    """A step lasts until its slowest rank is done: from [rank][side][repetition]."""
    sides = zip(*results, strict=True)
    return [[max(times) for times in zip(*side, strict=True)] for side in sides]


def _torch_schedule(name: str, modules, rank: int, ranks: int, microbatches: int, loss_fn):
    """torch's own schedule of this name over the stages that this rank holds there."""
    from torch.distributed import pipelining

    kinds = {"gpipe": pipelining.ScheduleGPipe, "1f1b": pipelining.Schedule1F1B,
             "interleaved": pipelining.ScheduleInterleaved1F1B}  # fmt: skip
    import torch

    stages = [
        pipelining.PipelineStage(module, number, len(modules), torch.device("cpu"))
        for number, module in enumerate(modules)
        if number % ranks == rank
    ]
    held = stages if name == "interleaved" else stages[0]
    return kinds[name](held, microbatches, loss_fn=loss_fn)


def _step_sides(rank: int, ranks: int, name: str, layers, inputs, targets, microbatches: int,
                repeats: int):  # fmt: skip
    """Time our step and torch's on the same modules."""
    import copy

    from torch import nn

    from minipipe.pipeline import Pipeline

    schedule = build(name, ranks=ranks, microbatches=microbatches)
    loss_fn = nn.functional.mse_loss
    pipe = Pipeline(layers, schedule, loss_fn, memory_meter=False)
    theirs = _torch_schedule(name, copy.deepcopy(layers), rank, ranks, microbatches, loss_fn)
    theirs_inputs = [inputs] if rank == 0 else []
    last = {"target": targets, "losses": []} if rank == ranks - 1 else {}
    return in_turns(repeats, lambda: pipe.step(inputs, targets),
                    lambda: theirs.step(*theirs_inputs, **last))  # fmt: skip


def _tiny_step(rank: int, name: str, repeats: int):
    import torch
    from torch import nn

    torch.manual_seed(0)
    stages = 8 if name == "interleaved" else 4
    layers = [nn.Linear(16, 16) for _ in range(stages)]
    inputs, targets = torch.randn(64, 16), torch.randn(64, 16)
    return _step_sides(rank, 4, name, layers, inputs, targets, 32, repeats)


def step_overhead() -> list[Case]:
    """A step with next to no compute, 4 ranks, 32 micro-batches: what the engine itself costs."""
    cases = []
    for name in ("1f1b", "gpipe", "interleaved"):
        ours, theirs = slowest(launch(_tiny_step, name, REPEATS, ranks=4, timeout=LIMIT))
        cases.append(_case("step-overhead", name, ours, theirs, "s", TORCH))
    return cases


def _transformer(stages: int):
    """A stack of transformer blocks, dim 128, and a batch of 64 rows of 49 tokens."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True,
                                         norm_first=True) for _ in range(4)]  # fmt: skip
    size = len(blocks) // stages
    layers = [nn.Sequential(*blocks[n : n + size]) for n in range(0, len(blocks), size)]
    return layers, torch.randn(64, 49, 128), torch.randn(64, 49, 128)


def _transformer_steps(rank: int, repeats: int):
    return _step_sides(rank, 2, "1f1b", *_transformer(2), 8, repeats)


def real_step() -> list[Case]:
    """Real compute, 2 ranks, 1F1B, 8 micro-batches: transformer blocks of 49 tokens, dim 128."""
    ours, theirs = slowest(launch(_transformer_steps, REPEATS, ranks=2, timeout=LIMIT))
    return [_case("real-step", "1f1b, transformer", ours, theirs, "s", TORCH)]


def _against_one_process(rank: int, threads: int, microbatches: int, repeats: int):
    """Time our step on 2 ranks against one process on rank 0, the other rank waiting."""
    import torch
    from torch import nn

    from minipipe.pipeline import Pipeline

    layers, inputs, targets = _transformer(2)
    pipe = Pipeline(layers, build("1f1b", ranks=2, microbatches=8), nn.functional.mse_loss,
                    memory_meter=False)  # fmt: skip
    whole = nn.Sequential(*_transformer(2)[0])

    def alone() -> None:
        if rank:
            return
        torch.set_num_threads(threads)
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            (nn.functional.mse_loss(whole(x), y) / microbatches).backward()
        torch.set_num_threads(1)

    return in_turns(repeats, alone, lambda: pipe.step(inputs, targets))


def two_core_speedup() -> list[Case]:
    """One process over ours with 2 ranks: the same micro-batches, the full batch, two threads."""
    cases = []
    for case, threads, microbatches in (("one thread, same micro-batches", 1, 8),
                                        ("one thread, full batch", 1, 1),
                                        ("two threads, same micro-batches", 2, 8),
                                        ("two threads, full batch", 2, 1)):  # fmt: skip
        alone, ours = slowest(launch(_against_one_process, threads, microbatches, REPEATS,
                                     ranks=2, threads=1, timeout=LIMIT))  # fmt: skip
        cases.append(_case("two-core-speedup", case, alone, ours, "s", "minipipe, 2 ranks"))
    return cases


def _paced(rank: int, schedule: Schedule, slot: float, repeats: int):
    """Makespans measured, and the latency measured beforehand."""
    import torch
    from torch import nn

    from minipipe.emulation import Pace, measure_latency
    from minipipe.pipeline import Pipeline

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(schedule.stages)]
    pipe = Pipeline(layers, schedule, nn.functional.mse_loss)
    batch = torch.randn(64, 128), torch.randn(64, 128)
    pipe.step(*batch)
    pace = Pace(Costs(slot, slot, slot))
    found, overruns, actions = [], 0, 0
    latency = measure_latency(slot)
    for _ in range(repeats):
        found.append(pipe.step(*batch, pace=pace).timeline.makespan)
        overruns, actions = overruns + pace.overruns, actions + pace.actions
    if overruns > 0.01 * actions:
        raise RuntimeError(f"{overruns} of {actions} actions overran their slots: a busy machine")
    return latency, found


def pace_fidelity() -> list[Case]:
    """Paced steps, 4 ranks, 8 micro-batches: the measured makespan over the one predicted with
    the same slots and the latency measured beforehand; 20 ms for the shortest action."""
    cases = []
    for name in ("naive", "gpipe", "gpipe+recompute", "1f1b", "interleaved", "breadth-first"):
        recompute = {"recompute": True} if name.endswith("+recompute") else {}
        schedule = build(name.removesuffix("+recompute"), ranks=4, microbatches=8, **recompute)
        slot = 0.02 * schedule.stages / schedule.ranks
        latency, found = launch(_paced, schedule, slot, 7, ranks=4, timeout=LIMIT)[0]
        predicted = float(simulate(schedule, Costs(slot, slot, slot, latency=latency)).makespan)
        cases.append(_case("pace-fidelity", name, found, [predicted], "s", "simulate"))
    return cases


def _gain(name: str, case: str, baseline: Schedule, faster: Schedule, costs: Costs,
          exchanges: bool = False) -> Case:  # fmt: skip
    """The paced step of a baseline over that of a faster schedule, in turns in one launch."""
    theirs, ours = zip(*launch(_paced_pair, baseline, faster, costs, exchanges, 5, ranks=4,
                               timeout=LIMIT)[0], strict=True)  # fmt: skip
    return _case(name, case, list(theirs), list(ours), "s", f"minipipe, {faster.name}")


def _paced_pair(rank: int, baseline: Schedule, faster: Schedule, costs: Costs, exchanges: bool,
                repeats: int):  # fmt: skip
    """Makespans (baseline, faster) of each repetition, on emulated devices."""
    import torch
    from torch import nn

    from minipipe.emulation import Pace
    from minipipe.models.moe import LAYERS, moe
    from minipipe.pipeline import Pipeline

    batch = torch.randn(64, 32), torch.randn(64, 32)
    pipes = []
    for schedule in (baseline, faster):
        blocks = 8 // schedule.stages
        layers, cuts = [nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(8)], blocks
        if exchanges:
            layers, cuts = list(moe(depth=8)), blocks * LAYERS
        pipes.append(Pipeline(nn.Sequential(*layers), schedule, nn.functional.mse_loss,
                              cuts=[cuts] * schedule.stages))  # fmt: skip
        pipes[-1].step(*batch)
    found = []
    for _ in range(repeats):
        found.append([])
        for pipe in pipes:
            pace = Pace(costs)
            found[-1].append(pipe.step(*batch, pace=pace).timeline.makespan)
            if pace.overruns > 0.01 * pace.actions:
                raise RuntimeError(f"{pace.overruns} of {pace.actions} actions overran their slots")
    return found


def _named(name: str, **arguments) -> Schedule:
    return build(name, ranks=4, microbatches=8, **arguments)


SLOT = 0.04  # seconds of F, I and W of a whole share each, where gains are measured


def interleaved_gain() -> list[Case]:
    """1F1B's paced step over interleaved's with 2 chunks: Megatron's 10 % and more; ideal 1.158."""
    return [_gain("interleaved-gain", "2 chunks, ideal 1.158", _named("1f1b"),
                  _named("interleaved"), Costs(SLOT, SLOT, SLOT))]  # fmt: skip


def zero_bubble_gain() -> list[Case]:
    """1F1B's paced step over ZB-H1's, with the same largest peak of the ranks; ideal 1.222."""
    return [_gain("zero-bubble-gain", "zb-h1, ideal 1.222", _named("1f1b"), _named("zb-h1"),
                  Costs(SLOT, SLOT, SLOT))]  # fmt: skip


def zb_v_gain() -> list[Case]:
    """1F1B's paced step over ZB-V's; ideal 1.294."""
    return [_gain("zb-v-gain", "zb-v, ideal 1.294", _named("1f1b"), _named("zb-v"),
                  Costs(SLOT, SLOT, SLOT))]  # fmt: skip


def dualpipe_overlap() -> list[Case]:
    """A quarter of each action is exchange, which pairs hide: 1F1B's paced step over theirs."""
    costs = Costs(SLOT, SLOT, SLOT, exchange=Fraction(1, 4))
    return [_gain("dualpipe-overlap", f"{name}, ideal {ideal}", _named("1f1b"), _named(name), costs,
                  exchanges=True)
            for name, ideal in (("dualpipe", 1.435), ("dualpipev", 1.419))]  # fmt: skip


def _backward_times(rank: int, kind: str, repeats: int):
    """Seconds of I and W together, of B, of torch's split, for one stage and micro-batch."""
    import copy

    import torch
    from torch import nn

    from minipipe.engine.stage import Stage
    from minipipe.models import resnet, vit

    blocks = (vit(dim=128, depth=4, heads=4, patch=4) if kind == "transformer" else
              resnet(width=48, depth=4))  # fmt: skip
    inputs = torch.randn(8, 49, 128) if kind == "transformer" else torch.randn(8, 48, 14, 14)
    module = nn.Sequential(*list(blocks)[1:-1])
    stages = [Stage(copy.deepcopy(module), 1) for _ in range(2)]
    gradient = torch.randn_like(module(inputs))
    times: list[list[float]] = [[], []]
    for repetition in range(repeats + 3):
        for split, (stage, measured) in enumerate(zip(stages, times, strict=True)):
            stage.forward(0, (inputs,), True, (True,), split=bool(split))
            start = time.perf_counter()
            stage.backward(0, [gradient])
            if split:
                stage.backward_weight(0)
            if repetition >= 3:
                measured.append(time.perf_counter() - start)
    return times


def split_overhead() -> list[Case]:
    """Real compute, one rank: I then W over the fused backward."""
    cases = []
    for kind in ("transformer", "convolution"):
        fused, split = launch(_backward_times, kind, 40, ranks=1, threads=1, timeout=LIMIT)[0]
        cases.append(_case("split-overhead", kind, split, fused, "s", "fused backward"))
    return cases


def _all_reduce(rank: int) -> float:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    return float(total)


def _spawned(rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=4)
    _all_reduce(rank)
    dist.destroy_process_group()


def warm_start() -> list[Case]:
    """Launching 4 ranks that do an all-reduce, not for the first time, against mp.spawn."""
    import torch.multiprocessing

    launch(_all_reduce, ranks=4, timeout=LIMIT)
    ours, theirs = [], []
    for _ in range(5):
        start = time.perf_counter()
        launch(_all_reduce, ranks=4, timeout=LIMIT)
        ours.append(time.perf_counter() - start)
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            torch.multiprocessing.spawn(_spawned, (folder,), 4)
            theirs.append(time.perf_counter() - start)
    return [_case("warm-start", "4 ranks, all-reduce", ours, theirs, "s",
                  "torch.multiprocessing.spawn")]  # fmt: skip


def _everything(schedule: Schedule) -> None:
    """Lower, simulate, and ask for every metric."""
    t = simulate(schedule)
    _ = (t.makespan, t.ideal, t.bubble, t.waiting, t.peak_activations, t.bytes_sent, t.busy,
         t.lower_bound, t.messages)  # fmt: skip


def _torch_everything(orders: dict, stages: int, ranks: int) -> None:
    from torch.distributed.pipelining import schedules

    lowered = schedules._add_send_recv(orders, lambda stage: stage % ranks, stages)
    schedules._simulate_comms_compute(lowered, lambda stage: stage % ranks, stages)


def _seconds(side: Callable, make: Callable) -> float:
    argument = make()
    start = time.perf_counter()
    side(argument)
    return time.perf_counter() - start


def simulation() -> list[Case]:
    """Actions a second, 16 ranks, 512 micro-batches, interleaved: lower and simulate."""
    from torch.distributed.pipelining.schedules import _Action

    schedule = build("interleaved", ranks=16, microbatches=512)
    count = sum(map(len, schedule.rows))
    ours, theirs = [], []
    for _ in range(7):
        ours.append(count / _seconds(_everything, lambda: Schedule(schedule.rows)))
        orders = {rank: [_Action.from_str(str(action)) for action in row]
                  for rank, row in enumerate(schedule.rows)}  # fmt: skip
        theirs.append(count / _seconds(lambda orders: _torch_everything(orders, 32, 16),
                                       lambda orders=orders: orders))  # fmt: skip
    return [_case("simulate", "16 ranks, 512 micro-batches", ours, theirs, "actions/s", TORCH)]


def simulate_scaling() -> list[Case]:
    """Time for 2,000,000 actions over time for 200,000."""
    sizes = []
    for microbatches in (31_250, 3_125):
        schedule = build("interleaved", ranks=16, microbatches=microbatches)
        sizes.append([_seconds(_everything, lambda s=schedule: Schedule(s.rows))
                      for _ in range(3)])  # fmt: skip
        del schedule
    return [_case("simulate-scaling", "2,000,000 / 200,000 actions", *sizes, "s",
                  "a tenth of the actions")]  # fmt: skip


BENCHMARKS: dict[str, Callable[[], list[Case]]] = {
    "step-overhead": step_overhead,
    "real-step": real_step,
    "two-core-speedup": two_core_speedup,
    "pace-fidelity": pace_fidelity,
    "interleaved-gain": interleaved_gain,
    "zero-bubble-gain": zero_bubble_gain,
    "zb-v-gain": zb_v_gain,
    "dualpipe-overlap": dualpipe_overlap,
    "split-overhead": split_overhead,
    "warm-start": warm_start,
    "simulate": simulation,
    "simulate-scaling": simulate_scaling,
}
