# %% [markdown] name="question"
# ## The question
#
# With 1F1B, 4 ranks and 8 micro-batches, the first rank stands idle for 9 of 33 units. It waits
# for gradients: stage 0 can't go backward before stage 1 has, which waits for stage 2, which waits
# for stage 3.
#
# A backward pass takes about twice as long as a forward pass. **Does the stage before really have
# to wait for all of it?** No. Half of that work is for nobody but the stage itself, and can be
# done at any time before the weights are updated. Why not while the rank would idle?
#
# What you write: a Linear layer whose weight gradient comes later (8.1), the rows of ZB-H1 (8.2),
# two bubbles counted from a timeline (8.3), the rows of ZB-H2 (8.4).
# %% [markdown] name="two-halves"
# ## A backward pass does two things
#
# Take one layer, `y = x @ weight.T + bias`. Its backward pass begins with the gradient for `y`,
# which comes from the stage behind it. From that it computes
#
# - **I**, the gradient for its *input* `x`. The stage before waits for it.
# - **W**, the gradients for its *weights* (and bias). Nobody waits for them but the optimizer, at
#   the end of the step.
#
# Autograd computes both in one go. But one can ask it for each by itself:
# %% name="two-halves-shown"
import torch

torch.manual_seed(0)
x = torch.randn(4, 3, requires_grad=True)  # 4 rows, 3 inputs
weight = torch.randn(2, 3, requires_grad=True)  # 2 outputs
y = x @ weight.T
arrives = torch.randn(4, 2)  # the gradient for y, from the stage behind

(for_input,) = torch.autograd.grad(y, x, arrives, retain_graph=True)  # I
(for_weight,) = torch.autograd.grad(y, weight, arrives)  # W
print("I gives", list(for_input.shape), "like x; it needs the weight", list(weight.shape))
print("W gives", list(for_weight.shape), "like weight; it needs the input", list(x.shape))
# %% [markdown] name="two-halves-cost"
# Each of the two is one matrix product, with as many multiplications as the forward. So for Linear
# layers F, I and W take about equally long. And W needs two things only: the layer's input, which
# the forward saw, and the gradient for its output, which passed by in I. Keep both, and W can come
# whenever you like.
#
# A caution about letters: in this course B is the whole backward pass. In the Zero Bubble papers B
# is only what is called I here.
# %% [markdown] name="task-8-1-asked"
# ## Task 8.1: a Linear with a deferred weight gradient
#
# Fill in the two places. `ctx.waiting` is the layer's own list `self.waiting`. A
# `torch.autograd.Function` has its own backward pass: what `backward` returns becomes the
# gradients of the arguments of `forward`, in their order, with None for what gets none.
#
# The layer may be used several times before W comes: with several micro-batches, or twice in one
# forward. Inputs may have more dimensions than two, as in `[batch, tokens, inputs]`.
# %% name="task-8-1" task="8.1"
import torch
from torch import nn


class InputGradientOnly(torch.autograd.Function):
    """x @ weight.T + bias; its backward pass is I alone, and notes down what W needs."""

    @staticmethod
    def forward(ctx, x, weight, bias, waiting):
        ctx.save_for_backward(x, weight)
        ctx.waiting = waiting
        return x @ weight.T + bias

    @staticmethod
    def backward(ctx, gradient):
        """I. gradient: the one for the output, [..., outputs]. Appends what W needs to the list
        ctx.waiting; returns a gradient, or None, for each argument of forward behind ctx."""
        ### BEGIN SOLUTION
        x, weight = ctx.saved_tensors
        ctx.waiting.append((x.detach(), gradient))
        return gradient @ weight, None, None, None
        ### END SOLUTION


