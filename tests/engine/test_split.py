"""I and W apart: for any stage the same gradients as autograd's, computed once, nothing left
(traps of kind 8, and 80 to 87). In one process, without ranks but for the memory of schedules."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import batch, error, gradients, keeps_nothing, linears, on_ranks, schedule
from torch import nn
from torch.nn.utils import parametrizations, prune

from minipipe.engine.split import Deferred
from minipipe.engine.stage import Stage, as_values
from minipipe.memory import Meter
from minipipe.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)
TOLERANCE = 1e-12
ITEM = 8  # bytes of a float64


def data(*shape, seed=1):
    """Random float64 numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def scalar(value):
    """A number that depends on every output, differently."""
    return sum((v * data(*v.shape, seed=9)).sum() for v in as_values(value)[0])


def by_autograd(module, xs, needs, microbatches=1):
    """Gradients of parameters and inputs, micro-batch after micro-batch."""
    inputs = []
    for m in range(microbatches):
        torch.manual_seed(m)
        leaves = [x.detach().clone().requires_grad_(n) for x, n in zip(xs, needs, strict=True)]
        # A module may begin in place, which a leaf refuses.
        values = [x.view_as(x).clone() if n else x.clone() for x, n in
                  zip(leaves, needs, strict=True)]  # fmt: skip
        scalar(module(*values)).backward()
        inputs += [x.grad for x, n in zip(leaves, needs, strict=True) if n]
    return gradients(module), inputs


def in_halves(module, xs, needs, microbatches=1, recompute=False, number=1):
    """The same by a stage: all F, then I of all micro-batches, then W from the last to the first.
    Nothing may be left anywhere afterwards."""
    meter = Meter([*module.parameters(), *module.buffers()])
    stage = Stage(nn.Sequential(module), number, meter)
    results, inputs = [], []
    for m in range(microbatches):
        torch.manual_seed(m)
        values = tuple(x.clone() for x in xs)
        results.append(as_values(stage.forward(m, values, len(xs) == 1, needs, scalar,
                                               drop=recompute, split=True))[0])  # fmt: skip
    for m in range(microbatches):
        if recompute:
            stage.recompute(m)
        ones = [torch.ones_like(r) for r in results[m] if r.requires_grad]
        inputs += stage.backward(m, ones)
    results.clear()
    for m in reversed(range(microbatches)):
        stage.backward_weight(m)
    assert not stage._kept and not stage._deferred
    assert meter.level == 0, "something is kept after the last W"
    assert all("forward" not in layer.__dict__ for layer in module.modules()
               if type(layer).__module__.startswith("torch.nn"))  # fmt: skip
    return gradients(module), inputs


def same(found, wanted) -> float:
    """The largest error of a gradient of a parameter or of an input; None must be None."""
    (found, inputs), (wanted, others) = found, wanted
    assert [n for n, g in found.items() if g is None] == [n for n, g in wanted.items() if g is None]
    assert len(inputs) == len(others)
    pairs = [(str(n), a, b) for n, (a, b) in enumerate(zip(inputs, others, strict=True))]
    pairs = [(n, a, torch.zeros_like(a) if b is None else b) for n, a, b in pairs
             if a.numel()]
    return max(error(found, wanted),
               error({n: a for n, a, _ in pairs}, {n: b for n, _, b in pairs}))  # fmt: skip


def check(module, *xs, needs=None, **options):
    """A module, or a stage that begins with it, gets autograd's gradients in I and W."""
    needs = needs or tuple(x.is_floating_point() for x in xs)
    module = module.double()
    microbatches = options.get("microbatches", 2)
    wanted = by_autograd(copy.deepcopy(module), xs, needs, microbatches)
    found = in_halves(module, xs, needs, **{"microbatches": microbatches} | options)
    assert same(found, wanted) <= TOLERANCE, {
        name: (found[0][name], wanted[0][name]) for name in wanted[0]}  # fmt: skip


class Fn(nn.Module):
    """A function of a module and its inputs as a module."""

    def __init__(self, fn, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.fn = fn

    def forward(self, *values):
        return self.fn(self, *values)


def frozen(module, *names):
    for name, parameter in module.named_parameters():
        if name.split(".")[-1] in names:
            parameter.requires_grad_(False)
    return module


def tied(one, other):
    other.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), other)


LINEAR, SEQUENCE, IMAGES = data(4, 6), data(2, 3, 6), data(2, 4, 6, 6)


