# %% [markdown] name="question"
# ## The question
#
# Two things in a pipeline are unfair. In 1F1B with 4 ranks, rank 0 keeps the activations of 4
# micro-batches and rank 3 those of one. And rank 3 has to wait at the start, rank 0 at the end.
#
# Both come from one habit: a micro-batch always enters at rank 0 and turns round at the last rank.
# **What if the way itself were bent?** It could come back to rank 0 before it turns (a *V*). Or
# half of the micro-batches could enter at the other end (*two ways*). Each of these ideas is only
# another table of actions. You know how to read one.

# %% [markdown] name="loop-and-v"
# ## A loop and a V
#
# In lesson 7 each rank held two stages, and the micro-batches went round the ranks twice: stages
# 0, 1, 2, 3 on ranks 0 to 3, then stage 4 on rank 0 again. That is a *loop*. A *V* goes down the
# ranks and comes back up. Here is one micro-batch on both ways, forward only.

# %% name="two-placements"
import minipipe as mp

loop = mp.Schedule.parse("""
0F0 4F0
1F0 5F0
2F0 6F0
3F0 7F0
""", "loop")
v = mp.Schedule.parse("""
0F0 7F0
1F0 6F0
2F0 5F0
3F0 4F0
""", "V")
for table in (loop, v):
    messages = mp.simulate(table).messages
    print(f"{table.name:5} stages of rank 0: {table.stages_of(0)}, of rank 3: {table.stages_of(3)}")
    print(f"      {messages} messages carry one micro-batch to the last stage\n")

# %% [markdown] name="what-falls-away"
# The V saves one message: stages 3 and 4 stand on one rank, which hands over to itself. And it has
# a second gift. The last stage, where the loss is computed and the backward pass begins, stands on
# **rank 0**, next to stage 0. So rank 0 gets its first gradient early.
#
# ## Task 9.1: the V placement
#
# Write both functions for any number of ranks: the two stages of a rank, and the messages that
# carry one micro-batch forward.

# %% name="task-9-1" task="9.1"
def v_stages(rank, ranks):
    """The two stages that a rank holds in the V placement, in the order of a micro-batch's way.

    With `ranks` ranks there are 2 * ranks stages, numbered from 0 along the model.
    """
    ### BEGIN SOLUTION
    return (rank, 2 * ranks - 1 - rank)
    ### END SOLUTION


def v_messages(ranks):
    """The messages that carry one micro-batch forward through all 2 * ranks stages.

    A list of pairs (from rank, to rank) in the order of the way. What a rank hands over to itself
    is no message.
    """
    ### BEGIN SOLUTION
    down = [(rank, rank + 1) for rank in range(ranks - 1)]
    return down + [(target, source) for source, target in reversed(down)]
    ### END SOLUTION

# %% [markdown] name="family"
# ## Three schedules on one V
#
# All three below have this placement and a backward pass in two halves (I and W, lesson 8):
#
# - **ZB-V** fills every gap inside a rank's own span, if F, I and W take equally long.
# - **V-Half** keeps about half of what 1F1B's rank 0 keeps.
# - **V-Min** keeps about a third.
#
# In each of them *every* rank keeps the same. How much is that? Take 12 ranks. Rank 0 of 1F1B keeps
# the activations of 12 micro-batches, counted in whole shares of a rank. Type how many V-Min keeps.

# %% name="guess-v-min"
my_guess = ...  # micro-batches

# %% name="reveal-v-min"
from minipipe.teach import reveal

t = mp.simulate(mp.build("v-min", ranks=12, microbatches=24))
reveal(my_guess, float(max(t.peak_activations)), "micro-batches")

# %% [markdown] name="family-figure-text"
# A V-Min rank may keep ⌊(p + 4)/3⌋ micro-batches, V-Half ⌊(p + 2)/2⌋, ZB-V p. What is the price?
# Time. Each panel below is one rank's memory over time, as predicted by the simulator.

# %% name="family-figure" picture="09-v-memory"
family = [mp.simulate(mp.build(name, ranks=4, microbatches=8))
          for name in ("zb-v", "v-half", "v-min")]
