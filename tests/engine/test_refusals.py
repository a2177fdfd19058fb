"""What can't work: one clear error on every rank that names the user's own argument, no hang."""

import itertools
import time
from functools import partial

import pytest
import torch
from ranks import batch, error, gradients, keeps_nothing, mean_mse, mlp, on_ranks, schedule
from torch import nn

from minipipe import Costs, Pace
from minipipe.pipeline import Pipeline
from minipipe.ranks.launch import RankError

pytestmark = pytest.mark.timeout(60)


def every(found, *words, kind="InputError"):
    """Every rank raised this kind of error, soon, with these words in its text."""
    assert all(found), f"some ranks raised nothing: {found}"
    for rank, failure in enumerate(found):
        assert failure["type"] == kind, f"rank {rank}: {failure}"
        assert failure["seconds"] < 15, f"rank {rank}: {failure}"
        for word in words:
            assert word in failure["text"], f"rank {rank}: no {word!r} in {failure['text']!r}"


# The batch.


def steps(rank, batches, rows=("1f1b", 4, 4), width=6):
    pipe = Pipeline(mlp(8, width), schedule(*rows), mean_mse)
    for inputs, targets in batches:
        pipe.step(inputs, targets)


@pytest.mark.parametrize("rows", [1, 3])
def test_fewer_rows_than_microbatches(failures, rows):
    """Trap 13, 37: B < M is refused with the user's own words, not with an assertion."""
    x = batch(rows)
    found = failures(steps, [(x, x)], ranks=4)
    every(found, f"inputs have {rows} rows", "4 micro-batches need at least 4")
    assert all(failure["value"] for failure in found)


def test_no_rows_at_all(failures):
    every(failures(steps, [(batch(0), batch(0))], ranks=4), "inputs have 0 rows")


def test_targets_with_other_rows_than_inputs(failures):
    """Trap kind 14: images and labels of different batches."""
    every(failures(steps, [(batch(8), batch(9))], ranks=4), "inputs", "targets", "[8]", "[9]")


@pytest.mark.parametrize("missing", ["inputs", "targets"])
def test_none_where_a_batch_is_needed(failures, missing):
    x = batch(8)
    pair = (None, x) if missing == "inputs" else (x, None)
    every(failures(steps, [pair], ranks=4), f"{missing} are needed")


@pytest.mark.parametrize("wrong", [3, "text", torch.tensor(1.0), (batch(8), None), ()])
def test_inputs_that_are_no_tensors_with_rows(failures, wrong):
    every(failures(steps, [(wrong, batch(8))], ranks=4), "inputs")


def test_inputs_of_different_rows(failures):
    every(failures(steps, [((batch(8), batch(9)), batch(8))], ranks=4), "inputs differ", "[8, 9]")


def after_a_refusal(rank):
    pipe = Pipeline(mlp(8), schedule("1f1b", 2, 4), mean_mse)
    refused = 0
    for rows in (3, 8, 2, 9):
        try:
            pipe.step(batch(rows), batch(rows))
        except ValueError:
            refused += 1
    return refused


def test_a_refused_batch_leaves_the_pipeline_usable():
    assert on_ranks(after_a_refusal, ranks=2) == [2, 2]


def test_only_the_ranks_at_the_ends_need_a_batch():
    def fn(rank):
        pipe = Pipeline(mlp(8), schedule("1f1b", 4, 4), mean_mse)
        return pipe.step(batch(8) if rank == 0 else None, batch(8) if rank == 3 else None).loss

    assert len(set(on_ranks(fn, ranks=4))) == 1


# What the ranks do, and with which arguments.

CALLS = {
    "step": lambda pipe: pipe.step(batch(8), batch(8)),
    "evaluate": lambda pipe: pipe.evaluate(batch(8), batch(8)),
    "clip_grad_norm_": lambda pipe: pipe.clip_grad_norm_(1.0),
}


