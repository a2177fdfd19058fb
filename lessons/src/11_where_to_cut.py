# %% [markdown] name="question"
# ## Who gets which layers?
#
# A model has 10 equal blocks, then a head that takes as long as two of them. There are 4 ranks.
# Who gets what?
#
# Three blocks for each of the first three ranks, and one block with the head for the last? Or is
# it enough to count layers? So far our stages were always equal. Real ones never are.
#
# %% [markdown] name="slow-stage"
# ## One slow stage
#
# Here are four equal stages, and four stages of which one takes twice as long. Everything else is
# the same: 1F1B, 8 micro-batches. In `mp.Costs` a list gives each stage a cost of its own. The
# three numbers are the times of forward and of the two halves of the backward pass, so a backward
# takes twice as long as a forward, as before.

# %% name="slow-figure" picture="11-slow"
import minipipe as mp


def timed(schedule, forward):
    """Simulated, with a time for the forward of each stage; its backward takes twice that."""
    return mp.simulate(schedule, mp.Costs(forward, forward, forward))


mp.plot.timeline(timed(mp.build("1f1b", ranks=4, microbatches=8), [1, 1, 2, 1]),
                 title="1F1B, stage 2 takes twice as long")  # fmt: skip

# %% [markdown] name="slow-read"
# ![Rank 2 is always busy in the middle of the step, the others wait for it](figures/11-slow.png)
#
# Rank 2 is busy nearly all the time. The others wait: those in front for its gradients, the one
# behind for its outputs. The step takes 55 units. With four equal stages of 1 it takes 33.
#
# Now take 64 micro-batches. Equal stages take 201. How many percent longer does the step take if
# one stage of four is twice as slow? Guess first.

# %% name="slow-guess"
my_guess = ...  # percent longer

# %% name="slow-reveal"
from minipipe.teach import reveal

reveal(my_guess, 100 * (391 / 201 - 1), "%", within=3)

# %% [markdown] name="pace"
# Nearly twice as long, though only a quarter of the model became slower. More micro-batches don't
# help. They make the fill and the drain unimportant, and what remains is the slow stage.
#
# **The slowest stage sets the pace of the whole pipeline.** Its time for one micro-batch, forward
# and backward, is the time between two micro-batches for everybody.
#
# So a good cut is one whose slowest stage is as fast as possible. For that we need to know what
# each layer costs.
#
# ## What does a layer cost?
#
# Measure it. `measure_costs` runs a model layer by layer, forward and backward, and takes the
# median of a few runs. Here is a ResNet-18 as a sequence of 15 layers.

# %% name="measure"
from functools import cache

import torch

from minipipe.models.resnet import resnet18
from minipipe.partition import measure_costs


@cache  # measured once
def measured_costs():
    model = resnet18(classes=10)
    seconds = measure_costs(model, torch.rand(2, 3, 32, 32), repeats=3)
    return [name for name, _ in model.named_children()], [1e3 * each for each in seconds]