for t in family:
    print(f"{t.schedule.name:7} makespan {float(t.makespan)}, "
          f"idle/total {float(t.bubble.idle_over_total):.1%}, "
          f"own span {float(t.bubble.own_span):.1%}, "
          f"each rank keeps {[float(kept) for kept in t.peak_activations]}")
mp.plot.memory(*family)

# %% [markdown] name="family-read"
# ![Memory over time of ZB-V, V-Half and V-Min: every rank peaks alike](figures/09-v-memory.png)
#
# With 4 ranks and 8 micro-batches: 4, 3 and 2 micro-batches kept, and makespans of 25.5, 26.5 and
# 29.5 units (F = I = W = 1). 1F1B takes 33 and keeps 4 on rank 0. So V-Min is faster than 1F1B
# **and** keeps half as much here. The bill comes as messages: 96 instead of 48.
#
# The zero of ZB-V is the one of lesson 8: idle time inside a rank's own span. In the makespan
# 5.9 % are left, since somebody always starts last.

# %% [markdown] name="measure-v"
# ## On real ranks
#
# Four processes now run ZB-V on emulated devices: each action's work is done, then the rank sleeps
# until a device of its own would be ready. Beside it stands the prediction for the same table.

# %% name="run-zb-v"
import torch
from torch import nn


def paced(rank, name, model, batch, costs, cuts=None):
    """Some steps of a schedule on emulated devices; the timeline that took the middle time."""
    pipe = mp.Pipeline(model, mp.build(name, ranks=4, microbatches=8), nn.functional.mse_loss,
                       cuts=cuts, pace=mp.Pace(costs))
    if rank == 0:
        print(f"{name}: this rank holds stages {pipe.schedule.stages_of(rank)}")
    pipe.step(*batch)  # a first step takes longer: it also exchanges shapes
    timelines = []
    for _ in range(3):
        pipe.zero_grad()
        timelines.append(pipe.step(*batch).timeline)
    return sorted(timelines, key=lambda t: t.makespan)[1]


torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(8)])
batch = torch.randn(32, 16), torch.randn(32, 16)
seconds = 0.02  # of F, of I and of W of a rank's whole share
measured = mp.launch(paced, "zb-v", model, batch, mp.Costs(seconds, seconds, seconds), ranks=4)[0]
predicted = mp.simulate(mp.build("zb-v", ranks=4, microbatches=8))
print(f"idle/total: predicted {float(predicted.bubble.idle_over_total):.1%}, "
      f"measured on emulated devices {measured.bubble.idle_over_total:.1%}")

# %% [markdown] name="measure-v-read"
# The measured bubble is a little larger. The prediction was made without any latency, and the real
# messages take some.
#
# ## Two ways: Chimera
#
# Another idea: let half of the micro-batches run down the ranks and the other half up. When rank 0
# fills with the first half, rank 3 is not idle: it fills with the second half. Chimera is two 1F1B
# pipelines in opposite directions, each in the gaps of the other.

# %% name="chimera"
chimera = mp.build("chimera", ranks=4, microbatches=4)
print(chimera)
print("\nstage: the ranks that hold it")
for stage, ranks in chimera.holders.items():
    print(f"{stage}: {ranks}")

# %% [markdown] name="chimera-read"
# Read row 0. `0F0` and `0F1` are micro-batches 0 and 1 on their way down. `3F2` is micro-batch 2 on
# its way *up*: it entered at rank 3 and reaches its last stage on rank 0.
#
# So **each stage stands on two ranks.** That is the price: twice the parameters. How much is won?
# In 1F1B with 4 ranks, 4 micro-batches and a backward pass as long as the forward (B = F), 43 % of
# the time is idle. What does Chimera leave?

# %% name="guess-chimera"
my_guess = ...  # percent

# %% name="reveal-chimera"
from fractions import Fraction

half = Fraction(1, 2)
t = mp.simulate(mp.build("chimera", ranks=4, microbatches=4), mp.Costs(1, half, half))
reveal(my_guess, 100 * float(t.bubble.idle_over_total), "%", within=2)

