"""Side-by-side benchmarks: `minipipe bench`. Both sides are measured in one run, in turns."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable

from minipipe import gains
from minipipe.costs import Costs
from minipipe.measure import LIMIT, REPEATS, TORCH, Case, case, in_turns, slowest
from minipipe.ranks.launch import launch
from minipipe.schedule import Schedule
from minipipe.schedules import build
from minipipe.simulate import simulate

TORCH_NAMES = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe",
               "interleaved": "ScheduleInterleaved1F1B", "breadth-first": "ScheduleLoopedBFS",
               "zb-1p": "ScheduleInterleavedZeroBubble", "zb-v": "ScheduleZBVZeroBubble",
               "dualpipev": "ScheduleDualPipeV"}  # fmt: skip


def _torch_schedule(schedule: Schedule, modules, rank: int, loss_fn):
    """torch's own schedule of this name over the stages that this rank holds."""
    import torch
    from torch.distributed.pipelining import PipelineStage, schedules

    kind = getattr(schedules, TORCH_NAMES[schedule.name])
    stages = [PipelineStage(modules[number], number, schedule.stages, torch.device("cpu"))
              for number in schedule.stages_of(rank)]  # fmt: skip
    held = stages if schedule.stages > schedule.ranks else stages[0]
    return kind(held, schedule.microbatches, loss_fn=loss_fn)


def _step_sides(rank: int, schedule: Schedule, layers, inputs, targets, repeats: int):
    """Time our step and torch's on the same modules."""
    import copy

    from torch import nn

    from minipipe.pipeline import Pipeline

    loss_fn, held = nn.functional.mse_loss, schedule.stages_of(rank)
    pipe = Pipeline(layers, schedule, loss_fn, memory_meter=False)
    theirs = _torch_schedule(schedule, copy.deepcopy(layers), rank, loss_fn)
    theirs_inputs = [inputs] if 0 in held else []
    last = {"target": targets, "losses": []} if schedule.stages - 1 in held else {}
    return in_turns(repeats, lambda: pipe.step(inputs, targets),
                    lambda: theirs.step(*theirs_inputs, **last))  # fmt: skip


def _tiny_step(rank: int, name: str, repeats: int):
    import torch
    from torch import nn

    torch.manual_seed(0)
    schedule = build(name, ranks=4, microbatches=32)
    layers = [nn.Linear(16, 16) for _ in range(schedule.stages)]
    inputs, targets = torch.randn(64, 16), torch.randn(64, 16)
    return _step_sides(rank, schedule, layers, inputs, targets, repeats)


def step_overhead() -> list[Case]:
    """A step with next to no compute, 4 ranks, 32 micro-batches: what the engine itself costs."""
    cases = []
    for name in TORCH_NAMES:
        ours, theirs = slowest(launch(_tiny_step, name, REPEATS, ranks=4, timeout=LIMIT))
        cases.append(case("step-overhead", name, ours, theirs, "s", TORCH))
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
    return _step_sides(rank, build("1f1b", ranks=2, microbatches=8), *_transformer(2), repeats)


def real_step() -> list[Case]:
    """Real compute, 2 ranks, 1F1B, 8 micro-batches: transformer blocks of 49 tokens, dim 128."""
    ours, theirs = slowest(launch(_transformer_steps, REPEATS, ranks=2, timeout=LIMIT))
    return [case("real-step", "1f1b, transformer", ours, theirs, "s", TORCH)]


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
    for what, threads, microbatches in (("one thread, same micro-batches", 1, 8),
                                        ("one thread, full batch", 1, 1),
                                        ("two threads, same micro-batches", 2, 8),
                                        ("two threads, full batch", 2, 1)):  # fmt: skip
        alone, ours = slowest(launch(_against_one_process, threads, microbatches, REPEATS,
                                     ranks=2, threads=1, timeout=LIMIT))  # fmt: skip
        cases.append(case("two-core-speedup", what, alone, ours, "s", "minipipe, 2 ranks"))
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
        cases.append(case("pace-fidelity", name, found, [predicted], "s", "simulate"))
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
    return [case("warm-start", "4 ranks, all-reduce", ours, theirs, "s",
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
    return [case("simulate", "16 ranks, 512 micro-batches", ours, theirs, "actions/s", TORCH)]


def simulate_scaling() -> list[Case]:
    """Time for 2,000,000 actions over time for 200,000."""
    schedules = [build("interleaved", ranks=16, microbatches=m) for m in (31_250, 3_125)]
    turns = [[_seconds(_everything, lambda s=schedule: Schedule(s.rows)) for schedule in schedules]
             for _ in range(7)]  # fmt: skip
    sizes = [list(seconds) for seconds in zip(*turns, strict=True)]
    return [case("simulate-scaling", "2,000,000 / 200,000 actions", *sizes, "s",
                  "a tenth of the actions")]  # fmt: skip


BENCHMARKS: dict[str, Callable[[], list[Case]]] = {
    "step-overhead": step_overhead,
    "real-step": real_step,
    "two-core-speedup": two_core_speedup,
    "pace-fidelity": pace_fidelity,
    "interleaved-gain": gains.interleaved_gain,
    "zero-bubble-gain": gains.zero_bubble_gain,
    "zb-v-gain": gains.zb_v_gain,
    "dualpipe-overlap": gains.dualpipe_overlap,
    "split-overhead": gains.split_overhead,
    "warm-start": warm_start,
    "simulate": simulation,
    "simulate-scaling": simulate_scaling,
}
