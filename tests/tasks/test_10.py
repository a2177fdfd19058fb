"""Tasks of lesson 10: ring all-reduce, a DDP step, bytes, and which one to use."""

import contextlib
from fractions import Fraction
from unittest import mock

from minipipe.teach.testing import Wrong, expect, kind, part, refusing, run_on_ranks

COLLECTIVES = [f"torch.distributed:{name}" for name in (
    "all_reduce", "all_reduce_coalesced", "all_reduce_inplace", "reduce", "broadcast",
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_tensor",
    "all_gather_tensor_autograd", "all_gather_inplace", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "reduce_scatter_single", "reduce_scatter_tensor_autograd",
    "all_to_all", "all_to_all_single", "all_to_all_single_autograd", "all_gather_object",
    "gather_object", "scatter_object_list", "broadcast_object_list",
)]  # fmt: skip


# The ring.

LENGTHS = {2: (2, 6, 5, 1), 4: (4, 12, 10, 3, 1000)}


def vector(rank, length):
    import torch

    generator = torch.Generator().manual_seed(100 * length + rank)
    return torch.randn(length, generator=generator, dtype=torch.float64)


@contextlib.contextmanager
def counted(sends, ring):
    """Note (elements, target) of every send of this rank, however `ring` got hold of it."""
    import torch
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as inner

    own = getattr(ring, "__globals__", {})

    def noted(original):
        def send(tensor, *arguments, **named):
            target = named.get("dst", arguments[0] if arguments else named.get("group_dst"))
            if isinstance(tensor, torch.Tensor):
                sends.append((tensor.numel(), target))
            return original(tensor, *arguments, **named)

        return send

    with contextlib.ExitStack() as stack:
        for name in ("send", "isend"):
            original = getattr(inner, name)
            replaced = noted(original)
            imported = {key: replaced for key, value in own.items() if value is original}
            stack.enter_context(mock.patch.dict(own, imported))
            for module in (dist, inner):
                stack.enter_context(mock.patch.object(module, name, replaced))
        yield


def around(rank, ring):
    """For each length what the ring returned and what this rank sent."""
    import torch.distributed as dist

    found = []
    for length in LENGTHS[dist.get_world_size()]:
        sends = []
        with refusing(*COLLECTIVES), counted(sends, ring):
            total = ring(vector(rank, length))
        found.append((total, sends))
    return found


def rings(answer):
    """(ranks, length, rank, what it returned, what it sent), from small to large."""
    import torch

    for ranks in LENGTHS:
        found = run_on_ranks(around, answer, ranks)
        for place, length in enumerate(LENGTHS[ranks]):
            total, case = found[0][place][0], f"ranks={ranks}, length {length}"
            if not isinstance(total, torch.Tensor):
                expect(total, sum(vector(rank, length) for rank in range(ranks)), case)
            if length >= ranks and not any(found[rank][place][1] for rank in range(ranks)):
                raise Wrong(f"case: {case}\nno rank was seen to send anything: call "
                            "dist.isend(...) or dist.send(...)")  # fmt: skip
            for rank in range(ranks):
                yield (ranks, length, rank, *found[rank][place])


@part("10.1", "the sum", 60)
def test_ring_sum(answer):
    for ranks, length, rank, total, _ in rings(answer):
        right = sum(vector(r, length) for r in range(ranks))
        expect(total, right, f"ranks={ranks}, a vector of length {length}; on rank {rank}", 1e-12)


@part("10.1", "bytes and steps", 40)
def test_ring_bytes(answer):
    """At most 2(n - 1) messages of one piece each, to neighbours only."""
    for ranks, length, rank, _, sends in rings(answer):
        case = f"ranks={ranks}, a vector of length {length}; rank {rank}"
        steps, piece = 2 * (ranks - 1), -(-length // ranks)
        strangers = {target for _, target in sends} - {(rank + 1) % ranks, (rank - 1) % ranks}
        if strangers:
            raise Wrong(f"case: {case}\nit sends to rank {min(strangers)}, which is no neighbour "
                        "in the ring")  # fmt: skip
        elements = sum(size for size, _ in sends)
        if len(sends) > steps or elements > steps * piece:
            each = ", ".join(str(size) for size, _ in sends[:12])
            raise Wrong(f"case: {case}\nneeded: at most {steps} messages, of {piece} element(s) "
                        f"each, {steps * piece} in all\nyours:  {len(sends)} messages, of {each} "
                        f"element(s), {elements} in all")  # fmt: skip


# A DDP step.

ROWS = {2: (4, 4), 3: (5, 3, 1)}


def net():
    import torch
    from torch import nn

    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Flatten(), nn.Linear(27, 4)).double()