def calls(rank, cases, rows):
    """In each case every rank makes its own call, which is refused and changes nothing; then all
    go on alike."""
    texts = []
    for each in cases:
        pipe = Pipeline(mlp(8), schedule(*rows), mean_mse)
        pipe.step(batch(8), batch(8))
        before = gradients(pipe)
        try:
            each[rank](pipe)
            texts.append("not refused")
        except ValueError as refused:
            texts.append(f"{type(refused).__name__}: {refused}")
        assert error(gradients(pipe), before) == 0
        norm = pipe.clip_grad_norm_(1e9)
        pipe.zero_grad()
        pipe.memory_meter = True
        pipe.step(batch(8), batch(8))
        assert error(gradients(pipe), before) == 0 and pipe.clip_grad_norm_(1e9) == norm
    return texts


def refused(cases, rows=("1f1b", 2, 4)):
    """cases: what each rank calls, and how the error begins that all of them raise."""
    everyone = on_ranks(calls, [each for each, _ in cases], rows, ranks=rows[1])
    for (_, words), *texts in zip(cases, *everyone, strict=True):
        assert len(set(texts)) == 1 and texts[0].startswith(f"InputError: {words}"), texts


def stepping(**arguments):
    return lambda pipe: pipe.step(batch(8), batch(8), **arguments)


def clipping(*arguments):
    return lambda pipe: pipe.clip_grad_norm_(*arguments)


def test_ranks_that_call_different_things_are_refused():
    """A step on one rank met the clipping on another, and gloo ended both with SIGABRT."""
    words = "the ranks don't do the same: rank 0 calls {}, rank 1 calls {}"
    pairs = itertools.permutations(CALLS, 2)
    refused([([CALLS[a], CALLS[b]], words.format(a, b)) for a, b in pairs])
    words = "the ranks don't do the same: rank 0 calls step, rank 1 calls evaluate, rank 2 calls cl"
    refused([([*CALLS.values()], words)], rows=("1f1b", 3, 4))


def caught(rank, where):
    """A step fails on one rank; each rank catches its error, and returns what it says."""
    def loss(outputs, targets):
        if where == "loss":
            raise ValueError("my loss")
        return mean_mse(outputs, targets)

    pipe = Pipeline(mlp(8), schedule("1f1b", 2, 4), loss)
    texts = []
    for _ in range(2):
        try:
            pipe.step(batch(8) if where == "loss" else batch(8)[:, :3], batch(8))
        except (RuntimeError, ValueError) as error:
            texts.append(str(error))
    return texts


@pytest.mark.parametrize("where, first, words", [("loss", 1, "my loss"), ("stage", 0, "mat1 and")])
def test_ranks_that_catch_a_failed_step_return_their_results(where, first, words):
    """The wait for each other at the end met broken connections, and took the place of results."""
    found = on_ranks(caught, where, ranks=2)
    for rank, (once, again) in enumerate(found):
        assert words in once and (f"rank {first} failed" in once) == (rank != first)
        assert "an earlier step failed and broke the connections" in again and words in again


def other_pipelines(rank):
    """The ranks use different ones of two Pipelines, which is refused; then the same ones."""
    one, other = (Pipeline(mlp(8), schedule("1f1b", 2, 4), mean_mse) for _ in range(2))
    texts = []
    for call in ("step", "evaluate"):
        try:
            getattr(one if rank else other, call)(batch(8), batch(8))
        except ValueError as refused:
            texts.append(f"{type(refused).__name__}: {refused}")
    return texts, [pipe.step(batch(8), batch(8)).loss for pipe in (other, one)]


def test_ranks_that_use_different_pipelines_are_refused():
    """They waited for each other until the limit."""
    words = ("InputError: the ranks don't do the same: rank 0 calls {0} of its Pipeline no. 2, "
             "rank 1 calls {0} of its Pipeline no. 1")  # fmt: skip
    for texts, losses in on_ranks(other_pipelines, ranks=2):
        assert texts == [words.format("step"), words.format("evaluate")]
        assert losses[0] == losses[1]