# Layers whose weights wait for W.

LAYERS = {
    "linear": (lambda: nn.Linear(6, 5), LINEAR),
    "linear, 1d": (lambda: nn.Linear(6, 5), LINEAR[0]),
    "linear, 3d": (lambda: nn.Linear(6, 5), SEQUENCE),
    "linear, 5d": (lambda: nn.Linear(6, 5), data(2, 1, 2, 3, 6)),
    "linear, no bias": (lambda: nn.Linear(6, 5, bias=False), SEQUENCE),
    "linear, 1 feature": (lambda: nn.Linear(6, 1), LINEAR),
    "conv": (lambda: nn.Conv2d(4, 6, 3), IMAGES),
    "conv, no batch": (lambda: nn.Conv2d(4, 6, 3), IMAGES[0]),
    "conv, no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), IMAGES),
    "conv, all": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 1), padding=(1, 2), dilation=2,
                                    groups=2), IMAGES),
    "conv, depthwise": (lambda: nn.Conv2d(4, 8, 3, groups=4, padding=1), IMAGES),
    "conv, 1 by 1": (lambda: nn.Conv2d(4, 3, 1, stride=2), IMAGES),
    "layer norm": (lambda: nn.LayerNorm(6), SEQUENCE),
    "layer norm, 2 dimensions": (lambda: nn.LayerNorm((3, 6)), SEQUENCE),
    "layer norm, no bias": (lambda: nn.LayerNorm(6, bias=False), SEQUENCE),
    "layer norm, 1d": (lambda: nn.LayerNorm(6), LINEAR[0]),
    "group norm": (lambda: nn.GroupNorm(2, 4), IMAGES),
    "group norm, 2d": (lambda: nn.GroupNorm(3, 6), LINEAR),
    "group norm, 3d": (lambda: nn.GroupNorm(3, 3), SEQUENCE),
}  # fmt: skip
for name in ("weight", "bias"):
    for layer in ("linear", "conv", "layer norm", "group norm"):
        make, x = LAYERS[layer]
        LAYERS[f"{layer}, frozen {name}"] = (
            lambda make=make, name=name: frozen(make(), name), x)  # fmt: skip


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    make, x = LAYERS[name]
    torch.manual_seed(0)
    for needs in (True, False):
        check(make(), x, needs=(needs,))
        check(nn.Sequential(make(), nn.ReLU(inplace=True)), x, needs=(needs,))
        check(nn.Sequential(nn.ReLU(inplace=True), make()), x, needs=(needs,))
    check(make(), x, recompute=True)


@pytest.mark.parametrize("name", [n for n in LAYERS if "frozen" not in n])
def test_the_weights_of_these_layers_wait(name):
    """Nothing is there after I, everything after W."""
    make, x = LAYERS[name]
    module = make().double()
    stage = Stage(nn.Sequential(module), 1)
    stage.forward(0, (x,), True, (True,), scalar, split=True)
    stage.backward(0, [torch.ones((), dtype=torch.float64)])
    assert all(p.grad is None for p in module.parameters())
    stage.backward_weight(0)
    assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "expanded", "sliced"])
