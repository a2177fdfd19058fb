"""Tasks of lesson 1: a model cut over two ranks, against autograd on one process."""

import re

import torch
from torch import nn

import minipipe as mp
from minipipe.teach.testing import Wrong, expect, kind, part, refusing

COLLECTIVES = [f"torch.distributed:{name}" for name in (
    "all_reduce", "broadcast", "all_gather", "gather", "scatter", "reduce", "all_to_all",
    "broadcast_object_list", "send_object_list", "all_gather_object",
)]  # fmt: skip


# 1.1


def cut_of(answer, layers, parts):
    """The answer's stages as lists of layer numbers, and the case."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(layers)))
    case = f"layers: {layers}, parts={parts}"
    stages = answer(model, parts)
    if not isinstance(stages, (list, tuple)):
        raise Wrong(f"case: {case}\na list of stages is asked for, yours is {kind(stages)}")
    for stage in stages:
        if not isinstance(stage, nn.Sequential):
            raise Wrong(f"case: {case}\neach stage must be an nn.Sequential, one of yours is "
                        f"{kind(stage)}")  # fmt: skip
    known = {id(layer): number for number, layer in enumerate(model)}
    numbers = [[known.get(id(layer), "not the model's own") for layer in s] for s in stages]
    return numbers, case


@part("1.1", "no layer lost", 60)
def test_cut_keeps_all_layers(answer, sizes):
    def is_legal(layers, parts):
        return parts <= layers

    for layers, parts in sizes((1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (7, 4), (9, 4),
                               only=is_legal):  # fmt: skip
        numbers, case = cut_of(answer, layers, parts)
        if sum(numbers, []) != list(range(layers)):
            raise Wrong(f"case: {case}\nlayers in the order of your stages: {numbers}\n"
                        f"all of 0 to {layers - 1} are asked for, in order, each once")  # fmt: skip


@part("1.1", "even stages", 40)
def test_cut_is_even(answer, sizes):
    def is_legal(layers, parts):
        return parts <= layers

    for layers, parts in sizes((1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (7, 4), (9, 4),
                               only=is_legal):  # fmt: skip
        numbers, case = cut_of(answer, layers, parts)
        if len(numbers) != parts:
            raise Wrong(f"case: {case}\n{parts} stages are asked for, yours are {len(numbers)}: "
                        f"{numbers}")  # fmt: skip
        lengths = [len(stage) for stage in numbers]
        if max(lengths) - min(lengths) > 1 or sum(lengths) != layers:
            raise Wrong(f"case: {case}\nlayers of your stages: {lengths}; they have to sum to "
                        f"{layers} and may differ by 1 at most")  # fmt: skip


# What 1.2 to 1.4 share. Everything below `on_ranks` runs inside the ranks, too.


def on_ranks(function, *args):
    """What both ranks return, or Wrong with what happened on them."""
    try:
        return mp.launch(function, *args, ranks=2, timeout=6, output=show)
    except mp.RankError as error:
        if isinstance(error.original, (NotImplementedError, AssertionError)):
            raise
        text, hint = re.sub(r"\S*/(\w+\.py)", r"\1", str(error)), ""
        if "SIGABRT" in text:
            hint = ("\nThe message does not fit into the buffer. Is the right tensor sent? Has the "
                    "buffer its shape, and dtype=torch.float64?")  # fmt: skip
        elif "did not end" in text:
            hint = ("\nA rank waits for ever: each send needs a recv on the other rank, and each "
                    "recv a send.")  # fmt: skip
        raise Wrong(f"on two ranks: {text}{hint}") from error


def show(rank, line):
    """What a rank prints, without gloo's dying words."""
    if "gloo" not in line:
        print(f"[rank {rank}] {line}")


def stages_for(seed, width, outputs=2):
    torch.manual_seed(seed)
    first = nn.Sequential(nn.Linear(3, width), nn.Tanh())
    second = nn.Sequential(nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, outputs))
    return [first.double(), second.double()]


def batch_for(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*shape, 3, generator=generator, dtype=torch.float64)
    return inputs, torch.randn(*shape, 2, generator=generator, dtype=torch.float64)