class DeferredLinear(nn.Module):
    """A Linear layer whose weight and bias get their gradients in `backward_weight` alone."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.waiting = []

    def forward(self, x):
        return InputGradientOnly.apply(x, self.weight, self.bias, self.waiting)

    def backward_weight(self):
        """W of all uses that wait: adds to self.weight.grad and self.bias.grad (None counts as
        zero), as autograd does. Afterwards nothing waits any more."""
        ### BEGIN SOLUTION
        for x, gradient in self.waiting:
            inputs, outputs = x.flatten(0, -2), gradient.flatten(0, -2)
            for parameter, found in (
                (self.weight, outputs.T @ inputs),
                (self.bias, outputs.sum(0)),
            ):
                parameter.grad = found if parameter.grad is None else parameter.grad + found
        self.waiting.clear()
        ### END SOLUTION


# %% [markdown] name="deferred-used-asked"
# In use: after `backward()` there is a gradient for the input, but none for the weight yet.
# %% name="deferred-used"
layer = DeferredLinear(3, 2)
x = torch.randn(4, 3, requires_grad=True)
layer(x).square().sum().backward()
print("after I: input", x.grad is not None, "· weight", layer.weight.grad is not None)
layer.backward_weight()
print("after W: input", x.grad is not None, "· weight", layer.weight.grad is not None)
# %% [markdown] name="engine"
# minipipe's engine does the same for the Linear, Conv2d, LayerNorm and GroupNorm layers of any
# model, so you need not write your models in another way. The idea is in
# `minipipe/engine/split.py`.
# %% [markdown] name="in-rows"
# ## In the rows
#
# Now I and W are actions of their own: `1I0` is the input gradient of stage 1 for micro-batch 0,
# `1W0` its weight gradient. The rules are few:
#
# - `0I0` waits for `1I0`. It does not wait for `1W0`.
# - `1W0` comes any time after `1I0` on the same row.
# - What F keeps stays until I, and what W needs stays from then until W. In our simple count both
#   are one micro-batch: it stays in memory until its W is done.
#
# Three tables for 2 ranks and 4 micro-batches: 1F1B; the same with I and W in the place of each B;
# and ZB-H1, in which W waits on rank 1.
# %% name="two-ranks-rows"
import minipipe as mp

FUSED = mp.Schedule.parse(
    """
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """,
    "1f1b",
)
SPLIT = mp.Schedule.parse(
    """
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
    1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 1F3 1I3 1W3
    """,
    "1f1b, split",
)
ZB_H1 = mp.Schedule.parse(
    """
    0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3
    """,
    "zb-h1",
)
# %% [markdown] name="guess-split-asked"
# **Guess first.** Let F, I and W take one unit each. 1F1B takes 15 units, 12 of work and 3 of
# bubble. How long does the second table take, in which each B is only cut in two?
# %% name="guess-split"
my_guess = ...  # units
# %% name="guess-split-revealed"
from minipipe.teach import reveal

reveal(my_guess, mp.simulate(SPLIT).makespan, "units")
# %% name="two-ranks-seen" picture="08-two-ranks"
mp.plot.overview([mp.simulate(s) for s in (FUSED, SPLIT, ZB_H1)],
                 "2 ranks, 4 micro-batches, F = I = W, predicted")  # fmt: skip
# %% [markdown] name="two-ranks-why"
# ![1F1B, 1F1B split, and ZB-H1, 2 ranks, predicted](figures/08-two-ranks.png)
#
# - **1F1B**: 15 units.
# - **Split**: 14. The gradient of micro-batch 0 leaves rank 1 after I, a unit earlier. That alone
#   is a gain. But rank 1 still does each W before it goes on, and rank 0 waits for what comes
#   behind it.
# - **ZB-H1**: 13. Rank 1 puts its W's off: it does `1F1` and `1I1` before `1W0`. So later
#   gradients leave earlier, and what rank 1 does in the end are W's, while rank 0 goes back.
#
# How far may the W's be put off? Each W that waits keeps a micro-batch in memory. 1F1B keeps *p* −
# *r* micro-batches on rank *r*, so rank 0 keeps *p*, and the last rank only one. If each rank may
# keep *p*, rank *r* has room for *r* W's that wait. That is ZB-H1: faster than 1F1B, and no rank
# needs more memory than 1F1B's fullest.
# %% [markdown] name="task-8-2-asked"
# ## Task 8.2: the rows of ZB-H1
#
# Write them for any number of ranks and micro-batches. The order is 60 % of the points; within
# memory (no rank keeps more than *p* micro-batches) and within the bubble 20 % each. For F = I = W
# and *m* ≥ *p* a step takes 3*m* + *p* − 1 units, 2(*p* − 1) fewer than 1F1B.
#
# Start from 1F1B with I in the place of B. Then put in the W's: which rank puts them off, and by
# how many turns? The table above has the answer for 2 ranks. Any legal order as fast, in the same
# memory, is right.
# %% name="task-8-2" task="8.2"
def zb_h1(ranks, microbatches):
    """The rows of ZB-H1: lists of actions such as "0F0", "0I0" and "0W0", one list a rank."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        warm_up = min(microbatches, ranks - 1 - rank)
        row = [f"{rank}F{m}" for m in range(warm_up)]
        for m in range(microbatches):
            if warm_up + m < microbatches:
                row.append(f"{rank}F{warm_up + m}")
            row.append(f"{rank}I{m}")
            if m >= rank:
                row.append(f"{rank}W{m - rank}")
        row += [f"{rank}W{m}" for m in range(max(0, microbatches - rank), microbatches)]
        rows.append(row)
    return rows
    ### END SOLUTION


