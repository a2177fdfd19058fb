# %% [markdown] name="question"
# ## How can four machines work on one batch at the same time?
#
# You can cut a model into stages (lesson 1), and you have seen micro-batches follow each other
# down the stages (lesson 2). But that was the forward pass. Training goes back as well, and the
# way back starts at the *last* stage. So each rank needs an order: which forward, which backward,
# when?
#
# GPipe (2018) gave the first good answer. Today you write that order down, and then the program
# that runs it on real processes. It has about 30 lines.

# %% [markdown] name="table"
# ## An order is a table
#
# One row a rank, one word an action: `2F5` is stage **2**, **F**orward, micro-batch **5**. `2B5`
# is its backward pass. A rank does its row from left to right. Nothing else is stored.
#
# Here the whole batch is one single micro-batch on four ranks. A backward takes two units of time
# and a forward one, because a backward has two jobs: the gradient for the stage's input, and the
# gradient for its weights.

# %% name="one-batch"
import minipipe as mp

one_batch = mp.Schedule.parse("""
0F0 0B0
1F0 1B0
2F0 2B0
3F0 3B0
""")
mp.plot.timeline(mp.simulate(one_batch), title="One batch, not cut")

# %% [markdown] name="one-batch-read"
# Hatched is idle. The batch climbs down the ranks, and its gradient climbs back up. At each moment
# one rank works and three wait: three quarters of what you paid for is the **bubble**.
#
# *Predicted* stands above the figure: these times are computed from the table, nothing was run.

# %% [markdown] name="gpipe"
# ## GPipe's order
#
# Cut the batch into micro-batches. Every rank sends **all** of them forward, one after the other.
# Only then it goes back with all of them.
#
# In which order they go back doesn't matter for the result: a gradient is a sum over the
# micro-batches, and a sum has no order. First in, first out is fine, last in, first out too, as
# long as all ranks agree.

# %% [markdown] name="task-3-1-asked"
# ### Task 3.1: the rows of GPipe
#
# Return one list a rank. `Action(2, "F", 5)` is `2F5`; the plain text `"2F5"` will do as well.
# Stage and rank have the same number here.
#
# With `recompute=True` an action `R` of the same micro-batch stands directly before each `B`:
# `… 0R0 0B0 0R1 0B1 …`. `R` computes a stage's activations a second time, right before they are
# needed. Lesson 5 shows why one would want that. Here it is only one more word in the row.

# %% name="task-3-1" task="3.1"
from minipipe.actions import Action


### REBUILD minipipe.schedules.gpipe:gpipe

# %% [markdown] name="guess-gpipe"
# ### Guess first
#
# One batch, not cut, left 75 % idle. Now there are 4 ranks and **8** micro-batches in GPipe's
# order. How much of the time do the ranks idle, in percent?

# %% name="guess-gpipe-typed"
my_guess = ...  # percent

# %% name="guess-gpipe-shown"
from minipipe.teach import reveal

predicted = mp.simulate(mp.build("gpipe", ranks=4, microbatches=8))
reveal(my_guess, 100 * float(predicted.bubble.idle_over_total), "%", within=1)

# %% name="gpipe-figure" picture="03-gpipe"
mp.plot.timeline(mp.simulate(mp.build("gpipe", ranks=4, microbatches=8)))

# %% [markdown] name="gpipe-read"
# This is the table that you should see (`mp.build("gpipe", …)` runs your own rows, once they
# pass):
#
# ![GPipe with 4 ranks and 8 micro-batches: all forwards, then all backwards](figures/03-gpipe.png)
#
# Count it. Each rank works 8 × 3 = 24 units, the step takes 33. Idle are 9 of 33, which is 27 %.
# Take the last rank: 3 units pass until its first micro-batch arrives, and 6 at the end, while the
# last gradient climbs up to rank 0. More micro-batches don't change the 9, they only make the 33
# larger. With p ranks and m micro-batches the bubble is (p − 1) / (m + p − 1).