def plain(value):
    """A value that can leave its rank: tensors without their graph."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def gradients(stage):
    return {name: plain(p.grad) for name, p in stage.named_parameters()}


def compare(got, expected, case, rank, what="gradient"):
    for name, value in expected.items():
        kind = f"{case}\nthe {what} of rank {rank}'s {name}"
        if got[name] is None:
            raise Wrong(f"case: {kind} is missing: .grad is None")
        expect(got[name], value, kind, 1e-10)


# 1.2


def run_forward(rank, answer, cases):
    found = []
    with refusing(*COLLECTIVES, why="send and recv are what this lesson is about"):
        for stages, inputs, shape in cases:
            result = answer(rank, stages[rank], inputs if rank == 0 else None, shape)
            has_graph = isinstance(result, torch.Tensor) and result.requires_grad
            found.append((plain(result), has_graph))
    return found


def forward_cases(answer, shapes):
    cases = []
    for seed, (*rows, width) in enumerate(shapes):
        inputs, _ = batch_for(seed, *rows)
        cases.append((stages_for(seed, width), inputs, (*rows, width)))
    found = on_ranks(run_forward, answer, cases)
    for number, (stages, inputs, shape) in enumerate(cases):
        middle = stages[0](inputs)
        yield (f"an activation of shape {shape}", found[0][number], middle.detach(),
               found[1][number], stages[1](middle).detach())  # fmt: skip


@part("1.2", "rank 1 has the model's output", 70)
def test_forward(answer, sizes):
    for case, _, _, (got, _), expected in forward_cases(answer, sizes((1, 1), (2, 3), (5, 4))):
        expect(got, expected, f"{case}; what rank 1 returns", 1e-10)


@part("1.2", "both ranks keep their graph", 30)
def test_forward_graph(answer):
    for case, first, expected, last, outputs in forward_cases(answer, [(1, 1), (2, 2, 3)]):
        for rank, (got, has_graph), right in ((0, first, expected), (1, last, outputs)):
            expect(got, right, f"{case}; what rank {rank} returns", 1e-10)
            if not has_graph:
                raise Wrong(f"case: {case}\nwhat rank {rank} returns has lost its graph "
                            "(requires_grad is False): no backward pass could start from it")


# 1.3


def run_backward(rank, answer, cases):
    found = []
    for stages, inputs, targets, _ in cases:
        stage = stages[rank]
        if rank == 0:
            activation, given = stage(inputs), None
        else:
            activation, given = stages[0](inputs).detach(), targets
        with refusing(*COLLECTIVES, why="send and recv are what this lesson is about"):
            loss = answer(rank, stage, activation, given, nn.functional.mse_loss)
        found.append((plain(loss), gradients(stage)))
    return found


def backward_cases(answer, shapes):
    """(case, per rank what it returned and its gradients, loss, per rank the right gradients)."""
    cases = []
    for seed, (rows, width) in enumerate(shapes):
        cases.append((stages_for(seed, width), *batch_for(seed, rows), (rows, width)))
    found = on_ranks(run_backward, answer, cases)
    for number, (stages, inputs, targets, shape) in enumerate(cases):
        loss = nn.functional.mse_loss(stages[1](stages[0](inputs)), targets)
        loss.backward()
        yield (f"an activation of shape {shape}", [ranks[number] for ranks in found], loss.item(),
               [gradients(stage) for stage in stages])  # fmt: skip


@part("1.3", "rank 1: loss and gradients", 40)
def test_backward_last(answer, sizes):
    for case, found, loss, right in backward_cases(answer, sizes((1, 1), (2, 3), (5, 4))):
        expect(found[1][0], loss, f"{case}; the loss that rank 1 returns", 1e-10)
        compare(found[1][1], right[1], case, 1)


@part("1.3", "rank 0: gradients", 60)
def test_backward_first(answer, sizes):
    for case, found, _, right in backward_cases(answer, sizes((1, 1), (2, 3), (5, 4))):
        compare(found[0][1], right[0], case, 0)


# 1.4


def run_steps(rank, answer, stages, batches, shape):
    stage = stages[rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.2, momentum=0.9)
    found = []
    for inputs, targets in batches:
        inputs, targets = (inputs, None) if rank == 0 else (None, targets)
        with refusing(*COLLECTIVES, why="send and recv are what this lesson is about"):
            loss = answer(rank, stage, optimizer, inputs, targets, shape, nn.functional.mse_loss)
        weights = {name: plain(p) for name, p in stage.named_parameters()}
        found.append((plain(loss), gradients(stage), weights))
    return found


def step_cases(answer, seed, rows, width, steps):
    """For each step (case, per rank what was found, loss, per rank gradients, weights)."""
    batches = [batch_for(seed + step, rows) for step in range(steps)]
    found = on_ranks(run_steps, answer, stages_for(seed, width), batches, (rows, width))
    model = nn.Sequential(*stages_for(seed, width))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step, (inputs, targets) in enumerate(batches):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        right = [(gradients(s), {k: plain(p) for k, p in s.named_parameters()}) for s in model]
        yield (f"{rows} rows, step {step}", [ranks[step] for ranks in found], loss.item(), right)


@part("1.4", "gradients equal autograd's", 60)
def test_step_gradients(answer, rng):
    seed = rng.randrange(1000)
    for case, found, loss, right in step_cases(answer, seed, 3, rng.randint(2, 5), steps=1):
        expect(found[1][0], loss, f"{case}; the loss that rank 1 returns", 1e-10)
        for rank in (1, 0):
            compare(found[rank][1], right[rank][0], case, rank)


@part("1.4", "three steps", 40)
def test_three_steps(answer, rng):
    seed = rng.randrange(1000)
    for case, found, loss, right in step_cases(answer, seed, 4, 3, steps=3):
        for rank in (0, 1):
            compare(found[rank][2], right[rank][1], case, rank, "updated weight")
        expect(found[1][0], loss, f"{case}; the loss that rank 1 returns", 1e-10)