def share(ranks):
    """The images and labels of each rank."""
    import torch

    rows = sum(ROWS[ranks])
    generator = torch.Generator().manual_seed(rows)
    images = torch.randn(rows, 1, 5, 5, generator=generator, dtype=torch.float64)
    labels = torch.randint(4, (rows,), generator=generator)
    return list(zip(images.split(ROWS[ranks]), labels.split(ROWS[ranks]), strict=True))


def refuse_ddp(*_, **__):
    raise Wrong("DistributedDataParallel may not be used here: the task is to do it by hand")


def one_step(rank, step):
    import torch
    import torch.distributed as dist

    model = net()
    inputs, targets = share(dist.get_world_size())[rank]
    with mock.patch.object(torch.nn.parallel.DistributedDataParallel, "__init__", refuse_ddp):
        loss = step(model, torch.nn.functional.cross_entropy, inputs, targets)
    loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
    return loss, {name: p.grad for name, p in model.named_parameters()}


def reference(ranks):
    """One process with the rows of all ranks."""
    import torch

    model, shares = net(), share(ranks)
    images, labels = (torch.cat(parts) for parts in zip(*shares, strict=True))
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters()}


def compare_gradients(answer, ranks):
    _, right = reference(ranks)
    for rank, (_, grads) in enumerate(run_on_ranks(one_step, answer, ranks)):
        for name in sorted(right, key=lambda name: right[name].numel()):
            case = f"rows of the ranks: {ROWS[ranks]}; rank {rank}, .grad of {name}"
            expect(grads[name], right[name], case, 1e-6)


@part("10.2", "equal shares", 50)
def test_equal_shares(answer):
    compare_gradients(answer, 2)


@part("10.2", "unequal shares", 30)
def test_unequal_shares(answer):
    compare_gradients(answer, 3)


@part("10.2", "the loss", 20)
def test_loss(answer):
    for ranks in (2, 3):
        right, _ = reference(ranks)
        for rank, (loss, _) in enumerate(run_on_ranks(one_step, answer, ranks)):
            if getattr(loss, "numel", lambda: 0)() == 1:
                loss = loss.item()
            expect(loss, right, f"rows of the ranks: {ROWS[ranks]}; returned on rank {rank}", 1e-6)


# Bytes.


def linear_case(sizes, cuts, rows, width, frozen=()):
    """A chain of linear layers, and by counting what is asked for; width: bytes an element."""
    import torch
    from torch import nn

    model = nn.Sequential(*[nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)])
    held = [width * (a * b + b) for a, b in zip(sizes, sizes[1:], strict=False)]
    inputs = torch.zeros(rows, sizes[0])
    if width == 8:
        model, inputs = model.double(), inputs.double()
    for layer in frozen:
        model[layer].requires_grad_(False)
    ends = [sum(cuts[: rank + 1]) for rank in range(len(cuts))]
    borders = [0, *(width * rows * sizes[end] for end in ends[:-1]), 0]
    trained = sum(size for layer, size in enumerate(held) if layer not in frozen)
    text = (f"linear layers {' → '.join(map(str, sizes))}, cuts={cuts}, {rows} rows, "
            f"{width} bytes a number"
            + (f", layer {frozen[0]} has requires_grad=False" if frozen else ""))  # fmt: skip
    right = {
        "ddp_sent": Fraction(2 * (len(cuts) - 1) * trained, len(cuts)), "ddp_held": sum(held),
        "pipeline_sent": [a + b for a, b in zip(borders, borders[1:], strict=False)],
        "pipeline_held": [sum(held[end - n : end]) for end, n in zip(ends, cuts, strict=True)],
    }  # fmt: skip
    return text, model, cuts, inputs, right


def image_case():
    """Convolutions with a batch norm, whose buffers are no parameters; sizes counted by hand."""
    import torch
    from torch import nn

    start = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    rest = nn.Conv2d(4, 2, 3, padding=1), nn.Flatten(), nn.Linear(32, 5)
    model = nn.Sequential(*start, *rest)
    first, norm, second, last = 4 * 9 + 4, 8, 2 * 4 * 9 + 2, 32 * 5 + 5
    one, two = 4 * 6 * 4 * 4 * 4, 4 * 6 * 2 * 4 * 4  # bytes of 6 rows at the two cuts
    right = {
        "ddp_sent": Fraction(4 * 4 * (first + norm + second + last), 3),
        "ddp_held": 4 * (first + norm + second + last),
        "pipeline_sent": [one, one + two, two],
        "pipeline_held": [4 * (first + norm), 4 * second, 4 * last],
    }
    return ("convolutions on 8 × 8 images, cuts=[3, 1, 2], 6 rows", model, [3, 1, 2],
            torch.zeros(6, 1, 8, 8), right)  # fmt: skip