def test_layouts(layout):
    """Trap 24: inputs that are not contiguous, and output gradients that are not either."""
    x = {"channels_last": data(2, 4, 6, 6).to(memory_format=torch.channels_last),
         "transposed": data(2, 6, 6, 4).transpose(1, 3),
         "expanded": data(1, 4, 6, 6).expand(2, 4, 6, 6),
         "sliced": data(4, 8, 12, 6)[::2, 1:5, ::2]}[layout]  # fmt: skip
    turn = lambda m, x: m.layer(x).transpose(0, -1)  # noqa: E731
    spread = lambda m, x: m.layer(x).sum()  # its gradient is expanded  # noqa: E731
    for layer in (nn.Conv2d(4, 6, 3), nn.GroupNorm(2, 4), nn.LayerNorm(6), nn.Linear(6, 5)):
        for fn in (turn, spread):
            # The same strides on both sides: clone keeps them where they are dense.
            check(Fn(fn, layer=copy.deepcopy(layer)), x)
            if layout == "channels_last":
                check(Fn(fn, layer=copy.deepcopy(layer).to(memory_format=torch.channels_last)), x)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_shapes(draw):
    draw = draw.draw
    size = partial(st.integers, 1)
    kind = draw(st.sampled_from(["linear", "conv", "layer norm", "group norm"]))
    bias, rows = draw(st.booleans()), draw(size(3))
    if kind == "linear":
        shape = draw(st.lists(size(3), min_size=0, max_size=3))
        layer, x = nn.Linear(3, draw(size(4)), bias=bias), data(*shape, 3)
    elif kind == "conv":
        groups = draw(size(3))
        kernel = (draw(size(3)), draw(size(3)))
        layer = nn.Conv2d(groups * draw(size(2)), groups * draw(size(2)), kernel,
                          stride=draw(size(3)), padding=draw(st.integers(0, 2)),
                          dilation=draw(size(2)), groups=groups, bias=bias)  # fmt: skip
        x = data(rows, layer.in_channels, draw(st.integers(5, 7)), draw(st.integers(5, 7)))
    elif kind == "layer norm":
        shape = draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
        last = draw(st.integers(1, len(shape)))
        layer, x = nn.LayerNorm(shape[-last:], bias=bias), data(*shape)
    else:
        groups = draw(size(3))
        channels = groups * draw(size(3))
        layer = nn.GroupNorm(groups, channels)
        x = data(rows, channels, *draw(st.lists(size(3), max_size=2)), 4)
    check(nn.Sequential(layer, nn.Tanh()), x, needs=(draw(st.booleans()),),
          recompute=draw(st.booleans()), microbatches=draw(size(2)))  # fmt: skip


@pytest.mark.parametrize("layer, shape", [
    (nn.Linear(6, 5), (0, 6)), (nn.Linear(6, 5), (2, 0, 6)), (nn.LayerNorm(6), (0, 6)),
    (nn.GroupNorm(2, 4), (0, 4, 3)), (nn.Conv2d(4, 6, 3), (0, 4, 6, 6)),
])  # fmt: skip
def test_no_rows_inside_a_stage(layer, shape):
    """A stage may have no rows for a layer, as an expert that gets no token."""
    check(Fn(lambda m, x: m.other(x.new_zeros(2, 3)) + m.layer(m.first(x)).sum(),
             layer=layer, other=nn.Linear(3, 3), first=nn.Tanh()), data(*shape))  # fmt: skip


# Everything else gets its gradients in I.


class MyLinear(nn.Linear):
    def forward(self, x):
        return super().forward(2 * x)


