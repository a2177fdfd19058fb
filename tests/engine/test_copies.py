"""Stages that stand on two rows: their gradients are summed once, after the last backward, and the
copies stay one model (traps of kind 11: 72, 73, 75, 86, 89)."""

import copy

import pytest
import torch
from ranks import batch, error, gradients, mean_mse, on_ranks, one_process, schedule, sum_mse
from torch import nn

import minipipe as mp
from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)
TOLERANCE = 1e-10

# Data-parallel replicas as rows: two pipelines of two ranks, backwards in another order than
# forwards (trap 75), one with late W's (86). And every stage on every rank.
REPLICAS = mp.Schedule.parse("""
    0F0 0F1 0F2 0B2 0B1 0B0
    1F0 1F1 1F2 1B2 1B1 1B0
    0F3 0F4 0F5 0I3 0I5 0I4 0W5 0W4 0W3
    1F3 1I3 1F4 1F5 1I5 1I4 1W5 1W3 1W4
""", "replicas")  # fmt: skip
EVERYWHERE = mp.Schedule.parse("""
    0F0 1F0 1B0 0B0 0F1 1F1 1I1 1W1 0B1
    0F2 1F2 1B2 0B2
    0F3 1F3 1I3 0I3 0W3 1W3
    0F4 1F4 1B4 0B4
""", "everywhere")
TABLES = {
    "replicas": REPLICAS, "everywhere": EVERYWHERE, "dualpipe": schedule("dualpipe", 4, 8),
    "chimera": schedule("chimera", 4, 5), "chimera M=2": schedule("chimera", 4, 2),
}  # fmt: skip


def layers(stages: int, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.PReLU())  # noqa: E731
    return nn.Sequential(*(make() for _ in range(stages))).double()


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
}  # fmt: skip


def train(rank, tables, kind, own):
    """Three steps with an optimizer of the caller's or the pipeline's own: errors against one
    process, and the state to compare the copies bit by bit."""
    found = []
    for rows in tables.values():
        model, make = layers(rows.stages), OPTIMIZERS[kind]
        other = copy.deepcopy(model)
        pipe = Pipeline(model, rows, mean_mse, optimizer=make if own else None)
        optimizer, plain = None if own else make(pipe.parameters()), make(other.parameters())
        worst = 0.0
        for seed in range(3):
            x, y = batch(17, seed=seed), batch(17, seed=seed + 9)
            plain.zero_grad()
            if not own:
                optimizer.zero_grad()
            loss, wanted = one_process(other, x, y)
            worst = max(worst, abs(pipe.step(x, y).loss - loss), error(gradients(pipe), wanted))
            plain.step()
            if not own:
                optimizer.step()
            worst = max(worst, error(pipe.state_dict(), other.state_dict()))
        found.append((worst, pipe.state_dict(), gradients(pipe)))
    return found


def assert_bit_equal(states: list[dict]) -> None:
    """What several ranks have is the same on all of them."""
    known: dict = {}
    for state in states:
        for name, value in state.items():
            assert torch.equal(known.setdefault(name, value), value), name


@pytest.mark.parametrize("kind, own", [("momentum", False), ("adam", False), ("adam", True)])
def test_copies_stay_bit_equal_and_equal_one_process(kind, own):
    """Trap 72, 89: copies drift apart; 86: late weight gradients miss the sum."""
    everyone = on_ranks(train, TABLES, kind, own, ranks=4)
    for number, (name, rows) in enumerate(TABLES.items()):
        assert rows.copies, name
        assert max(rank[number][0] for rank in everyone) < TOLERANCE, name
        for place in (1, 2):
            assert_bit_equal([rank[number][place] for rank in everyone])


def accumulate(rank, tables, reduction):
    """Two steps without zeroing, then the same after zeroing."""
    worst, loss_fn = 0.0, {"mean": mean_mse, "sum": sum_mse}[reduction]
    for rows in tables.values():
        model = layers(rows.stages)
        other = copy.deepcopy(model)
        pipe = Pipeline(model, rows, loss_fn, reduction)
        for seed in range(3):
            if seed == 2:
                pipe.zero_grad()
                other.zero_grad()
            x, y = batch(13, seed=seed), batch(13, seed=seed + 9)
            loss, wanted = one_process(other, x, y, loss_fn, mean=reduction == "mean")
            worst = max(worst, abs(pipe.step(x, y).loss - loss), error(gradients(pipe), wanted))
    return worst


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_two_steps_accumulate(reduction):
    """What the first step left is not summed over the copies again."""
    assert max(on_ranks(accumulate, TABLES, reduction, ranks=4)) < TOLERANCE