# %% [markdown] name="naive"
# ## Naive beside it
#
# So were the micro-batches the trick? Try them without GPipe's order: each micro-batch goes all
# the way forward and all the way back, before the next one starts. That is called *naive* model
# parallelism. It is what you get when you put layers on different devices and change nothing else.

# %% [markdown] name="task-3-2-asked"
# ### Task 3.2: the rows of naive
#
# Write its rows in the same form.

# %% name="task-3-2" task="3.2"
from minipipe.actions import Action


### REBUILD minipipe.schedules.naive:naive

# %% [markdown] name="guess-naive"
# ### Guess first
#
# 4 ranks, 8 micro-batches, the naive order. How much do the ranks idle, in percent?

# %% name="guess-naive-typed"
my_guess = ...  # percent

# %% name="guess-naive-shown"
from minipipe.teach import reveal

predicted = mp.simulate(mp.build("naive", ranks=4, microbatches=8))
reveal(my_guess, 100 * float(predicted.bubble.idle_over_total), "%", within=1)

# %% name="bubbles" picture="03-bubbles"
from minipipe.plot.style import picture

counts = [1, 2, 4, 8, 16, 32]
figure = picture(4, width=9)
axes = figure.add_subplot()
for name in ("naive", "gpipe"):
    tables = [mp.build(name, ranks=4, microbatches=m) for m in counts]
    bubbles = [100 * float(mp.simulate(table).bubble.idle_over_total) for table in tables]
    axes.plot(counts, bubbles, "o-", label=f"{name}, predicted")
axes.set_xscale("log", base=2)
axes.set_xticks(counts, map(str, counts))
axes.set_xlabel("micro-batches")
axes.set_ylabel("idle / (ranks × makespan), %")
axes.set_ylim(0, 100)
axes.set_title("The bubble of 4 ranks", loc="left")
axes.legend()
figure

# %% [markdown] name="bubbles-read"
# ![Bubble over micro-batches: naive stays at 75 %, GPipe falls](figures/03-bubbles.png)
#
# The naive order gains nothing from micro-batches: still one rank works at a time. It is the
# *order* that fills the machines. GPipe falls from 75 % to 9 % with 32 micro-batches.

# %% [markdown] name="interpreter"
# ## A table is a program
#
# Now make it run. Every rank gets its own row and its own stage, and does one word after the
# other. There are only two words, and each receives, computes and sends:
#
# | action | receives | computes | sends |
# |---|---|---|---|
# | `F` | the activation `x` from rank − 1 | `y = stage(x)` | `y` to rank + 1 |
# | `B` | the gradient of `y` from rank + 1 | `y.backward(gradient)` | `x.grad` to rank − 1 |
#
# At the two ends a message is missing. Rank 0 takes `x` from the batch and sends no gradient. The
# last rank makes a loss out of `y`, and its backward pass starts there.
#
# Four things to get right:
#
# - **Keep** `x` and `y` of each micro-batch from its F to its B. Several are under way at once, so
#   file them by the micro-batch's number.
# - **A received tensor is only numbers.** It needs `x.requires_grad_()` before the stage runs,
#   else there is no `x.grad` to send back.
# - **The loss is a mean over the whole batch.** All micro-batches are equally large here, so each
#   one's loss counts 1/M.
# - **Send with `dist.isend`.** It returns at once and gives a handle, `handle.wait()` returns when
#   the message is out. Keep every handle and wait for all of them at the end. (`dist.send` would
#   stop and wait for the other side each time. What that does to you is lesson 4.) For receiving,
#   `dist.recv(tensor, source)` into a tensor of the right shape is just right: the rank can't go
#   on without it.