def old(make, **options):
    """An old kind of parametrization: a hook puts `weight` there before each forward."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(nn.Linear(6, 5).double(), **options)


def transformer():
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.2, batch_first=True)


OTHERS = {
    "subclass": (lambda: MyLinear(6, 5), LINEAR),
    "weight norm": (lambda: parametrizations.weight_norm(nn.Linear(6, 5)), LINEAR),
    "orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(6, 5)), LINEAR),
    "old weight norm": (lambda: old(nn.utils.weight_norm), LINEAR),
    "old spectral norm": (lambda: old(nn.utils.spectral_norm), LINEAR),
    "pruned": (lambda: old(prune.l1_unstructured, name="weight", amount=0.5), LINEAR),
    "padding by name": (lambda: nn.Conv2d(4, 6, 3, padding="same"), IMAGES),
    "circular padding": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), IMAGES),
    "reflected padding": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), IMAGES),
    "layer norm without weights": (lambda: nn.LayerNorm(6, elementwise_affine=False), LINEAR),
    "group norm without weights": (lambda: nn.GroupNorm(2, 4, affine=False), IMAGES),
    "bilinear": (lambda: Fn(lambda m, x: m.layer(x, x), layer=nn.Bilinear(6, 6, 3)), LINEAR),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), IMAGES),
    "conv1d": (lambda: nn.Conv1d(3, 6, 3), SEQUENCE),
    "prelu": (nn.PReLU, LINEAR),
    "lstm": (lambda: Fn(lambda m, x: m.layer(x)[0], layer=nn.LSTM(6, 4)), SEQUENCE),
    "transformer": (transformer, SEQUENCE),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules(name):
    make, x = OTHERS[name]
    torch.manual_seed(0)
    module = make().double()
    if name in ("old weight norm", "pruned", "old spectral norm"):  # these can't be copied
        torch.manual_seed(0)
        other = make().double()
        module.eval(), other.eval()  # or spectral norm goes on with its iteration
        wanted = by_autograd(other, (x,), (True,), 2)
        assert same(in_halves(module, (x,), (True,), 2), wanted) <= TOLERANCE
        return
    check(module, x)
    torch.manual_seed(0)
    check(nn.Sequential(make(), nn.LayerNorm(make().double()(x).shape[-1])), x, recompute=True)


def test_batch_norm_embedding_attention_and_unused_in_one_stage():
    """Trap 80: weight list and accumulators out of step."""
    torch.manual_seed(0)

    def forward(m, x):
        h = m.norm(m.linear(m.embedding(x)).transpose(1, 2)).transpose(1, 2)
        h, _ = m.attention(h, h, h, need_weights=False)
        return m.out(h)

    module = Fn(forward, embedding=nn.Embedding(11, 6), linear=nn.Linear(6, 6),
                norm=nn.BatchNorm1d(6), attention=nn.MultiheadAttention(6, 2, batch_first=True),
                out=nn.Linear(6, 2), unused=nn.Linear(6, 6), also=nn.Embedding(2, 2))  # fmt: skip
    tokens = torch.randint(0, 11, (2, 5))
    for recompute in (False, True):
        check(copy.deepcopy(module), tokens, recompute=recompute, number=0)


STAGES = {
    "used twice": (lambda: Fn(lambda m, x: m.a(torch.tanh(m.a(x))) + m.a(2 * x),
                              a=nn.Linear(6, 6)), LINEAR),
    "tied": (lambda: tied(nn.Linear(6, 6), nn.Linear(6, 6)), LINEAR),
    "tied to an embedding": (lambda: tied(nn.Embedding(6, 5), nn.Linear(5, 6)),
                             torch.randint(0, 6, (2, 3))),
    "several outputs": (lambda: Fn(lambda m, x: (m.a(x), x.detach(), m.b(x), m.a(x).detach()),
                                   a=nn.Linear(6, 6), b=nn.LayerNorm(6)), LINEAR),
    "an output that nobody used": (lambda: Fn(lambda m, x: (m.a(x), m.b(m.a(x)))[0],
                                              a=nn.Linear(6, 6), b=nn.Linear(6, 6)), LINEAR),
    "a keyword": (lambda: Fn(lambda m, x: m.a(input=x), a=nn.Linear(6, 6)), LINEAR),
    "in place all over": (lambda: nn.Sequential(
        nn.Linear(6, 6), nn.ReLU(True), nn.LayerNorm(6), nn.Dropout(0.3, True), nn.Linear(6, 6),
        nn.SiLU(True), nn.Linear(6, 6), nn.Hardtanh(inplace=True)), LINEAR),
    "weight used by hand too": (lambda: Fn(lambda m, x: m.a(x) @ m.a.weight, a=nn.Linear(6, 6)),
                                LINEAR),
    "output and parameter get one gradient": (
        lambda: Fn(lambda m, x: m.a(x) + m.b.weight[:4, :] + m.a.bias, a=nn.Linear(6, 6),
                   b=nn.Linear(6, 6)), LINEAR),
    "called under no_grad": (lambda: Fn(lambda m, x: m.a(x) + _without_grad(m.a, x),
                                        a=nn.Linear(6, 6)), LINEAR),
    "a second forward of its own": (lambda: Fn(
        lambda m, x: m.a(x) + nn.functional.linear(x, m.b.weight), a=nn.Linear(6, 6),
        b=nn.Linear(6, 6)), LINEAR),
    "dropout": (lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6),
                                      nn.Dropout(0.5)), LINEAR),
    "a view of the output": (lambda: Fn(lambda m, x: m.a(x)[:, 1:].relu_(), a=nn.Linear(6, 6)),
                             LINEAR),
    "functional_call": (lambda: Fn(lambda m, x: torch.func.functional_call(
        m.a, {"weight": 2 * m.b.weight, "bias": m.b.bias.tanh()}, (x,)) + m.a(x),
        a=nn.Linear(6, 6), b=nn.Linear(6, 6)), LINEAR),
    "a gradient that is None": (lambda: Fn(lambda m, x: Stop.apply(m.a(x)) + m.b(x),
                                           a=nn.Linear(6, 6), b=nn.Linear(6, 6)), LINEAR),
    "reentrant checkpoint": (lambda: Fn(lambda m, x: checkpointed(m, x, True), a=nn.Linear(6, 6),
                                        b=nn.Linear(6, 6)), LINEAR),
    "checkpoint": (lambda: Fn(lambda m, x: checkpointed(m, x, False), a=nn.Linear(6, 6),
                              b=nn.Linear(6, 6)), LINEAR),
}  # fmt: skip


def checkpointed(m, x, reentrant):
    from torch.utils.checkpoint import checkpoint

    return checkpoint(lambda x: m.a(x).tanh(), m.b(x), use_reentrant=reentrant)


class Stop(torch.autograd.Function):
    """Passes no gradient on."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def _without_grad(layer, x):
    with torch.no_grad():
        return layer(x)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("recompute", [False, True], ids=["", "recompute"])