# %% [markdown] name="h1-asked"
# Your rows for 4 ranks and 8 micro-batches:
# %% name="h1-seen" picture="08-zb-h1"
mp.plot.timeline(mp.simulate(mp.Schedule(zb_h1(4, 8), "zb-h1")))
# %% [markdown] name="h1-read"
# ![ZB-H1, 4 ranks, 8 micro-batches, predicted](figures/08-zb-h1.png)
#
# 27 units instead of 1F1B's 33: 22 % more throughput, in 1F1B's memory. The paper, "Zero Bubble
# Pipeline Parallelism" (2024), reports up to 23 % more at a similar memory limit.
#
# What is left are 3 idle units a rank. The last rank spends them in the beginning, the first one
# later. And the dashed line, the lower bound, says more: with one stage a rank no order at all
# takes less than 27 units. For the last rank can't start before three forwards are done elsewhere,
# and it has 24 units of work.
#
# So why is it called *zero* bubble?
# %% [markdown] name="own-span"
# ## Whose idle time?
#
# "Bubble" is said of several things. Two of them:
#
# 1. **Idle of the makespan.** The makespan goes from the first start to the last end *of all
#    ranks*. Bubble = idle / (ranks × makespan).
# 2. **Idle of the own span.** A rank's own span goes from its *own* first start to its *own* last
#    end. Bubble = the largest, over the ranks, of (own span − busy) / own span.
#
# Who waits before its first action is idle by the first measure, but not by the second. The zero
# of zero bubble is meant by the second. That is no trick, if two conditions hold: a rank that is
# done may go on with the next step, and its weights may be updated at that moment, without waiting
# for the others.
# %% [markdown] name="task-8-3-asked"
# ## Task 8.3: both bubbles
#
# Count both from a list of spans. Be exact: with integers and fractions in, the result is a
# `Fraction`, not a rounded float.
# %% name="task-8-3" task="8.3"
from fractions import Fraction


def bubbles(spans):
    """(idle of the makespan, idle of the own span), two Fractions.

    spans: a list of (rank, start, end), one for each action, in any order; the clock may start at
    any time. The ranks are those in the list. Spans of one rank don't overlap.
    """
    ### BEGIN SOLUTION
    makespan = max(end for _, _, end in spans) - min(start for _, start, _ in spans)
    ranks = {rank for rank, _, _ in spans}
    all_busy, own = 0, []
    for rank in ranks:
        mine = [(start, end) for r, start, end in spans if r == rank]
        busy = sum(end - start for start, end in mine)
        span = max(end for _, end in mine) - min(start for start, _ in mine)
        own.append(1 - Fraction(busy) / Fraction(span))
        all_busy += busy
    return 1 - Fraction(all_busy) / Fraction(len(ranks) * makespan), max(own)
    ### END SOLUTION