@pytest.mark.parametrize("name", ["1f1b", "chimera"])
def test_another_loss_scale_on_a_rank(name):
    same = "loss_scale must be the same on every rank, but is "
    refused([
        ([stepping(loss_scale=2.0), stepping()], same + "2.0 on rank 0, 1.0 on rank 1"),
        ([stepping(), stepping(loss_scale=-1.0)], same + "1.0 on rank 0, -1.0 on rank 1"),
        ([stepping(), stepping(loss_scale=1 + 2**-52)], same + "1.0 on rank 0, 1.0000000000000002"),
    ], rows=(name, 2, 4))  # fmt: skip


def test_a_pace_that_is_none_on_a_rank():
    """The rank with it left before the others knew, and they waited for its next call."""
    few = Pace(Costs([1.0, 1.0, 1.0]))
    refused([
        ([stepping(pace=5), stepping()], "rank 0: pace must be a Pace, not int"),
        ([stepping(), stepping(pace=0)], "rank 1: pace must be a Pace, not int"),
        ([stepping(), stepping(pace=few)], "rank 1: pace: forward has 3 costs, but the schedule"),
    ])  # fmt: skip


def test_a_loss_scale_that_is_no_number():
    cases = []
    for wrong in (None, "2", float("nan"), float("inf"), [1.0], 2j):
        words = f": loss_scale must be a finite number, not {wrong!r}"
        bad = stepping(loss_scale=wrong)
        cases += [([bad, bad], "rank 0" + words), ([stepping(), bad], "rank 1" + words)]
    refused(cases)


def scaled(rank):
    """A new loss scale is no new form of batch; a number of any kind will do."""
    pipe, found = Pipeline(mlp(8), schedule("1f1b", 2, 4), mean_mse), []
    for scale in (1, 2.0, torch.tensor(4.0), -1):
        pipe.zero_grad()
        pipe.step(batch(8), batch(8), loss_scale=scale)
        found.append(gradients(pipe))
    return len(pipe._forms), [error({n: g * s for n, g in found[0].items()}, other)
                              for s, other in zip((1, 2, 4, -1), found, strict=True)]  # fmt: skip


def test_loss_scales_that_are_alike():
    for forms, wrong in on_ranks(scaled, ranks=2):
        assert forms == 1 and max(wrong) < 1e-12


def test_clipping_with_other_or_wrong_arguments():
    refused([([clipping(*one), clipping(*other)], words) for one, other, words in [
        ((1.0,), (2.0,), "max_norm must be the same on every rank, but is 1.0 on rank 0, 2.0 on"),
        ((1.0, 2.0), (1.0, float("inf")), "norm_type must be the same on every rank, but is 2.0"),
        ((-1.0,), (-1.0,), "rank 0: max_norm must be a number of at least 0, not -1.0"),
        ((1.0,), (float("nan"),), "rank 1: max_norm must be a number of at least 0, not nan"),
        ((None,), (1.0,), "rank 0: max_norm must be a number of at least 0, not None"),
        ((1.0, 0), (1.0, 0), "rank 0: norm_type must be a number above 0, not 0"),
        ((1.0, 2.0), (1.0, "fro"), "rank 1: norm_type must be a number above 0, not 'fro'"),
    ]])  # fmt: skip


def test_a_memory_meter_on_one_rank_only():
    def off(pipe):
        pipe.memory_meter = False
        pipe.step(batch(8), batch(8))

    refused([([CALLS["step"], off], "memory_meter must be the same on every rank, but is True on")])


# The arguments of a Pipeline.


def make(rank, model=None, rows=None, loss_fn=mean_mse, **arguments):
    Pipeline(model or mlp(8), rows or schedule("1f1b", 2, 2), loss_fn, **arguments)