def clip(rank, tables):
    found = []
    for rows in tables.values():
        model = layers(rows.stages)
        other = copy.deepcopy(model)
        pipe = Pipeline(model, rows, mean_mse)
        pipe.step(batch(17), 5 * batch(17, seed=2))
        one_process(other, batch(17), 5 * batch(17, seed=2))
        norm = pipe.clip_grad_norm_(0.3)
        wanted = float(nn.utils.clip_grad_norm_(other.parameters(), 0.3))
        assert norm == pytest.approx(wanted, rel=1e-12) and norm > 0.3
        found.append((error(gradients(pipe), gradients(other)), gradients(pipe), norm))
    return found


def test_a_norm_counts_each_copy_once():
    everyone = on_ranks(clip, TABLES, ranks=4)
    for number in range(len(TABLES)):
        # torch's own clipping in one process differs in a last digit of the factor.
        assert max(rank[number][0] for rank in everyone) < 1e-6
        assert_bit_equal([rank[number][1] for rank in everyone])
        assert len({rank[number][2] for rank in everyone}) == 1


# Parameters of all kinds.


class Odd(nn.Module):
    """Uses `positive` for micro-batches whose first number is positive, `never` for none."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.positive = nn.Parameter(torch.ones(6))
        self.never = nn.Parameter(torch.ones(3))
        self.small = nn.Parameter(torch.ones(6))
        self.matrix = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
        self.frozen = nn.Parameter(torch.full((6,), 0.5), requires_grad=False)

    def forward(self, x):
        if float(x.detach()[0, 0]) > 0:
            x = x * self.positive
        x = self.layer(x) * self.frozen + (x.float() * self.small).double()
        return x + self.matrix(x.reshape(-1, 2, 1, 3).expand(-1, -1, 2, -1)).sum((1, 2, 3))[:, None]


def odd(stages: int) -> list[nn.Module]:
    torch.manual_seed(0)
    model = [Odd().double() for _ in range(stages)]
    for module in model:
        module.small.data = module.small.data.float()
    return model


def kinds(rank, cases):
    found = []
    for rows, signs in cases:
        model = odd(rows.stages)
        other = copy.deepcopy(model)
        pipe = Pipeline(model, rows, mean_mse)
        x = batch(3 * rows.microbatches).abs()
        x = x * torch.tensor(signs, dtype=torch.float64).repeat_interleave(3)[:, None]
        for _ in range(2):  # accumulates: with what is None and what is not
            _, wanted = one_process(other, x, batch(len(x), seed=2), microbatches=rows.microbatches)
            pipe.step(x, batch(len(x), seed=2))
        grads = gradients(pipe)
        none = {name for name, g in grads.items() if g is None}
        lacking = {name for name, g in wanted.items() if g is None} & grads.keys()
        small = [n for n in grads if "small" in n]
        assert all(grads[n].dtype == torch.float32 for n in small)
        wrong = max(error({n: g for n, g in grads.items() if n not in small}, wanted),
                    1e-6 * error({n: grads[n] for n in small}, wanted))  # fmt: skip
        found.append((wrong, none ^ lacking, grads))
    return found


def test_kinds_of_parameters():
    """A gradient on one copy only, on both, on none; frozen; of two dtypes; of other strides."""
    rows = schedule("chimera", 2, 4)
    cases = [(rows, signs) for signs in ([1, 1, -1, -1], [-1, -1, 1, 1], [1, -1, 1, -1], [-1] * 4)]
    everyone = on_ranks(kinds, cases, ranks=2)
    for number in range(len(cases)):
        for wrong, none, _ in (rank[number] for rank in everyone):
            assert wrong < TOLERANCE and not none, (cases[number], wrong, none)
        assert_bit_equal([{n: g for n, g in rank[number][2].items() if g is not None}
                          for rank in everyone])  # fmt: skip


def all_frozen(rank):
    """A stage without a trained parameter, and one without any, on two ranks."""
    model = layers(2)
    model = [model[0].requires_grad_(False), nn.Tanh(), model[1], nn.Identity()]
    other = copy.deepcopy(model)
    pipe = Pipeline(model, schedule("dualpipe", 4, 8), mean_mse)
    pipe.step(batch(17), batch(17, seed=2))
    _, wanted = one_process(other, batch(17), batch(17, seed=2))
    return max(error(gradients(pipe), wanted), abs(pipe.clip_grad_norm_(1e9) - float(torch.stack(
        [g.norm() for g in wanted.values() if g is not None]).norm())))  # fmt: skip


def test_frozen_and_empty_copies():
    assert max(on_ranks(all_frozen, ranks=4)) < TOLERANCE


# Once.


def count(rank, rows):
    """How often a step sums over ranks, and whether all backward passes are over by then."""
    import torch.distributed as dist

    calls, done = [], []
    pipe = Pipeline(layers(rows.stages), rows, mean_mse)
    for stage in pipe._stages.values():
        for name in ("backward", "backward_weight"):
            run = getattr(stage, name)
            setattr(stage, name, lambda *a, run=run: (run(*a), done.append(1))[0])
    reduce = dist.all_reduce

    def counted(*arguments, **options):
        calls.append(len(done))
        return reduce(*arguments, **options)

    dist.all_reduce = counted
    try:
        pipe.step(batch(17), batch(17, seed=2))
    finally:
        dist.all_reduce = reduce
    expected = sum(part.kind in "BIW" for action in rows.rows[rank] for part in action.parts)
    return calls, [expected] * len(pipe._stages)


def test_summed_once_a_stage_after_the_last_backward():
    """Trap 73, 75: after a certain micro-batch's backward, while others follow."""
    for rows in (TABLES["dualpipe"], REPLICAS):
        for calls, wanted in on_ranks(count, rows, ranks=4):
            assert calls == wanted and calls