@pytest.mark.parametrize("name", STAGES)
def test_stages(name, recompute):
    make, x = STAGES[name]
    torch.manual_seed(0)
    check(make(), x, recompute=recompute)
    if x.is_floating_point():
        check(make(), x, needs=(False,), recompute=recompute, number=0)


def test_frozen_input_of_several():
    module = Fn(lambda m, x, y: (m.a(x), m.b(y)), a=nn.Linear(6, 6), b=nn.Linear(6, 6))
    for needs in ((True, False), (False, True), (True, True)):
        check(copy.deepcopy(module), LINEAR, 2 * LINEAR, needs=needs)


def test_all_frozen():
    module = frozen(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)), "weight", "bias")
    check(module, LINEAR)


def test_complex_weights():
    """The gradient needs the conjugate of the input."""
    x = torch.complex(LINEAR, LINEAR.flip(0))
    module = nn.Linear(6, 5, dtype=torch.complex128)
    out = lambda m, x: torch.view_as_real(m.layer(x))  # noqa: E731
    module = Fn(out, layer=module)
    wanted = by_autograd(copy.deepcopy(module), (x,), (True,))
    assert same(in_halves(module, (x,), (True,)), wanted) <= TOLERANCE


# Hooks.


def test_hooks_on_parameters():
    """Once a micro-batch, with the right values; what a tensor hook returns counts."""
    seen, after = [], []

    def hooked(module, on):
        module[0].weight.register_hook(lambda g: on.append(g.clone()) or 3 * g)
        module[2].bias.register_hook(lambda g: on.append(g.clone()))
        module[0].bias.register_post_accumulate_grad_hook(
            lambda p: after.append((on is seen, p.grad.clone())))
        return module

    make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)).double()  # noqa: E731
    one, other, expected = make(), make(), []
    other.load_state_dict(one.state_dict())
    wanted = by_autograd(hooked(other, expected), (LINEAR,), (True,), 3)
    found = in_halves(hooked(one, seen), (LINEAR,), (True,), 3)
    assert same(found, wanted) <= TOLERANCE
    assert len(seen) == len(expected) == 6 and len(after) == 6
    key = lambda tensor: (tensor.dim(), float(tensor.sum()))  # noqa: E731
    for a, b in zip(sorted(seen, key=key), sorted(expected, key=key), strict=True):
        assert torch.allclose(a, b, atol=1e-13)
    assert torch.allclose(after[-1][1], [g for ours, g in after if not ours][-1])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_on_modules():
    """Forward hooks and pre-hooks see and change values; full backward hooks see gradients."""
    seen = {}

    def hooked(module, key):
        on = seen.setdefault(key, [])
        module[0].register_forward_pre_hook(lambda m, args: (2 * args[0],))
        module[0].register_forward_hook(lambda m, args, out: out + args[0])
        module[2].register_forward_hook(lambda m, args, out: on.append(out.detach().clone()))
        for layer in module:
            layer.register_full_backward_pre_hook(lambda m, g: (3 * g[0],))
            layer.register_full_backward_hook(
                lambda m, g, out: on.append((g[0] if g[0] is None else g[0].clone(), out[0])))
        return module

    for needs in (True, False):
        make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()  # noqa: E731
        one, other = make(), make()
        other.load_state_dict(one.state_dict())
        seen.clear()
        wanted = by_autograd(hooked(other, "autograd"), (LINEAR,), (needs,))
        found = in_halves(hooked(one, "halves"), (LINEAR,), (needs,))
        assert same(found, wanted) <= TOLERANCE
        assert len(seen["halves"]) == len(seen["autograd"]) == 4
        for a, b in zip(seen["halves"][1:], seen["autograd"][1:], strict=True):
            assert all(p is q is None or torch.allclose(p, q) for p, q in zip(a, b, strict=True))