# %% [markdown] name="copies-text"
# The formula is (p − 2)/(2m + p − 2), for B = F. With B = 2F the two ways no longer fit into each
# other's gaps, and for p = m = 4 the bubble is 25 % (1F1B's stays 43 %). A formula holds for its
# own assumptions, a table can be simulated for any.
#
# ## Copies and their gradients
#
# Stage 0 on rank 0 has seen micro-batches 0 and 1, its copy on rank 3 micro-batches 2 and 3. Each
# has the gradient of *its* micro-batches. The whole batch's gradient is the **sum** of both. It is
# a sum and no mean, because each micro-batch's loss was already weighted by its rows.
#
# Both copies must get the same sum, to the last bit. Then the same update keeps them equal for
# ever. If they differ by a rounding error, they drift apart, and nobody notices for a long time.
#
# Luckily a + b and b + a are the same number in floating point. (With three copies the order
# matters.)

# %% name="drift"
a, b, c = 0.1, 0.2, 0.3
print("a + b equals b + a:            ", a + b == b + a)
print("(a + b) + c equals a + (b + c):", (a + b) + c == a + (b + c))

# %% [markdown] name="task-9-2-asked"
# ## Task 9.2: one gradient for two copies
#
# Both ranks call your function at the same time for their copy of the same stage. Other ranks are
# busy with other stages meanwhile, so a collective over all ranks would add up what doesn't belong
# together. Send and receive, and think of lesson 4: two blocking sends wait for each other for
# ever.

# %% name="task-9-2" task="9.2"
import torch
import torch.distributed as dist


def add_copies(parameters, peer):
    """Make .grad of each parameter the sum of this rank's gradient and its copy's on rank `peer`.

    Both ranks call this for their copies of one stage: equally many parameters, of equal shapes,
    in the same order. Where .grad is None, no micro-batch used the parameter on that rank, and it
    counts as zeros. Afterwards each .grad is a tensor, the same on both ranks to the last bit.
    """
    ### BEGIN SOLUTION
    for parameter in parameters:
        mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        mine, theirs = mine.contiguous(), torch.empty(parameter.shape, dtype=parameter.dtype)
        sending = dist.isend(mine, peer)
        dist.recv(theirs, peer)
        sending.wait()
        parameter.grad = mine + theirs
    ### END SOLUTION

# %% [markdown] name="copies-real-text"
# Here is the whole thing on real ranks: Chimera trains three steps, then rank 0 and rank 3 compare
# their copies of stage 0. minipipe does the sum itself, with one all-reduce per stage.

# %% name="copies-real"
import torch
import torch.distributed as dist
from torch import nn


def copies_stay_equal(rank):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
    x, y = torch.randn(16, 8), torch.randn(16, 8)
    pipe = mp.Pipeline(model, mp.build("chimera", ranks=4, microbatches=4), nn.functional.mse_loss)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        pipe.zero_grad()
        pipe.step(x, y)
        optimizer.step()
    weight = pipe.state_dict().get("0.weight")  # of stage 0, which ranks 0 and 3 hold
    if rank == 3:
        dist.send(weight, 0)
    if rank == 0:
        other = torch.empty_like(weight)
        dist.recv(other, 3)
        print("stage 0 on ranks 0 and 3, equal to the last bit:", torch.equal(weight, other))


_ = mp.launch(copies_stay_equal, ranks=4)

# %% [markdown] name="dualpipe-text"
# ## DualPipe
#
# DeepSeek trained its V3 with *DualPipe*. It has two ways and copies like Chimera, a split backward
# pass like zero bubble, and one thing more: *overlapped pairs*. `(0F3;3B5)` is the forward of
# micro-batch 3 and the backward of micro-batch 5 at the same time.

# %% name="dualpipe-figure" picture="09-dualpipe"
mp.plot.timeline(mp.simulate(mp.build("dualpipe", ranks=4, microbatches=8)))

# %% [markdown] name="dualpipe-read"
# ![Timeline of DualPipe on 4 ranks, with overlapped pairs](figures/09-dualpipe.png)
#
# A cell with two halves is a pair. Look at the symmetry: rank 3 does what rank 0 does, with the
# other half of the micro-batches. (The dashed line is a bound: no order of these actions can end
# before it.)
#
# ## Task 9.3: read the figure
#
# A figure is read well when a program can do it. Yours gets the rows and the number of columns of
# the figure, for any two-way table and any numbering of the micro-batches.