# What is sent.


def sends(rank, rows, buffers):
    """Bytes of two steps' messages, and what each step sent beyond them."""
    model = layers(rows.stages)
    if buffers:  # a mean, a deviation and a count in each stage
        model = [nn.Sequential(stage, nn.BatchNorm1d(6).double()) for stage in model]
    pipe = Pipeline(list(model), rows, mean_mse)
    steps = [pipe.step(batch(24), batch(24, seed=2)) for _ in range(2)]
    return [(s.timeline.bytes_sent, s.bytes_sent - s.timeline.bytes_sent[rank]) for s in steps]


@pytest.mark.parametrize("name, stages, sent", [
    ("chimera", 2, 1), ("dualpipe", 2, 1), ("replicas", 1, 1), ("everywhere", 2, 1.5)])  # fmt: skip
def test_bytes_sent_have_the_sums_over_copies(name, stages, sent):
    """A stage has 55 parameters in float64 and, for each of its 5 tensors, a number that says
    whether there is a gradient: 480 bytes, all of which each of a pair sends; of k ranks in a
    ring, 2 (k - 1) / k of them. The timeline's messages stay what is predicted."""
    rows = schedule(name, 4, 8) if name in ("chimera", "dualpipe") else TABLES[name]
    rows_each = 24 // rows.microbatches
    predicted = mp.simulate(rows, mp.Costs(message_size=rows_each * 6 * 8)).bytes_sent
    for buffers, size in ((False, 480), (True, 480 + 14 * 8 + 2 * 48 + 8)):
        for found in on_ranks(sends, rows, buffers, ranks=4):
            assert found == [(predicted, stages * size * sent)] * 2


def test_without_copies_bytes_sent_are_the_messages():
    for found in on_ranks(sends, schedule("1f1b", 4, 4), True, ranks=4):
        assert [more for _, more in found] == [0, 0]


def by_the_kernel(rank, rows):
    """Bytes that left over TCP within the sums over copies, and those that are counted."""
    import time

    import torch.distributed as dist

    from minipipe.training import tcp_bytes_sent

    def settled():
        seen = [tcp_bytes_sent()]
        while len(seen) < 2 or seen[-1] != seen[-2]:
            time.sleep(0.05)
            seen.append(tcp_bytes_sent())
        return seen[-1]

    pipe = Pipeline([nn.Linear(200, 200).double() for _ in range(rows.stages)], rows, mean_mse)
    pipe.step(batch(8, 200), batch(8, 200))
    reduce, total = dist.all_reduce, []

    def counted(tensor, group):
        before = settled()
        dist.barrier(group)
        reduce(tensor, group=group)
        dist.barrier(group)
        total.append((settled() or 0) - (before or 0))

    dist.all_reduce = counted
    try:
        step = pipe.step(batch(8, 200), batch(8, 200))
    finally:
        dist.all_reduce = reduce
    return None if tcp_bytes_sent() is None else sum(total), (
        step.bytes_sent - step.timeline.bytes_sent[rank])  # fmt: skip


def test_bytes_of_the_sums_are_those_that_the_kernel_counts():
    for rows in (REPLICAS, EVERYWHERE):
        for sent, counted in on_ranks(by_the_kernel, rows, ranks=4):
            if sent is None:
                pytest.skip("the kernel counts them on Linux alone")
            assert counted > 300_000 and sent == pytest.approx(counted, rel=0.02)


# State, evaluation, failures.