@pytest.mark.parametrize(
    "kind, words, arguments",
    [
        ("ValueError", ["3 rows", "2 ranks"], {"rows": schedule("1f1b", 3, 2)}),
        ("ValueError", ["1 rows", "2 ranks"], {"rows": schedule("1f1b", 1, 2)}),
        ("TypeError", ["schedule must be a Schedule", "str"], {"rows": "1f1b"}),
        ("TypeError", ["schedule must be a Schedule", "tuple"],
         {"rows": schedule("1f1b", 2, 2).rows}),
        ("ValueError", ["reduction must be 'mean' or 'sum'", "avg"], {"reduction": "avg"}),
        ("ValueError", ["reduction must be", "None"], {"reduction": None}),
        ("TypeError", ["loss_fn must be a function"], {"loss_fn": 3}),
        ("TypeError", ["optimizer must be a function"], {"optimizer": "sgd"}),
        ("ValueError", ["stages=2", "1 layers"], {"model": nn.Sequential(nn.Linear(6, 6))}),
        ("ValueError", ["stages=2", "3 modules"], {"model": [nn.Tanh(), nn.Tanh(), nn.Tanh()]}),
        ("ValueError", ["cuts=[1, 2]", "8 layers"], {"cuts": [1, 2]}),
        ("TypeError", ["nn.Sequential"], {"model": nn.Linear(6, 6)}),
        ("TypeError", ["cuts must be a list", "not 4"], {"cuts": 4}),
        ("TypeError", ["costs must be a list", "the class Costs"], {"costs": Costs}),
    ],
)  # fmt: skip
def test_wrong_arguments(failures, kind, words, arguments):
    every(failures(partial(make, **arguments), ranks=2), *words, kind=kind)


@pytest.mark.parametrize("wrong, what", [(Costs, "the class itself"), (None, "NoneType"),
                                         (0.01, "float")])  # fmt: skip
def test_a_pace_without_costs(wrong, what):
    with pytest.raises(TypeError, match=rf"costs must be Costs\(\.\.\.\), not {what}"):
        Pace(wrong)


def paced(rank):
    """Two links that the ranks haven't got, then one that they have; what was there stays."""
    pipe = Pipeline(mlp(8), schedule("chimera", 2, 2), mean_mse)
    pipe.step(batch(4), batch(4))
    before, found = [p.grad.clone() for p in pipe.parameters()], []
    for link in ((0, 2), (5, 1), (1, 0)):
        try:
            pipe.step(batch(4), batch(4), pace=Pace(Costs(0.001, 0.001, 0.001, {link: 0.001})))
        except ValueError as refused:
            found.append(str(refused))
            assert all(map(torch.equal, before, [p.grad for p in pipe.parameters()]))
    return found


def test_a_pace_with_links_that_do_not_exist():
    words = "rank 0: pace: latency has a link {}, but with 2 ranks the ranks are 0 to 1"
    assert on_ranks(paced, ranks=2) == [[words.format((0, 2)), words.format((5, 1))]] * 2


def test_forward_only_rows_do_not_train(failures):
    found = failures(steps, [(batch(8), batch(8))], ("inference", 2, 2), ranks=2)
    every(found, "evaluate", kind="ValueError")


def differs(rank, what):
    odd = rank == 1
    rows = schedule("gpipe" if odd and what == "schedule" else "1f1b", 3, 4)
    model = mlp(8, 7 if odd and what == "width" else 6)
    if odd and what == "layers":
        model.append(nn.Linear(6, 6).double())
    cuts = [2, 3, 3] if odd and what == "cuts" else [2, 2, 4]
    Pipeline(model, rows, mean_mse, cuts=None if what == "layers" else cuts)


@pytest.mark.parametrize("what", ["schedule", "width", "layers", "cuts"])
def test_one_rank_with_another_schedule_or_model_is_refused_everywhere(failures, what):
    every(failures(differs, what, ranks=3), "rank 1 has another", kind="ValueError")


def warns(rank):
    import warnings

    torch.manual_seed(rank)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Pipeline(model, schedule("1f1b", 2, 2), mean_mse)
    return [str(w.message) for w in caught]