# %% [markdown] name="task-3-3-asked"
# ### Task 3.3: run a row
#
# Write the interpreter. It never asks for the schedule's name and never counts on GPipe's order:
# it does what the row says. The tests run it with GPipe's rows, and with those of a schedule that
# you have not seen yet, on real processes. Loss and gradients must equal those of one process to
# ten digits. Everything is `float64` for that.

# %% name="task-3-3" task="3.3"
import torch
import torch.distributed as dist

from minipipe.actions import Action


def run_row(row, rank, ranks, stage, loss_fn, inputs, targets, shape):
    """Run this rank's row once; return the batch's mean loss on the last rank, None on others.

    row: words such as "0F3" or "0B3", to be run in this order (`Action.parse` reads one). stage:
    this rank's module. loss_fn(outputs, targets): a mean over the rows of one micro-batch.
    inputs: one tensor a micro-batch, on rank 0, elsewhere None. targets: likewise, on the last
    rank. shape: that of each activation, and so of each gradient, between two ranks; float64.
    Afterwards `.grad` of the stage's parameters is the gradient of the batch's mean loss.
    """
    ### BEGIN SOLUTION
    first, last = rank == 0, rank == ranks - 1
    kept, handles, total = {}, [], 0.0

    def receive(source):
        tensor = torch.empty(shape, dtype=torch.float64)
        dist.recv(tensor, source)
        return tensor

    for word in row:
        action = Action.parse(word)
        m = action.microbatch
        if action.kind == "F":
            x = inputs[m] if first else receive(rank - 1).requires_grad_()
            y = stage(x)
            if last:
                y = loss_fn(y, targets[m]) / len(targets)
                total += y.item()
            else:
                handles.append(dist.isend(y.detach(), rank + 1))
            kept[m] = x, y
        else:
            gradient = None if last else receive(rank + 1)
            x, y = kept.pop(m)
            y.backward(gradient)
            if not first:
                handles.append(dist.isend(x.grad, rank - 1))
    for handle in handles:
        handle.wait()
    return total if last else None
    ### END SOLUTION

# %% [markdown] name="try-it"
# ## Run it
#
# First a pipeline of *one* rank, right here: it needs no message, but it must give the loss.
# Then four processes, each with its own quarter of the model. Lines with `[rank r]` come live from
# that process.

# %% name="try-it-run"
from torch import nn

WIDTH, PIECES, LINES = 16, 4, 8  # width of the model, micro-batches, rows of a micro-batch


def make_stages():
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).double() for _ in range(4)]


def one_rank_each(rank, rows, inputs, targets):
    stage = make_stages()[rank]
    print("runs", *rows[rank])
    loss = run_row(rows[rank], rank, 4, stage, nn.functional.mse_loss, inputs, targets,
                   (LINES, WIDTH))  # fmt: skip
    if loss is not None:
        print(f"the batch's loss is {loss:.12f}")
    return [parameter.grad for parameter in stage.parameters()]


torch.manual_seed(1)
inputs = torch.randn(PIECES * LINES, WIDTH, dtype=torch.float64)
targets = torch.randn(PIECES * LINES, WIDTH, dtype=torch.float64)
whole = nn.Sequential(*make_stages())
alone = run_row(["0F0", "0B0"], 0, 1, whole, nn.functional.mse_loss, [inputs], [targets], None)
print(f"one rank, one micro-batch: the loss is {alone:.12f}")

rows = [line.split() for line in str(mp.build("gpipe", ranks=4, microbatches=PIECES)).splitlines()]
results = mp.launch(one_rank_each, rows, inputs.chunk(PIECES), targets.chunk(PIECES), ranks=4,
                    timeout=30)  # fmt: skip
gradients = [gradient for of_rank in results for gradient in of_rank]
far = max(float((mine - p.grad).abs().max())
          for mine, p in zip(gradients, whole.parameters(), strict=True))  # fmt: skip
print(f"largest difference to one process, over all gradients: {far:.1e}")