# %% name="task-9-3" task="9.3"
from minipipe.actions import Action


def read_figure(rows, width):
    """What one sees in a figure of a table; a dictionary of five lists.

    rows: one list a rank, of texts such as "0F3" or "(0F3;3B5)"; Action.parse(text).parts are the
    single actions in it, each with .stage, .kind and .microbatch. width: how many columns the
    figure has; F, I and W take one column, B takes two, a pair takes three.

    "down", "up": the micro-batches that go to a higher, or to a lower, rank from stage 0 to
    stage 1; sorted. "copies": the stages that stand on more than one rank; sorted. "pairs": for
    each rank, its number of pairs. "idle": for each rank, the columns in which it does nothing.
    """
    ### BEGIN SOLUTION
    columns = {"F": 1, "I": 1, "W": 1, "B": 2}
    parsed = [[Action.parse(text).parts for text in row] for row in rows]
    start, second, holders, idle = {}, {}, {}, []
    for rank, row in enumerate(parsed):
        actions = [part for parts in row for part in parts]
        for stage, kind, microbatch, _ in actions:
            holders.setdefault(stage, set()).add(rank)
            if kind == "F" and stage < 2:
                (start, second)[stage][microbatch] = rank
        idle.append(width - sum(columns[action.kind] for action in actions))
    return {
        "down": sorted(m for m in start if second[m] > start[m]),
        "up": sorted(m for m in start if second[m] < start[m]),
        "copies": sorted(stage for stage, ranks in holders.items() if len(ranks) > 1),
        "pairs": [sum(len(parts) == 2 for parts in row) for row in parsed],
        "idle": idle,
    }
    ### END SOLUTION

# %% [markdown] name="use-read-figure-text"
# Here your function reads the figure above, which is 26 columns wide. Each rank has three pairs and
# two idle columns, in all 8 of 4 × 26, which is the bubble of 7.7 % in its title.

# %% name="use-read-figure"
table = mp.build("dualpipe", ranks=4, microbatches=8)
for what, found in read_figure([[str(a) for a in row] for row in table.rows], 26).items():
    print(f"{what:7} {found}")

# %% [markdown] name="overlap-text"
# ## What a pair is good for
#
# So far a pair has won nothing: it takes F + B, as one after the other does. It pays where a stage
# talks to other devices *inside* itself. In a mixture of experts each token travels to the device
# of its expert and back. While one micro-batch's tokens are under way, the device has nothing to
# do, unless it computes for another micro-batch. That is the pair.
#
# Say that a share x of every action is such an exchange. A pair then needs
#
# - at least the compute of both: (1 − x)(F + B), as a device computes one thing at a time;
# - at least F, as the forward's own compute and exchange follow each other;
# - and at least B, likewise.
#
# The time is the largest of the three. With F = 1, B = 2 and half of each action being exchange
# (x = 1/2): how many percent shorter is a pair than one after the other?

# %% name="guess-pair"
my_guess = ...  # percent shorter

# %% name="reveal-pair"
one_after_the_other = 1 + 2
pair = mp.simulate(mp.Schedule.parse("0F0 0F1 (0F2;0B0) 0B1 0B2"),
                   mp.Costs(1, 1, 1, exchange=Fraction(1, 2))).spans[2]
reveal(my_guess, 100 * (1 - float(pair.end - pair.start) / one_after_the_other), "%", within=1)

# %% [markdown] name="task-9-4-asked"
# Not 50 %: the compute of both would fit into 1.5, but the backward alone takes 2. Above x = 1/3
# more exchange gains nothing, because it has nothing left to hide behind.
#
# ## Task 9.4: the time of a pair, and of a row

# %% name="task-9-4" task="9.4"
from minipipe.actions import Action


def pair_time(forward, backward, exchange):
    """Time of an overlapped pair: of a forward and a whole backward that take `forward` and
    `backward` alone, of which the share `exchange` (0 to 1) is exchange."""
    ### BEGIN SOLUTION
    return max((1 - exchange) * (forward + backward), forward, backward)
    ### END SOLUTION