def test_other_weights_on_a_rank_are_warned_of():
    """Trap kind 13: every rank its own seed."""
    assert on_ranks(warns, ranks=2)[1][0].startswith("rank 1's model has other weights")


def wrong_on_one(rank, argument):
    Pipeline(mlp(8), schedule("1f1b", 3, 4), mean_mse, **(argument if rank == 1 else {}))


def test_a_mistake_on_one_rank_only_ends_the_launch_soon():
    start = time.monotonic()
    with pytest.raises(RankError, match="rank 1: ValueError: reduction must be"):
        on_ranks(wrong_on_one, {"reduction": "average"}, ranks=3)
    assert time.monotonic() - start < 10


# What goes wrong within a step.


class Fails(nn.Module):
    """Raises in the given forward, or where the given backward comes, after some seconds."""

    def __init__(self, forward=None, backward=None, seconds=0.0, error=KeyError):
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.when, self.seconds, self.error = (forward, backward), seconds, error
        self.counts = [0, 0]

    def _count(self, place):
        if self.counts[place] == self.when[place]:
            time.sleep(self.seconds)
            raise self.error("broken on purpose")
        self.counts[place] += 1

    def forward(self, x):
        self._count(0)
        y = x * self.weight
        if self.when[1] is not None and y.requires_grad:
            y.register_hook(lambda g: self._count(1))
        return y


def with_failure(rank, stage, seconds=0.0, rows=("1f1b", 4, 4), nap=0.0, steps=1, **when):
    """Four stages, of which one fails, while the others take `nap` seconds a forward."""
    class Naps(nn.Linear):
        def forward(self, x):
            time.sleep(nap)
            return super().forward(x)

    torch.manual_seed(0)
    model = [Naps(6, 6).double() for _ in range(4)]
    model[stage] = nn.Sequential(model[stage], Fails(seconds=seconds, **when))
    pipe = Pipeline(model, schedule(*rows), mean_mse)
    for _ in range(steps):
        pipe.step(batch(8), batch(8))


@pytest.mark.parametrize("when", [{"forward": 0}, {"forward": 2}, {"backward": 0}, {"backward": 3}])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_an_exception_in_a_stage_reaches_every_rank(failures, stage, when):
    """Trap 136: the others hear which rank failed and why, not only "connection closed"."""
    found = failures(partial(with_failure, **when), stage, ranks=4)
    assert found[stage]["type"] == "KeyError" and not found[stage]["secondary"]
    others = [failure for rank, failure in enumerate(found) if rank != stage]
    every(others, f"rank {stage}", "KeyError", "broken on purpose", kind="PipelineError")
    assert all(failure["secondary"] for failure in others)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize("stage, when", [(1, {"forward": 1}), (1, {"forward": 5}),
                                         (0, {"backward": 0}), (0, {"backward": 4})])  # fmt: skip
def test_ranks_that_still_compute_when_another_fails_hear_why(failures, name, stage, when):
    """They meet broken connections while posting, not while waiting; in the first step and in the
    second, whose receives are posted ahead."""
    failing = partial(with_failure, nap=0.1, steps=2, rows=(name, 4, 4), **when)
    found = failures(failing, stage, ranks=4)
    others = [failure for rank, failure in enumerate(found) if rank != stage]
    every(others, f"rank {stage}", "broken on purpose", kind="PipelineError")


def test_launch_shows_the_first_failure_and_the_users_line():
    with pytest.raises(RankError) as raised:
        on_ranks(partial(with_failure, forward=1), 2, ranks=4)
    text = str(raised.value)
    assert raised.value.rank == 2 and "KeyError: 'broken on purpose'" in text
    assert "test_refusals.py" in text and 'raise self.error("broken on purpose")' in text


def next_step(rank):
    try:
        with_failure_pipe = Pipeline([nn.Tanh(), nn.Sequential(Fails(forward=1))],
                                     schedule("1f1b", 2, 4), mean_mse)  # fmt: skip
        with_failure_pipe.step(batch(8), batch(8))
    except (KeyError, RuntimeError):
        with_failure_pipe.step(batch(8), batch(8))