# %% [markdown] name="try-it-read"
# A difference near 1e-17 is rounding: the sum over the micro-batches was taken in pieces. Four
# processes have trained as one. Your interpreter is done, and no later schedule of this shape will
# need another line in it.

# %% [markdown] name="guess-speed"
# ## Measured against predicted
#
# ### Guess first
#
# The same 8 micro-batches on 4 ranks, once in the naive order, once in GPipe's. How many times as
# fast is GPipe?

# %% name="guess-speed-typed"
my_guess = ...  # times

# %% name="guess-speed-shown"
from minipipe.teach import reveal

times = [mp.simulate(mp.build(name, ranks=4, microbatches=8)).makespan
         for name in ("naive", "gpipe")]  # fmt: skip
reveal(my_guess, times[0] / times[1], "times", within=0.1)

# %% [markdown] name="paced"
# Is that true outside of a simulation? Four processes on a laptop share its cores, so their speed
# says nothing about four devices. But they can *emulate* devices: each rank does the real work of
# an action, then sleeps until a slot of 10 ms a forward and 20 ms a backward is over. Sends,
# receives and waiting are real. So the order can show what it is worth.
#
# `mp.Pipeline` is the package's engine: an interpreter as yours, with a clock around it.

# %% name="paced-run"
from torch import nn

SLOTS = mp.Costs(forward=0.01, backward_input=0.01, backward_weight=0.01)  # seconds


def paced(rank, schedules):
    torch.manual_seed(0)
    batch = torch.randn(64, 16), torch.randn(64, 16)
    timelines = []
    for schedule in schedules:
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        pipe = mp.Pipeline(model, schedule, nn.functional.mse_loss)
        pipe.step(*batch)  # warm up
        timelines.append(pipe.step(*batch, pace=mp.Pace(SLOTS)).timeline)
        if rank == 0:
            print(f"{schedule.name}: a step took {timelines[-1].makespan:.2f} s")
    return timelines


schedules = [mp.build(name, ranks=4, microbatches=8) for name in ("naive", "gpipe")]
measured = mp.launch(paced, schedules, ranks=4, timeout=60)[0]
for schedule, run in zip(schedules, measured, strict=True):
    foreseen = mp.simulate(schedule, SLOTS)
    print(f"{schedule.name}: bubble predicted {foreseen.bubble.idle_over_total:.1%}, measured "
          f"on emulated devices {run.bubble.idle_over_total:.1%}")  # fmt: skip
mp.plot.compare(mp.simulate(schedules[1], SLOTS), measured[1])

# %% [markdown] name="paced-read"
# Above is the prediction, below what four processes did. Look at where they differ: a message
# takes a little time, which the prediction left out, so each rank starts a little later than the
# one before. Everything else is the table.

# %% [markdown] name="price"
# ## What it costs
#
# A stage has to keep what its backward pass needs, from F to B. The figure counts the micro-batches
# that each rank keeps over time.

# %% name="price-figure"
mp.plot.memory(mp.simulate(mp.build("gpipe", ranks=4, microbatches=8)))

# %% [markdown] name="learnt"
# Every rank keeps all 8 micro-batches at once. More micro-batches make the bubble smaller and the
# memory larger. Lessons 5 and 6 are about that.
#
# ## What you learnt
#
# - A schedule is a table: a row a rank, an action a word.
# - The naive order leaves (p − 1)/p of p ranks idle, however many micro-batches there are. GPipe's
#   order leaves (p − 1)/(m + p − 1).
# - An interpreter of 30 lines runs any such row: receive, compute, send. It doesn't know the
#   schedule's name.
# - Loss and gradients equal those of one process, because each micro-batch's loss counts 1/M and
#   gradients add up.
# - A measured step on emulated devices has the bubble that the table predicts, and a little more
#   for the messages.
#
# ## Next
#
# You used `isend` because you were told to. Lesson 4 takes it away, watches the ranks get stuck,
# and finds out who waits for whom.