# Other numbers, and compiled stages.


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(6), lambda: nn.GroupNorm(3, 6)])
def test_autocast(norm):
    """Trap 32: what runs in bfloat16 in one process does so here, to the last bit or nearly."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), norm(), nn.GELU(), nn.Linear(6, 3))
    other = copy.deepcopy(module)
    x = LINEAR.float()
    with torch.autocast("cpu", torch.bfloat16):
        leaf = x.clone().requires_grad_()
        scalar(other(leaf)).backward()
        stage = Stage(nn.Sequential(module), 1)
        result = stage.forward(0, (x,), True, (True,), scalar, split=True)
        (gradient,) = stage.backward(0, [torch.ones_like(result)])
        stage.backward_weight(0)
    for name, parameter in module.named_parameters():
        assert parameter.grad.dtype == torch.float32
        assert error({name: parameter.grad}, gradients(other)) < 0.02, name
    assert error({"": gradient}, {"": leaf.grad}) < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 3)).to(dtype)
    other, x = copy.deepcopy(module), LINEAR.to(dtype)
    stage = Stage(nn.Sequential(module), 1)
    result = stage.forward(0, (x,), True, (True,), torch.sum, split=True)
    stage.backward(0, [torch.ones_like(result)])
    stage.backward_weight(0)
    other(x).sum().backward()
    assert error(gradients(module), gradients(other)) < (1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("where", ["stage", "layer", "in place", "function"])
def test_compiled(where):
    """Trap 144: a compiled graph has no inner nodes to split. The second run is compiled already,
    and must not remember the first one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    plain = copy.deepcopy(module)
    compiled = module
    if where == "stage":
        compiled = torch.compile(module, backend="aot_eager")
    elif where == "layer":
        compiled = nn.Sequential(torch.compile(module[0], backend="aot_eager"), *module[1:])
    elif where == "function":
        run = torch.compile(lambda m, x: m[2](m[1](m[0](x))), backend="aot_eager")
        compiled = Fn(lambda m, x: run(m.layers, x), layers=module)
    else:
        module.compile(backend="aot_eager")
    for seed in range(3):
        wanted = by_autograd(plain, (data(4, 6, seed=seed),), (True,), 2)
        _, inputs = in_halves(compiled, (data(4, 6, seed=seed),), (True,), 2)
        assert same((gradients(module), inputs), wanted) <= TOLERANCE, f"run {seed}"
    torch._dynamo.reset()


# Once, and nothing left.