def dtype_case():
    """Tokens are int64, what the embedding puts out float32, what goes on from it bfloat16."""
    import torch
    from torch import nn

    class Half(nn.Module):
        def forward(self, x):
            return x.bfloat16()

    model = nn.Sequential(nn.Embedding(7, 3), Half(), nn.Linear(3, 2, dtype=torch.bfloat16))
    one, two = 4 * 20 * 3, 2 * 20 * 3  # bytes of 5 · 4 tokens with 3 numbers each
    held = [4 * 7 * 3, 0, 2 * 8]
    right = {"ddp_sent": Fraction(4 * sum(held), 3), "ddp_held": sum(held),
             "pipeline_sent": [one, one + two, two], "pipeline_held": held}  # fmt: skip
    return ("an embedding (float32) of 5 · 4 tokens (int64), a layer that makes bfloat16 of it, a "
            "linear layer in bfloat16, cuts=[1, 1, 1]", model, [1, 1, 1],
            torch.zeros(5, 4, dtype=torch.int64), right)  # fmt: skip


def compare_bytes(answer, rng, *keys):
    cases = [
        linear_case([3, 2], [1], 5, 4), linear_case([3, 5, 2], [1, 1], 4, 4),
        linear_case([3, 5, 7, 2], [1, 1, 1], 2, 8), image_case(), dtype_case(),
        linear_case([4, 6, 8, 3, 5, 2], [2, 1, 2], 3, 4, frozen=(3,)),
        linear_case([rng.randint(2, 9) for _ in range(8)], [2, 3, 1, 1], rng.randint(2, 9), 4),
    ]  # fmt: skip
    for case, model, cuts, inputs, right in cases:
        mine = answer(model, list(cuts), inputs)
        if not isinstance(mine, dict):
            raise Wrong(f"case: {case}\na dictionary is asked for, yours is "
                        f"{kind(mine)}")  # fmt: skip
        for key in keys:
            if key not in mine:
                raise Wrong(f'case: {case}\nthe dictionary has no "{key}"')
            expected = right[key]
            expected = float(expected) if isinstance(expected, Fraction) else expected
            expect(mine[key], expected, f'{case}\n"{key}"')


@part("10.3", "DDP", 35)
def test_ddp_bytes(answer, rng):
    compare_bytes(answer, rng, "ddp_sent", "ddp_held")


@part("10.3", "a pipeline sends", 40)
def test_pipeline_sent(answer, rng):
    compare_bytes(answer, rng, "pipeline_sent")


@part("10.3", "a pipeline holds", 25)
def test_pipeline_held(answer, rng):
    compare_bytes(answer, rng, "pipeline_held")


# Which one.

PLENTY = {"state": 100, "activations": 1, "memory": 10**7}  # everything fits

# Worked out on squared paper, with bandwidth=1000. Columns: ranks, rows, microbatches, forward,
# backward, border | seconds that GPipe takes, seconds that DDP computes, and so many bytes of
# gradients that the ring takes what is between them. The first: micro-batches of 2 rows, a stage
# takes 1 s for F and 2 s for B, so GPipe (2 + 1) · 1 + (2 + 1) · 2 = 9 s. DDP computes 2 rows in
# 6 s. For 3 s the ring of 2 has 3000 bytes. In the fourth a message of 1000 bytes takes 1 s more,
# in each direction.
EQUAL = (
    (2, 4, 2, 1, 2, 0, 9, 6, 3000),
    (2, 4, 4, 1, 2, 0, Fraction(15, 2), 6, 1500),
    (2, 4, 1, 1, 2, 0, 12, 6, 6000),
    (2, 4, 2, 1, 2, 500, 11, 6, 5000),
    (3, 6, 2, 1, 2, 0, 12, 6, 4500),
    (3, 6, 3, 1, 2, 500, Fraction(44, 3), 6, 6500),
    (3, 12, 4, 2, 3, 250, 33, 20, 9750),
    (3, 9, 3, 1, 1, 1000, 30, 6, 18000),  # messages take longer than stages: they set the pace
    (4, 8, 8, 1, 2, 1000, 23, 6, 11333),
    (4, 8, 8, 1, 2, 2500, 53, 6, 31333),
    (4, 8, 4, 2, 2, 500, 20, 8, 8000),
    (4, 16, 8, 2, 4, 100, Fraction(171, 5), 24, 6800),
    (2, 6, 6, 3, 1, 2000, 28, 12, 16000),
    (2, 12, 3, 2, 6, 1000, 72, 48, 24000),
    (2, 8, 2, 1, 2, 2000, 44, 12, 32000),
    (5, 10, 2, 3, 1, 100, 28, 8, 12500),
    (6, 12, 6, 1, 5, 500, Fraction(106, 3), 12, 14000),
    (6, 24, 3, 2, 2, 125, Fraction(158, 3), 16, 22000),
)