# %% [markdown] name="both-asked"
# Both bubbles of the three tables for 2 ranks, by your function:
# %% name="both-seen"
for schedule in (FUSED, SPLIT, ZB_H1):
    spans = [(s.rank, s.start, s.end) for s in mp.simulate(schedule).spans]
    of_makespan, of_own_span = bubbles(spans)
    print(f"{schedule.name:12} idle of the makespan {of_makespan}, of the own span {of_own_span}")
# %% [markdown] name="h2"
# ## ZB-H2: nothing idle in between
#
# ZB-H1 idles because rank 0 has nothing to do until the first gradient is back. Give it more
# forwards to do meanwhile! The first micro-batch has to pass *p* − 1 ranks, and its gradient has
# to come back over as many, one unit each. So rank 0 needs 2(*p* − 1) forwards before its first
# turn, twice as many as in 1F1B; rank *r* needs 2(*p* − 1 − *r*).
#
# And as each rank is that much ahead, it has to put off that many more W's in the end to stay
# busy: rank *r* by 2*r* turns instead of *r*.
#
# The price is memory for 2*p* − 1 micro-batches on each rank, nearly twice 1F1B's largest.
# %% [markdown] name="guess-h2-asked"
# **Guess first.** For 4 ranks and 8 micro-batches, ZB-H1 takes 27 units from the first start to
# the last end. How many does ZB-H2 take?
# %% name="guess-h2"
my_makespan = ...  # units
# %% name="guess-h2-revealed"
reveal(my_makespan, (4 - 1) + 8 * 3, "units")
# %% [markdown] name="task-8-4-asked"
# ## Task 8.4: the rows of ZB-H2
#
# Asked for *m* ≥ 2*p* − 1: no idle time within any rank's own span, a makespan of 3*m* + *p* − 1,
# and memory for 2*p* − 1 micro-batches at most. With fewer micro-batches the rows have to be legal
# all the same.
# %% name="task-8-4" task="8.4"
def zb_h2(ranks, microbatches):
    """The rows of ZB-H2: lists of actions such as "0F0", "0I0" and "0W0", one list a rank."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        warm_up, delay = 2 * (ranks - 1 - rank), 2 * rank
        forwards = [f"{rank}F{m}" for m in range(microbatches)]
        weights = [f"{rank}W{m}" for m in range(microbatches)]
        row = forwards[:warm_up]
        for m in range(microbatches):
            row += forwards[warm_up + m : warm_up + m + 1]
            row.append(f"{rank}I{m}")
            if m >= delay:
                row.append(weights.pop(0))
        rows.append(row + weights)
    return rows
    ### END SOLUTION


# %% name="h2-seen" picture="08-zb-h2"
mp.plot.timeline(mp.simulate(mp.Schedule(zb_h2(4, 8), "zb-h2")))
# %% [markdown] name="h2-read"
# ![ZB-H2, 4 ranks, 8 micro-batches, predicted](figures/08-zb-h2.png)
#
# The makespan is 27 again, the lower bound. But look at *where* it is idle: each rank does its 24
# units of work without a pause. Rank 0 is done at 24 and rank 3 at 27. The table has become a
# parallelogram.
# %% [markdown] name="many-steps"
# ## What the zero is good for
#
# Parallelograms fit into each other. If a rank updates its own weights at its own end and begins
# the next step, rank 0's next forwards fill the time in which rank 3 is still at work. Put several
# steps behind each other and see. (On paper: the micro-batches of the next step simply get the
# next numbers.)
# %% name="many-steps-seen"
def without_meeting(schedule, steps):
    """The rows of several steps, each rank going on with the next one at its own end."""
    count = schedule.microbatches
    rows = [[action._replace(microbatch=action.microbatch + step * count)
             for step in range(steps) for action in row] for row in schedule.rows]  # fmt: skip
    return mp.Schedule(rows, schedule.name)


for name in ("1f1b", "zb-h1", "zb-h2"):
    schedule = mp.build(name, ranks=4, microbatches=8)
    meeting = 10 * mp.simulate(schedule).makespan
    going_on = mp.simulate(without_meeting(schedule, 10)).makespan
    print(f"{name:6} 10 steps: {meeting} units where all wait for all, {going_on} where not")
# %% [markdown] name="many-steps-read"
# Only ZB-H2 gains: 10 steps take 243 units instead of 270, and 240 would be no bubble at all. 1F1B
# and ZB-H1 have a rank without any slack before and behind (rank 0 is first to start and last to
# end), so nothing fits into nothing.
#
# What can spoil it is anything that asks *all* ranks before an update. Clipping by the norm of the
# whole gradient is such a thing: the norm is a sum over all stages. The paper's authors update
# first, check afterwards, and undo the rare update that should have been clipped.
# %% [markdown] name="real"
# ## On real ranks
#
# Now for real: two processes, each emulating a device on which F, I and W take 15 ms each.
# `optimizer=` lets each rank take its optimizer step at its own end. Here is ZB-H2 for 2 ranks
# beside the tables from above. Which of them has 0 % of its own span idle?
# %% name="real-run"
ZB_H2 = mp.Schedule.parse(
    """
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3
    """,
    "zb-h2",
)
SLOT = 0.015  # seconds: F, I and W of a stage


def paced(rank, schedules):
    batch = torch.randn(16, 16), torch.randn(16, 16)
    found = []
    for schedule in schedules:
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16) for _ in range(2)])
        pipe = mp.Pipeline(model, schedule, torch.nn.functional.mse_loss,
                           optimizer=lambda own: torch.optim.SGD(own, 0.1))  # fmt: skip
        pipe.step(*batch)  # a first step, unpaced
        pace = mp.Pace(mp.Costs(SLOT, SLOT, SLOT))
        steps = [pipe.step(*batch, pace=pace).timeline.bubble for _ in range(3)]
        found.append((sorted(float(b.idle_over_total) for b in steps)[1],
                      sorted(float(b.own_span) for b in steps)[1]))  # fmt: skip
        print(f"{schedule.name} done")
    return found


tables = (FUSED, SPLIT, ZB_H1, ZB_H2)
measured = mp.launch(paced, tables, ranks=2, timeout=60)[0]
print("predicted and measured on emulated devices (median of 3 steps)")
for schedule, (of_makespan, of_own_span) in zip(tables, measured, strict=True):
    bubble = mp.simulate(schedule).bubble
    print(f"{schedule.name:12} idle of the makespan {float(bubble.idle_over_total):6.1%}"
          f" {of_makespan:6.1%}   idle of the own span {float(bubble.own_span):6.1%}"
          f" {of_own_span:6.1%}")  # fmt: skip
# %% [markdown] name="real-read"
# The measured numbers lie a little above the predicted ones: a real message takes a fraction of a
# millisecond, of which the prediction here knows nothing, and a busy machine adds its own. But for
# that, ZB-H2 keeps both ranks at work from their own start to their own end.
#
# One thing this run does *not* show is the next step beginning early. At its end minipipe's `step`
# brings all ranks' measurements together, and there the ranks meet. So this was measured within
# single steps, and the 243 units above are predicted.
# %% [markdown] name="learnt"
# ## What you learnt
#
# - A backward pass is two: I, for which the stage before waits, and W, for which nobody waits
#   before the update.
# - W needs the layer's input and the gradient for its output. As long as it is put off, both stay
#   in memory.
# - ZB-H1 puts W off by *r* turns on rank *r*: a third of 1F1B's bubble for F = I = W, in the same
#   memory of *p* micro-batches.
# - ZB-H2 has twice the warm-up and twice the delay: no idle time in any own span, for 2*p* − 1
#   micro-batches.
# - Say which bubble you mean. By the makespan both are alike; the zero pays where each rank may
#   update and go on at its own end.
#
# ## Next
#
# ZB-H2 has zero bubble at twice the memory. Lesson 9 places the stages in a V, so that each rank
# is near both ends of the model: zero bubble in 1F1B's memory. And it lets micro-batches run in
# both directions at once.