def test_every_gradient_is_computed_once():
    """Trap 82. The matrix products of a step: one for I and one for W a layer, none twice."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        products = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.products += func._schema.name in ("aten::mm", "aten::addmm", "aten::bmm")
            return func(*args, **kwargs or {})

    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh()).double()
    stage = Stage(module, 1)
    parts = []
    for run in (lambda: stage.forward(0, (LINEAR,), True, (True,), torch.sum, split=True),
                lambda: stage.backward(0, [torch.ones((), dtype=torch.float64)]),
                lambda: stage.backward_weight(0)):  # fmt: skip
        with Counts() as counts:
            run()
        parts.append(counts.products)
    assert parts == [2, 2, 2]


def test_w_without_i_and_w_twice_fail():
    stage = Stage(nn.Sequential(nn.Linear(6, 6).double()), 1)
    stage.forward(0, (LINEAR,), True, (True,), torch.sum, split=True)
    with pytest.raises(KeyError):
        stage.backward_weight(0)
    stage.backward(0, [torch.ones((), dtype=torch.float64)])
    stage.backward_weight(0)
    with pytest.raises(KeyError):
        stage.backward_weight(0)


def test_two_steps_accumulate():
    """Trap kind 8: doubled. What was in `.grad` is added to, not scaled, not counted again."""
    module = nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.BatchNorm1d(6)).double()
    other = copy.deepcopy(module)
    for seed in (1, 2, 3):
        wanted = by_autograd(other, (data(4, 6, seed=seed),), (True,), 2)
        found = in_halves(module, (data(4, 6, seed=seed),), (True,), 2)
        assert same(found, wanted) <= TOLERANCE


def test_what_a_waiting_w_keeps():
    """By hand, two linear layers of 6 to 8 to 5 features and 4 rows: F keeps both inputs and what
    tanh keeps, which is the second input; I adds both output gradients; W ends it all."""
    meter = Meter()
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    meter = Meter(module.parameters())
    stage = Stage(module, 1, meter)
    result = stage.forward(0, (LINEAR.clone(),), True, (True,), split=True)
    assert meter.level == 4 * (6 + 8) * ITEM
    stage.backward(0, [torch.ones_like(result)])
    assert meter.level == 4 * (6 + 8 + 8 + 5) * ITEM
    stage.backward_weight(0)
    assert meter.level == 0


def test_w_keeps_nothing_more():
    """What only I needs is gone after I: here what GELU and the matrix product of two values save.
    And a layer whose weight is frozen, or that is called without gradients, keeps nothing."""
    module = Fn(lambda m, x: m.b(nn.functional.gelu(m.a(x)) * x), a=nn.Linear(6, 6),
                b=frozen(nn.Linear(6, 6), "weight", "bias"), c=nn.Linear(6, 6)).double()
    meter = Meter(module.parameters())
    stage = Stage(nn.Sequential(module), 1, meter)
    result = stage.forward(0, (LINEAR.clone(),), True, (True,), split=True)
    stage.backward(0, [torch.ones_like(result)])
    assert meter.level == 2 * 4 * 6 * ITEM  # a's input and output gradient
    stage.backward_weight(0)
    for layer in (frozen(nn.Linear(6, 6), "weight"), frozen(nn.Conv2d(4, 6, 3), "weight")):
        x = LINEAR if isinstance(layer, nn.Linear) else IMAGES
        layer = layer.double()
        meter = Meter(layer.parameters())
        stage = Stage(nn.Sequential(layer), 1, meter)
        stage.forward(0, (x.clone(),), True, (True,), split=True)
        # autograd needs none of it: a bias gets a sum of the output's gradient. A convolution
        # saves its input in any case.
        assert meter.level <= (0 if x is LINEAR else x.nbytes)
    module = Fn(lambda m, x: m.a(x) + _without_grad(m.b, 2 * x), a=nn.Linear(6, 6),
                b=nn.Linear(6, 6)).double()  # fmt: skip
    meter = Meter(module.parameters())
    stage = Stage(nn.Sequential(module), 1, meter)
    stage.forward(0, (LINEAR.clone(),), True, (True,), split=True)
    assert meter.level == LINEAR.nbytes


def test_everything_dies_without_a_garbage_collection():
    """Graphs, inputs and output gradients: by weak references, not by the meter."""
    alive, values = weakref.WeakSet(), weakref.WeakSet()

    class Token:
        pass

    class Keeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.token = Token()
            alive.add(ctx.token)
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 2

    module = nn.Sequential(nn.Linear(6, 6), Fn(lambda m, x: Keeps.apply(x)), nn.LayerNorm(6),
                           nn.Linear(6, 6)).double()  # fmt: skip
    stage = Stage(module, 1, Meter(module.parameters()))
    gc.collect()
    gc.disable()
    try:
        for m in range(3):
            x = LINEAR.clone()
            values.add(x)
            stage.forward(m, (x,), True, (True,), torch.sum, split=True)
            del x
        assert len(alive) == 3
        for m in range(3):
            stage.backward(m, [torch.ones((), dtype=torch.float64)])
            assert len(alive) == 2 - m, "the graph lives longer than I"
        uses = [weakref.ref(t) for d in stage._deferred.values() for u in d._uses
                for t in (u.given, u.gradient)]  # fmt: skip
        assert len(uses) == 18 and all(ref() is not None for ref in uses)
        for m in range(3):
            stage.backward_weight(m)
        assert not any(ref() is not None for ref in uses) and not values
    finally:
        gc.enable()
    stage.forward(0, (LINEAR.clone(),), True, (True,), torch.sum, split=True)
    stage.clear()
    assert stage.meter.level == 0 and not alive


@pytest.mark.parametrize("layer", [nn.Linear(6, 6), nn.LayerNorm(6), nn.GroupNorm(2, 6)])
@pytest.mark.parametrize("when", ["in the forward", "between I and W"])
def test_an_input_that_is_modified_in_place_is_an_error(layer, when):
    """Never a wrong gradient without a word."""
    spoil = when == "in the forward"
    kept = []

    def forward(m, x):
        x = 2 * x
        kept.append(x.detach())
        y = m.layer(x)
        if spoil:
            x.add_(1)
        return y

    stage = Stage(nn.Sequential(Fn(forward, layer=layer.double())), 1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stage.forward(0, (LINEAR.clone(),), True, (True,), torch.sum, split=True)
        stage.backward(0, [torch.ones((), dtype=torch.float64)])
        kept[0].add_(1)
        stage.backward_weight(0)


def test_a_gradient_of_a_gradient_is_no_wrong_number():
    """A penalty on a gradient differentiates the layers twice, which halves can't do: it has to
    be right or an error."""
    def forward(m, x):
        y = m.b(m.a(x).tanh())
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + g.square().sum()

    module = Fn(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)).double()
    other = copy.deepcopy(module)
    wanted = by_autograd(other, (LINEAR,), (True,))
    try:
        found = in_halves(module, (LINEAR,), (True,))
    except RuntimeError as raised:
        assert "gradient" in str(raised)  # noqa: PT017
        return
    assert same(found, wanted) <= TOLERANCE


def test_deferred_alone():
    """Without a stage: uses are noted within the context only, and compute empties them."""
    module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6)).double()
    other = copy.deepcopy(module)
    first, second = Deferred(module, None), Deferred(module, None)
    with first.noting():
        one = module(LINEAR)
    with second.noting():
        two = module(2 * LINEAR)
    (one.sum() + (two ** 2).sum()).backward()
    assert all(p.grad is None for p in module.parameters())
    second.compute()
    first.compute()
    before = gradients(module)
    first.compute()
    assert error(gradients(module), before) == 0
    (other(LINEAR).sum() + (other(2 * LINEAR) ** 2).sum()).backward()
    assert error(gradients(module), gradients(other)) <= TOLERANCE


def test_a_forward_that_raises_restores_the_layers():
    module = nn.Sequential(nn.Linear(6, 6), Fn(lambda m, x: 1 / 0)).double()
    stage = Stage(module, 1, Meter(module.parameters()))
    with pytest.raises(ZeroDivisionError):
        stage.forward(0, (LINEAR,), True, (True,), split=True)
    assert "forward" not in module[0].__dict__
    stage.clear()
    gc.collect()  # the traceback's frames
    assert stage.meter.level == 0


# The memory of schedules that split, on ranks.


def peaks(rank, tables):
    """Peak bytes with each table, the same in both of two steps, and what is left."""
    found = []
    for table in tables:
        pipe = Pipeline(linears(table.stages), table, keeps_nothing)
        x = batch(3 * table.microbatches, 8)
        one, two = (pipe.step(x, x) for _ in range(2))
        assert one.peak_activation_bytes == two.peak_activation_bytes
        stores = [getattr(stage, name) for stage in pipe._stages.values()
                  for name in ("_kept", "_deferred")]  # fmt: skip
        assert not any(stores)
        assert two.timeline.levels[rank][-1][1] == 0 and pipe._meter.level == 0
        found.append(two.peak_activation_bytes)
    return found


class Caches(nn.Linear):
    """A layer that holds on to its outputs, as a student's model does."""

    def forward(self, x):
        self.outputs = [*getattr(self, "outputs", []), super().forward(x)]
        return self.outputs[-1]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False).double()

    def forward(self, x):
        self.outputs = [*getattr(self, "outputs", []), self.layer(x)]
        return self.outputs[-1]