def busy(row, forward, backward_input, backward_weight, exchange):
    """The time that one rank is at work: with the actions of its row, each taking its time.

    row: texts such as "0F3", "3I4", "3W4", "3B5" or "(0F3;3B5)"; Action.parse(text).overlapped is
    None where it is no pair. B takes as long as I and W together. An action that is not in a pair
    hides nothing: its exchange is a part of its time.
    """
    ### BEGIN SOLUTION
    backward = backward_input + backward_weight
    times = {"F": forward, "I": backward_input, "W": backward_weight, "B": backward}
    total = 0
    for action in map(Action.parse, row):
        if action.overlapped is None:
            total += times[action.kind]
        else:
            total += pair_time(forward, backward, exchange)
    return total
    ### END SOLUTION

# %% [markdown] name="overlap-figure-text"
# ## DualPipe with something to hide
#
# The same rows, now with a quarter of each action being exchange. The pairs are shorter.

# %% name="overlap-figure" picture="09-overlap"
t = mp.simulate(mp.build("dualpipe", ranks=4, microbatches=8), mp.Costs(exchange=Fraction(1, 4)))
mp.plot.timeline(t, title="DualPipe, a quarter of each action is exchange")

# %% [markdown] name="overlap-figure-read"
# ![The same timeline with shorter pairs: 23 units instead of 26](figures/09-overlap.png)
#
# 23 units instead of 26. Each rank has three pairs, and each pair takes 2.25 instead of 3: that
# saves 2.25 units. The other 0.75 is waiting that fell away, since the pairs of the others end
# earlier too.
#
# Let us check that on real ranks. The model is a small mixture of experts, with `Exchange` layers
# that mark where its tokens travel. It has one block a stage.

# %% name="run-dualpipe"
from minipipe.models.moe import moe

model = moe(width=16, depth=4)
batch = torch.randn(32, 16), torch.randn(32, 16)
for exchange in (0, 0.25):
    costs = mp.Costs(seconds, seconds, seconds, exchange=exchange)
    measured = mp.launch(paced, "dualpipe", model, batch, costs, [5] * 4, ranks=4)[0]
    predicted = mp.simulate(mp.build("dualpipe", ranks=4, microbatches=8), costs)
    print(f"exchange {exchange:4.0%}: predicted {1e3 * predicted.makespan:.0f} ms, "
          f"measured on emulated devices {1e3 * measured.makespan:.0f} ms")

# %% [markdown] name="dualpipev-text"
# ## DualPipeV, and all of them
#
# In DualPipe the upper half of the ranks mirrors the lower half. Cut it there, let the way *up*
# continue the way *down*, and you have *DualPipeV*: a V with overlapped pairs, and no copies.
# Here are all of this lesson, 1F1B on top, with 4 ranks and 8 micro-batches, F = I = W = 1:

# %% name="all-of-them"
print("             makespan  with x = 1/4  keeps at most  parameters  messages")
for name in ("1f1b", "zb-v", "v-half", "v-min", "chimera", "dualpipe", "dualpipev"):
    table = mp.build(name, ranks=4, microbatches=8)
    plain = mp.simulate(table)
    hidden = mp.simulate(table, mp.Costs(exchange=Fraction(1, 4)))
    print(f"{name:10} {float(plain.makespan):10} {float(hidden.makespan):13} "
          f"{float(max(plain.peak_activations)):14} {table.parameter_copies:10}x "
          f"{plain.messages:9}")

# %% [markdown] name="learnt"
# ## What you learnt
#
# - In the V placement rank r holds stages r and 2p − 1 − r. The turn costs no message, the loss is
#   on rank 0, and every rank keeps the same.
# - ZB-V, V-Half and V-Min trade memory for time on one and the same placement.
# - Two ways fill the pipeline from both ends. The price is a copy of each stage: twice the
#   parameters, and a sum of gradients after which both copies are equal to the last bit.
# - An overlapped pair takes max((1 − x)(F + B), F, B). It pays only where there is exchange to
#   hide.
# - No schedule wins everywhere: makespan, memory, parameters and messages are four prices.
#
# ## Next
#
# All these tables cut the *model*. Lesson 10 cuts the *batch*: data parallelism, the image model,
# and the question of when a pipeline is worth its trouble at all.