def draw_costs(names, milliseconds):
    figure = mp.plot.Picture(figsize=(10, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(range(len(names)), milliseconds)
    axes.set_xticks(range(len(names)), names, rotation=60)
    axes.set_ylabel("forward + backward (ms)")
    axes.set_title("ResNet-18, a micro-batch of 2 images of 32 × 32: measured on this computer")
    return figure


draw_costs(*measured_costs())

# %% [markdown] name="measure-read"
# Very uneven. Some layers cost almost nothing (an activation, a flatten), others many times that.
# The numbers are measured, so they change from run to run.
#
# The number of parameters would be a poor guide here: a ResNet has most of its parameters in its
# late layers, but these work on small images, so each parameter is used less often.
#
# ## Task 11.1: the best cut
#
# `balance(costs, stages)` gets one cost a layer, and returns how many layers each stage gets. A
# stage is a run of layers in the model's order, and none is empty. The slowest stage has to be as
# fast as possible. There are never fewer layers than stages.
#
# Trying all cuts is fine for 10 layers. For 60 layers and 8 stages there are 341,149,446 of them.
# You need a better idea: the best cut of *some* of the layers is part of the best cut of all. Or
# turn the question round: does a given pace suffice for so many stages?
#
# Several cuts can be equally good. Any of them is right.

# %% name="task-11-1" task="11.1"
def balance(costs, stages):
    """How many layers each stage gets, a list of ints, so that the slowest stage is as fast as
    possible.

    costs: one number a layer, at least 0. stages: from 1 to the number of layers.
    """
    ### BEGIN SOLUTION
    layers, before = len(costs), [0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[first]: the slowest stage and the cut of the layers from `first` on in `left` stages
    best = {layers: (0, [])}
    for left in range(1, stages + 1):
        best = {
            first: min(
                (max(before[end] - before[first], best[end][0]), [end - first, *best[end][1]])
                for end in range(first + 1, layers + 1)
                if end in best
            )
            for first in range(layers - left + 1)
        }
    return best[0][1]
    ### END SOLUTION


# %% [markdown] name="compare-asked"
# Try it on the measured ResNet, against a cut that only counts layers. Both are predictions from
# measured costs.

# %% name="compare-cuts"
from itertools import islice


def stage_costs(costs, cut):
    layers = iter(costs)
    return [sum(islice(layers, count)) for count in cut]


def compare_cuts():
    _, costs = measured_costs()
    for name, cut in (("by number", [4, 4, 4, 3]), ("balanced", balance(costs, 4))):
        times = stage_costs(costs, cut)
        print(f"{name:9} layers {cut}, ms a stage {[round(t, 1) for t in times]}: pace "
              f"{max(times):.1f} ms, {sum(times) / 4:.1f} would be perfect")  # fmt: skip


compare_cuts()

# %% [markdown] name="pipeline-uses"
# `mp.Pipeline(model, …, costs=…)` cuts this way. Without costs it takes the numbers of parameters,
# because all ranks must agree on the cut, and each would measure other times. In practice one rank
# measures and tells the others.
#
# ## The ends of a language model
#
# A Transformer is a row of equal blocks, so one would think that it's easy. But in front stands an
# **embedding** (a table with one row for each token of the vocabulary), and at the end a **head**,
# which computes a number for each token of the vocabulary. They belong to the first and the last
# stage.
#
# Llama 3 405B is 16,384 numbers wide. A block has 16,384 × 53,248 numbers three times in its
# perceptron, and 16,384 × 16,384 twice and 16,384 × 1,024 twice in its attention. The head has
# 128,256 × 16,384. The time of a matrix product grows with the size of the matrix. How many percent
# of a block's time does the head take? Guess.

# %% name="head-guess"
my_guess = ...  # percent

# %% name="head-reveal"
width, inner, vocabulary = 16_384, 53_248, 128_256
block = 3 * width * inner + 2 * width * width + 2 * width * 1_024
head = vocabulary * width
print(f"126 blocks, embedding and head have {(126 * block + 2 * head) / 1e9:.1f} billion numbers")
reveal(my_guess, 100 * head / block, "%", within=5)

# %% [markdown] name="llama"
# Two thirds of a block. (Attention itself and the loss come on top: this is an estimate.)
#
# Llama 3 was trained with 16 pipeline stages. 16 × 8 = 128, but the model has **126** blocks: the
# first and the last stage have one fewer.
#
# - The **last** stage has the head. With 8 blocks it would need 8.66 block times, and set the pace
#   for all. With 7 it needs 7.66.
# - The **first** stage has the embedding. Looking up rows costs hardly any time. But the table
#   needs memory, as much as two thirds of a block, and the first stage also keeps the most
#   micro-batches (lesson 6). There the missing block makes *room*.
#
# ## Same pace, not same time
#
# Back to the question at the top, with a smaller head: 14 blocks, a head as long as one block, 4
# ranks. The pace can't be below 4, for 15 / 4 is more than 3. Four cuts have that pace. Does it
# matter which one you take?

# %% name="same-pace"
def show_same_pace():
    print("blocks          stages         GPipe    1F1B   (simulated makespan, 8 micro-batches)")
    for blocks in ([3, 4, 4, 3], [4, 3, 4, 3], [4, 4, 3, 3], [4, 4, 4, 2]):
        stages = [*blocks[:3], blocks[3] + 1]
        spans = [timed(mp.build(name, ranks=4, microbatches=8), stages).makespan
                 for name in ("gpipe", "1f1b")]  # fmt: skip
        print(blocks, " ", stages, *(f"{span:8}" for span in spans))


show_same_pace()

# %% [markdown] name="same-pace-read"
# With GPipe it doesn't. With 1F1B it does, a little: a fast *last* stage saves 3 units. It turns
# each micro-batch round sooner, and gradients come back while the first ranks can use them.
#
# So the pace decides most, the schedule decides the rest. For a given table one can simply try.
#
# ## Task 11.2: place the blocks
#
# `place_blocks(schedule, embedding, head, blocks)` returns how many blocks each stage gets, so that
# the simulated makespan of the given table is the least that is possible.
#
# - Stage r is on rank r; there are at least two. Each stage gets at least one block.
# - A block's forward takes 1. The first stage also has the embedding, the last one the head. Their
#   forwards take `embedding` and `head`.
# - Every backward takes twice its forward: use `mp.Costs(forward, forward, forward)` with a list.
# - The table can be any legal one with F and B. If several cuts are equally good, return any.
#
# With at most 12 blocks and 4 ranks you may try all cuts.

# %% name="task-11-2" task="11.2"
from itertools import combinations

import minipipe as mp


def place_blocks(schedule, embedding, head, blocks):
    """How many blocks each stage gets, a list of ints, for the least makespan of the schedule.

    schedule: a Schedule with stage r on rank r. embedding, head: what they take, a block taking 1.
    """
    ### BEGIN SOLUTION
    best = None
    for ends in combinations(range(1, blocks), schedule.ranks - 1):
        edges = [0, *ends, blocks]
        counts = [edges[rank + 1] - edges[rank] for rank in range(schedule.ranks)]
        forward = list(counts)
        forward[0] += embedding
        forward[-1] += head
        makespan = mp.simulate(schedule, mp.Costs(forward, forward, forward)).makespan
        if best is None or makespan < best[0]:
            best = makespan, counts
    return best[1]
    ### END SOLUTION


# %% name="try-place"
def show_best():
    table = mp.build("1f1b", ranks=4, microbatches=8)
    for embedding, head, blocks in ((0, 2, 10), (0, 1, 14), (1, 1, 14), (0.5, 2.5, 12)):
        counts = place_blocks(table, embedding, head, blocks)
        stages = [counts[0] + embedding, *counts[1:3], counts[3] + head]
        print(f"embedding {embedding}, head {head}, {blocks} blocks: {counts}, stages {stages}, "
              f"makespan {timed(table, stages).makespan}")  # fmt: skip


show_best()

# %% [markdown] name="try-place-read"
# The first line answers the question at the top: 3, 3, 3 and 1. The third line is Llama 3's pattern
# in small: with an embedding and a head of one block each, the first and the last stage get one
# fewer.
#
# ## How much is lost?
#
# How much does an uneven cut cost? For GPipe there is a formula. Think of the forward pass only.
# The first micro-batch runs through all stages: that takes the *sum* of the stage times. Each
# further one comes out of the pipeline one pace later: the *largest* stage time. So m micro-batches
# take
#
# **sum + (m − 1) × largest**
#
# The backward pass is a second pipeline, the other way round. It begins when the last rank has
# finished its forwards, and then the last rank does all its backwards. So the makespan is the sum
# of both. With equal stages this is lesson 2's staircase, twice.
#
# A rank is busy for m forwards and m backwards of its own stage. The rest is idle.
#
# Four stages take 2, 2, 2 and 4, forward and backward together, and there are very many
# micro-batches. How many percent of the time is rank 0 idle?

# %% name="idle-guess"
my_guess = ...  # percent

# %% name="idle-reveal"
reveal(my_guess, 100 * (1 - 2 / 4), "%: it works for 2 in each 4")

# %% [markdown] name="task-11-3-asked"
# No number of micro-batches brings that down.
#
# ## Task 11.3: GPipe with uneven stages
#
# `uneven_gpipe(forward, backward, microbatches)` returns the makespan and a list with the idle
# share of each rank. Forward and backward times are lists, one number a stage. They need not be
# proportional: the slowest stage forward and the slowest one backward can be different ones.
#
# Give the shares as `Fraction`s, or as floats. Messages take no time.

# %% name="task-11-3" task="11.3"
from fractions import Fraction


def uneven_gpipe(forward, backward, microbatches):
    """(makespan, [idle share of each rank]) of GPipe, with times of each stage.

    The idle share is idle time / makespan. Stage r is on rank r.
    """
    ### BEGIN SOLUTION
    both = [sum(times) + (microbatches - 1) * max(times) for times in (forward, backward)]
    makespan = sum(both)
    busy = [microbatches * (f + b) for f, b in zip(forward, backward, strict=True)]
    return makespan, [1 - Fraction(each) / Fraction(makespan) for each in busy]
    ### END SOLUTION


# %% name="idle-figure" picture="11-idle"
def draw_idle():
    figure = mp.plot.Picture(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    counts = [1, 2, 4, 8, 16, 32, 64, 128]
    for name, stages in (("stages 3, 3, 3, 3", [3, 3, 3, 3]), ("stages 2, 3, 3, 4", [2, 3, 3, 4]),
                         ("stages 2, 2, 2, 6", [2, 2, 2, 6])):  # fmt: skip
        shares = []
        for m in counts:
            _, idle = uneven_gpipe(stages, [2 * each for each in stages], m)
            shares.append(100 * float(sum(idle)) / len(idle))
        axes.plot(counts, shares, marker="o", label=name)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, counts)
    axes.set_ylim(0, 100)
    axes.set_xlabel("micro-batches")
    axes.set_ylabel("bubble = idle / total (%)")
    axes.set_title("GPipe on 4 ranks, the same work cut in three ways: predicted")
    axes.legend()
    return figure


draw_idle()

# %% [markdown] name="idle-read"
# ![The bubble: equal stages to 0, uneven ones to 25 and 50 percent](figures/11-idle.png)
#
# With equal stages more micro-batches make the bubble as small as you like. With uneven ones it
# stays above 1 − average / largest: 25 % for stages of 2, 3, 3 and 4, and 50 % for 2, 2, 2 and 6.
#
# ## On emulated devices
#
# Four real processes now train the model of the question: 10 blocks, and a head like two. Its
# devices are emulated, 5 ms for a block's forward and 10 ms for its backward. First the layers are
# only counted (12 layers with the embedding, 3 a rank), then the cut is the best one.

# %% name="real"
from torch import nn

from minipipe.emulation import measure_latency


def train(rank, schedule, cuts, stages):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)]
    pipe = mp.Pipeline(nn.Sequential(*layers), schedule, nn.functional.mse_loss, cuts=cuts)
    x, y = torch.randn(2, 32, 32)
    slots = [0.005 * each for each in stages]
    pipe.step(x, y)  # the first step is slower: connections are made
    step = pipe.step(x, y, pace=mp.Pace(mp.Costs(slots, slots, slots)))
    costs = mp.Costs(slots, slots, slots, latency=measure_latency())
    return mp.simulate(schedule, costs), step.timeline


def run_both():
    schedule = mp.build("1f1b", ranks=4, microbatches=8)
    for name, cuts, stages in (("counted", [3, 3, 3, 3], [2, 3, 3, 4]),
                               ("balanced", [4, 3, 3, 2], [3, 3, 3, 3])):  # fmt: skip
        predicted, measured = mp.launch(train, schedule, cuts, stages, ranks=4, output=False)[0]
        print(f"{name}, stages {stages}")
        for origin, t in (("predicted", predicted), ("emulated devices", measured)):
            bubble = float(t.bubble.idle_over_total)
            print(f"  {origin:16} {1e3 * t.makespan:.0f} ms, bubble (idle / total) {bubble:.1%}")


run_both()

# %% [markdown] name="learnt"
# ## What you learnt
#
# - The slowest stage sets the pace. More micro-batches don't help against it.
# - Layers have to be measured. Their number, and the number of their parameters, can mislead.
# - The best cut of a row of layers is found by dynamic programming, or by asking which pace
#   suffices.
# - Embedding and head belong to the ends of the model. Llama 3 takes one block away from each end:
#   for time at the head, for room at the embedding.
# - Among cuts with the same pace the schedule decides: with 1F1B a fast last stage saves time.
#
# ## Next
#
# A cut can't always be even: a block can't be cut in two. In lesson 16 you get such a model and too
# little memory, and design the schedule for it.