def states(rank, rows):
    """state_dict, and its way back into another pipeline and into the whole model."""
    pipe = Pipeline(layers(rows.stages), rows, mean_mse, optimizer=OPTIMIZERS["momentum"])
    pipe.step(batch(17), batch(17, seed=2))
    state = copy.deepcopy(pipe.state_dict())
    again = Pipeline(layers(rows.stages, seed=5), rows, mean_mse)
    whole = layers(rows.stages, seed=5)
    again.load_state_dict(whole.state_dict() | state)
    return state, error(again.state_dict(), state)


def test_state():
    rows = TABLES["dualpipe"]
    everyone = on_ranks(states, rows, ranks=4)
    assert_bit_equal([state for state, _ in everyone])
    assert all(off == 0 for _, off in everyone)
    whole = layers(rows.stages)
    assert set().union(*(state for state, _ in everyone)) == whole.state_dict().keys()
    whole.load_state_dict({k: v for state, _ in everyone for k, v in state.items()})


def evaluate(rank, tables):
    worst = 0.0
    for rows in tables.values():
        model = layers(rows.stages)
        plain = copy.deepcopy(model)
        pipe = Pipeline(model, rows, mean_mse)
        for size in (1, 2, 3, 7, 8, 9, 17):
            x, y = batch(size, seed=size), batch(size, seed=size + 1)
            seen, outputs = pipe.evaluate(x, y), plain(x)
            assert seen.outputs.shape == outputs.shape
            worst = max(worst, error({"": seen.outputs}, {"": outputs.detach()}),
                        abs(seen.loss - float(mean_mse(outputs, y))))  # fmt: skip
            assert pipe.evaluate(x).loss is None
        pipe.step(batch(17), batch(17, seed=2))  # and a step behind it
        worst = max(worst, error(gradients(pipe), one_process(plain, batch(17),
                                                              batch(17, seed=2))[1]))  # fmt: skip
    return worst


def test_evaluate_with_any_number_of_rows():
    assert max(on_ranks(evaluate, TABLES, ranks=4)) < TOLERANCE


def data_on_needed_ranks_only(rank, rows):
    """Both ends of both ways need the batch; the others may pass None."""
    pipe = Pipeline(layers(rows.stages), rows, mean_mse)
    first, last = 0 in rows.stages_of(rank), rows.stages - 1 in rows.stages_of(rank)
    x, y = batch(17) if first else None, batch(17, seed=2) if last else None
    loss = pipe.step(x, y).loss
    other, wanted = one_process(layers(rows.stages), batch(17), batch(17, seed=2))
    return max(abs(loss - other), error(gradients(pipe), wanted))


def test_only_the_ends_need_the_batch():
    for rows in (TABLES["dualpipe"], REPLICAS):
        assert max(on_ranks(data_on_needed_ranks_only, rows, ranks=4)) < TOLERANCE


class Fails(nn.Linear):
    """Raises in its third use on one rank."""

    def forward(self, x):
        import torch.distributed as dist

        self.uses = getattr(self, "uses", 0) + 1
        if dist.get_rank() == 3 and self.uses == 3:
            raise ArithmeticError("a copy breaks")
        return super().forward(x)


def breaks(rank, backward):
    stages = [nn.Linear(6, 6) for _ in range(4)]
    stages[0] = Fails(6, 6)
    if backward:
        stages[0] = nn.Linear(6, 6)
        if rank == 3:
            stages[0].weight.register_hook(lambda g: 1 / 0)
    pipe = Pipeline([s.double() for s in stages], schedule("dualpipe", 4, 8), mean_mse)
    pipe.step(batch(16), batch(16))


@pytest.mark.parametrize("backward", [False, True])
def test_a_failure_in_one_copy_reaches_every_rank(failures, backward):
    found = failures(breaks, backward, ranks=4)
    word = "division" if backward else "a copy breaks"
    assert all(found) and all(word in failure["text"] for failure in found), found
    assert all(failure["seconds"] < 15 for failure in found)
    kinds = [failure["type"] for failure in found]
    assert kinds[3] != "PipelineError" and kinds[:3] == ["PipelineError"] * 3


def running_means(rank, rows):
    torch.manual_seed(0)
    model = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double() for _ in range(4)]
    pipe = Pipeline(model, rows, mean_mse)
    for seed in range(3):
        pipe.step(batch(24, seed=seed), batch(24, seed=seed + 9))
    return {k: v for k, v in pipe.state_dict().items() if "running" in k or "tracked" in k}


def test_buffers_of_copies_are_equal():
    """The copies are one model: what BatchNorm has seen must not depend on the copy, or evaluate
    and the saved state do."""
    assert_bit_equal(on_ranks(running_means, schedule("chimera", 4, 4), ranks=4))