def test_the_step_after_a_failed_one_says_so(failures):
    every(failures(next_step, ranks=2), "earlier step failed", "rank 1", "KeyError",
          kind="PipelineError")  # fmt: skip


def bad_loss(rank, loss_fn):
    Pipeline(mlp(8), schedule("1f1b", 4, 4), loss_fn).step(batch(8), batch(8))


@pytest.mark.parametrize("loss_fn, word", [
    (partial(nn.functional.mse_loss, reduction="none"), "(2, 6)"),
    (lambda outputs, targets: None, "NoneType"),
    (lambda outputs, targets: 0.5, "float"),
])  # fmt: skip
def test_a_loss_that_is_not_one_number(failures, loss_fn, word):
    found = failures(bad_loss, loss_fn, ranks=4)
    every(found, "loss_fn must return one number", word, kind="PipelineError")


class Returns(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def forward(self, x):
        return self.make(x)


def returns(rank, make):
    model = [nn.Tanh(), Returns(make), nn.Tanh()]
    Pipeline(model, schedule("gpipe", 3, 2), keeps_nothing).step(batch(4), batch(4))


@pytest.mark.parametrize("make, word", [
    (lambda x: {"x": x}, "dict"),
    (lambda x: (x, {"mask": x}), "dict"),
    (lambda x: (x, (x, x)), "tuple"),
    (lambda x: (x, "text"), "str"),
    (lambda x: x.to_sparse(), "sparse"),
    (lambda x: (x, x.to("meta")), "meta"),
    (lambda x: torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8), "qint8"),
])  # fmt: skip
def test_what_cannot_be_sent_is_refused_everywhere_with_stage_and_type(failures, make, word):
    """Trap 53: a dict dies in the backward pass, or leaves the other ranks waiting."""
    every(failures(returns, make, ranks=3), "stage 1 returns", word, kind="PipelineError")


class Moody(nn.Module):
    def forward(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x if self.calls <= 4 else torch.cat([x, x], 1)


def changes_form(rank):
    model = [nn.Tanh(), Moody(), nn.Tanh()]
    pipe = Pipeline(model, schedule("gpipe", 3, 2), keeps_nothing)
    for _ in range(3):
        pipe.step(batch(4), batch(4))


def test_a_form_that_depends_on_more_than_the_batch_is_refused(failures):
    """Trap 30: a buffer of the wrong size aborts the process, or keeps an old tail."""
    every(failures(changes_form, ranks=3), "stage 1 gives (2, 12)", "(2, 6)", kind="PipelineError")


def evaluates(rank, loss_fn):
    pipe = Pipeline(mlp(8), schedule("1f1b", 4, 4), loss_fn)
    pipe.evaluate(batch(8), batch(8))


@pytest.mark.parametrize("loss_fn, word", [
    (partial(nn.functional.mse_loss, reduction="none"), "one number"),
    (lambda outputs, targets: 1 / 0, "division"),
])  # fmt: skip
def test_a_loss_that_fails_in_evaluate_reaches_every_rank(failures, loss_fn, word):
    found = failures(evaluates, loss_fn, ranks=4)
    assert all(found) and all(word in failure["text"] for failure in found), found
    assert all(failure["seconds"] < 15 for failure in found)


def evaluates_rows(rank, x, y):
    Pipeline(mlp(8), schedule("1f1b", 2, 4), mean_mse).evaluate(x, y)


@pytest.mark.parametrize("x, y, word", [
    (batch(0), None, "inputs have 0 rows"), (batch(3), batch(4), "targets"),
    (None, batch(4), "inputs are needed"),
])  # fmt: skip
def test_evaluate_refuses_what_does_not_fit(failures, x, y, word):
    every(failures(evaluates_rows, x, y, ranks=2), word)