# ranks, rows, state, activations | the bytes that one rank needs with DDP, in the pipeline
NEEDED = (
    (2, 8, 800, 10, 840, 440), (4, 8, 800, 10, 820, 220), (4, 16, 400, 3, 412, 112),
    (3, 9, 600, 5, 615, 215), (5, 20, 1000, 25, 1100, 300), (6, 12, 300, 40, 380, 130),
)  # fmt: skip


def choice(answer, right, why, **case):
    """Wrong where the answer's choice is none of `right`; its choice."""
    mine = answer(**case)
    if not isinstance(mine, str) or mine not in right:
        text = ", ".join(f"{name}={value}" for name, value in case.items())
        shown = repr(mine)[:60] + ("" if isinstance(mine, str) else f", {kind(mine)}")
        raise Wrong(f"case: {text}\nexpected: {' or '.join(map(repr, right))}\n"
                    f"yours:    {shown}\n{why}")  # fmt: skip
    return mine


@part("10.4", "what fits", 50)
def test_what_fits(answer, rng):
    """The way that would be faster fits exactly, nearly, or not at all."""
    for light in (True, False):
        faster = "DDP" if light else "the pipeline"
        for ranks, rows, state, activations, with_ddp, in_pipeline in NEEDED:
            near = (-1, 0, 1) if ranks in (2, 4) else (-1, 1)  # thirds may be off by a rounding
            more = rng.randint(2, 9)
            for times in (1, more):
                for memory in sorted(times * need + off for need in (with_ddp, in_pipeline)
                                     for off in near):  # fmt: skip
                    right = ("neither" if memory < times * in_pipeline else
                             "ddp" if light and memory >= times * with_ddp else "pipeline")
                    choice(answer, [right], f"a rank needs {times * with_ddp} bytes with DDP and "
                           f"{times * in_pipeline} in the pipeline; {faster} is faster",
                           ranks=ranks, rows=rows, microbatches=2, forward=1, backward=2,
                           state=times * state, activations=times * activations,
                           gradients=1 if light else 10**6, border=1, memory=memory,
                           bandwidth=1000)  # fmt: skip


@part("10.4", "what is faster", 50)
def test_what_is_faster(answer, rng):
    """Everything fits. With a little less than so many gradients DDP is faster, with a little more
    the pipeline: with these numbers, and with larger ones that make all of it longer alike."""
    either = ["ddp", "pipeline"]
    choice(answer, either, "a single rank has nothing to send, so both are the same",
           ranks=1, rows=4, microbatches=2, forward=1, backward=2, **PLENTY, gradients=25,
           border=1, bandwidth=1000)  # fmt: skip
    for changed in (False, True):
        for ranks, rows, microbatches, *costs, border, gpipe, ddp, gradients in EQUAL:
            slower, heavier, more = (rng.randint(2, 7) if changed else 1 for _ in range(3))
            time, size = slower * more, slower * heavier
            for percent, right in ((97, "ddp"), (103, "pipeline")):
                choice(answer, [right], f"GPipe takes {float(gpipe * time):.4g} s; DDP computes "
                       f"for {float(ddp * time):.4g} s, and then comes its ring",
                       ranks=ranks, rows=rows * more, microbatches=microbatches,
                       forward=costs[0] * slower, backward=costs[1] * slower, **PLENTY,
                       gradients=gradients * size * more * percent // 100, border=border * size,
                       bandwidth=1000 * heavier)  # fmt: skip
    for _ in range(12):
        case = {"ranks": rng.randint(2, 7), "rows": rng.randint(7, 40),
                "microbatches": rng.randint(1, 7), "forward": rng.randint(1, 5),
                "backward": rng.randint(1, 9), **PLENTY, "bandwidth": 1000}  # fmt: skip
        why = "no gradients: DDP has no more to do than compute, and the pipeline has its bubble"
        choice(answer, ["ddp"], why, **case, gradients=0, border=rng.randint(0, 900))
        for name, other, last in (("gradients", "border", "pipeline"),
                                  ("border", "gradients", "ddp")):  # fmt: skip
            case[other] = rng.randint(1, 2000)
            before = None
            for power in range(9):
                why = f"the larger {name} is, the worse for the other way"
                right = [last] if power == 8 or before == last else either
                before = choice(answer, right, why, **{**case, name: 10**power})