@pytest.mark.parametrize("make", [Plain, lambda: Caches(8, 8, bias=False).double()])
def test_a_stage_that_caches_its_outputs(make):
    """Trap kind 12: what waited for W goes with W, whoever holds the outputs."""
    model = make()
    stage = Stage(nn.Sequential(model), 1, Meter(model.parameters()))
    levels = []
    for m in range(3):
        outputs = stage.forward(m, (data(4, 8, seed=m),), True, (True,), split=True)
        stage.backward(m, [torch.ones_like(outputs)])
        stage.backward_weight(m)
        levels.append(stage.meter.level)
    assert levels == [0, 0, 0] and len(model.outputs) == 3


def test_no_growth_with_the_microbatches():
    """Trap 84: flat as soon as there are as many micro-batches as ranks (twice as many for those
    that keep more of them)."""
    names = {"zb-h1": (4, 8, 16), "zb-h2": (8, 16), "zb-1p": (8, 16), "zb-auto": (12, 16),
             "zb-v": (8, 16), "v-half": (8, 16), "v-min": (8, 16), "dualpipev": (8, 16),
             "dualpipe": (8, 16)}  # fmt: skip
    limits = {"zb-auto": {"memory_limit": 7}}
    tables = [schedule(name, 4, m, **limits.get(name, {}))
              for name, sizes in names.items() for m in sizes]  # fmt: skip
    found = on_ranks(peaks, tables, ranks=4)
    for rank in found:
        seen = iter(rank)
        for name, sizes in names.items():
            assert len({next(seen) for _ in sizes}) == 1, name
