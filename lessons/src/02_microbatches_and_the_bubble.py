# %% [markdown] name="question"
# ## The question
#
# In lesson 1 two ranks trained one model, and each of them waited half of the time.
#
# Now you have four GPUs and cut the model into four stages. You have paid for four. **How do you
# get all four to work at the same time, and still learn exactly the same?**
#
# Before we answer, see how bad it is.

# %% [markdown] name="guess-naive-asked"
# One batch goes forward through four stages, from rank 0 to rank 3. Each stage takes one step of
# time.
#
# **How much of the time are the four ranks idle, all taken together, in percent?**

# %% name="guess-naive"
my_guess = ...  # percent

# %% name="reveal-naive"
import minipipe as mp
from minipipe.teach import reveal

no_latency = mp.Costs(latency=0)  # a message takes no time, a forward takes 1
one_batch = mp.Schedule.parse("""
0F0
1F0
2F0
3F0
""")
t = mp.simulate(one_batch, no_latency)
reveal(my_guess, 100 * float(t.bubble.idle_over_total), "%", within=1)

# %% name="naive-figure"
mp.plot.timeline(t, "One batch, four ranks")

# %% [markdown] name="idea"
# One rank works and three wait, in every step.
#
# ## The idea
#
# Think of an assembly line that builds cars. Nobody waits until the first car is finished before
# the second one is begun. While the second worker mounts the doors of car 0, the first worker is
# already busy with car 1.
#
# Our cars are pieces of the batch. We cut the batch into **micro-batches**, and send them through
# the stages one behind the other. With two stages and three micro-batches it looks like this:
#
# ```
# GPU 0: F0 F1 F2  .
# GPU 1:  . F0 F1 F2
# ```
#
# Each line is a rank (here called GPU, as each has a device of its own). Each column is a step of
# time. `F1` is the forward with micro-batch 1, a dot is a step without work.
#
# In step 1 both work: GPU 0 with micro-batch 1, and GPU 1 with micro-batch 0, which GPU 0 has just
# handed over.

# %% [markdown] name="guess-steps-asked"
# Now four stages and six micro-batches. Without the trick that would be 4 × 6 = 24 steps, as only
# one rank works at a time.
#
# **How many steps does it take now?**

# %% name="guess-steps"
my_guess = ...  # steps


# %% name="reveal-steps"
def forward_rows(ranks, microbatches):
    """What each rank does, in its order: the forward of every micro-batch."""
    return mp.Schedule([[f"{r}F{m}" for m in range(microbatches)] for r in range(ranks)])


t = mp.simulate(forward_rows(4, 6), no_latency)
reveal(my_guess, t.makespan, "steps")

# %% name="staircase-figure" picture="02-staircase"
mp.plot.timeline(t, "Six micro-batches, four ranks, forward")

# %% [markdown] name="staircase-seen"
# ![A staircase: each rank begins one step after the one before it](figures/02-staircase.png)
#
# A staircase. Rank 3 has to wait three steps for its first micro-batch: the pipeline *fills*. At
# the end rank 0 has nothing left to do while the others finish: the pipeline *drains*. This idle
# time is called the **bubble**.
#
# The rule behind the picture: **in step t, stage s works on micro-batch m = t − s**, if there is
# one with that number.

# %% [markdown] name="task-2-1-asked"
# ## Task 2.1: draw the staircase
#
# Write a function that returns the picture as text, with one more line at the end. For 4 ranks and
# 6 micro-batches it has to be exactly
#
# ```
# GPU 0: F0 F1 F2 F3 F4 F5  .  .  .
# GPU 1:  . F0 F1 F2 F3 F4 F5  .  .
# GPU 2:  .  . F0 F1 F2 F3 F4 F5  .
# GPU 3:  .  .  . F0 F1 F2 F3 F4 F5
# Idle fraction: 33%
# ```
#
# - Each cell is two characters wide, and there is a blank before it.
# - The idle fraction is the share of dots among all cells, in percent, rounded to a whole number.
#   Here 12 of 36 cells are dots.

# %% name="task-2-1" task="2.1"
def staircase(ranks, microbatches):
    """The forward pass as text: a line for each rank, then the idle fraction in percent."""
    ### BEGIN SOLUTION
    steps = ranks + microbatches - 1
    lines, idle = [], 0
    for stage in range(ranks):
        line = f"GPU {stage}:"
        for step in range(steps):
            microbatch = step - stage
            if 0 <= microbatch < microbatches:
                line += f" F{microbatch}"
            else:
                line += "  ."
                idle += 1
        lines.append(line)
    lines.append(f"Idle fraction: {round(100 * idle / (ranks * steps))}%")
    return "\n".join(lines)
    ### END SOLUTION


# %% name="staircase-printed"
print(staircase(4, 6))

# %% [markdown] name="task-2-2-asked"
# ## Task 2.2: count the bubble
#
# Every table of work has a bubble, not only this tidy one. Later lessons have tables that no simple
# formula fits. So learn to count.
#
# You get a table as lists, one for each rank. A slot holds a text such as `"F0"` where the rank
# works, and `None` where it waits. All slots take equally long. The work is over when the last rank
# is done, so **a list that ends early means that this rank waits from there on.**
#
# Return idle slots / all slots as an exact `Fraction`. For example, both of these are `Fraction(1,
# 3)`:
#
# ```
# [["F0", "F1", None],          [["F0", "F1"],
#  [None, "F0", "F1"]]           [None, "F0", "F1"]]
# ```

# %% name="task-2-2" task="2.2"
from fractions import Fraction


def idle_share(table):
    """Idle slots / all slots of a table, as a Fraction.

    table: a list for each rank; its slots are texts (work) or None (idle).
    """
    ### BEGIN SOLUTION
    steps = max(len(row) for row in table)
    busy = sum(slot is not None for row in table for slot in row)
    return 1 - Fraction(busy, len(table) * steps)
    ### END SOLUTION


# %% [markdown] name="formula"
# ## A formula, checked by counting
#
# For the staircase one can think it through. With p stages and m micro-batches there are m + p − 1
# steps. Each rank works in m of them, and is idle in the other p − 1. So
#
# $$\text{idle fraction} = \frac{p - 1}{m + p - 1}$$
#
# Don't believe it, count:

# %% name="formula-counted"
for p, m in [(2, 3), (4, 6), (4, 24), (8, 8)]:
    table = [[None] * stage + [f"F{i}" for i in range(m)] for stage in range(p)]
    print(f"{p} stages, {m:2} micro-batches: counted {idle_share(table)}, "
          f"by the formula {Fraction(p - 1, m + p - 1)}")  # fmt: skip

# %% [markdown] name="guess-24-asked"
# Four ranks and 6 micro-batches idle 33 % of the time. **What is it with 24 micro-batches, in
# percent?**

# %% name="guess-24"
my_guess = ...  # percent

# %% name="reveal-24"
t = mp.simulate(forward_rows(4, 24), no_latency)
reveal(my_guess, 100 * float(t.bubble.idle_over_total), "%", within=1)

# %% name="bubble-figure" picture="02-bubble"
figure = mp.plot.Picture(figsize=(9, 4.5), layout="constrained")
axes = figure.add_subplot()
counts = list(range(1, 49))
for ranks in (2, 4, 8):
    timelines = [mp.simulate(forward_rows(ranks, m), no_latency) for m in counts]
    shares = [100 * float(t.bubble.idle_over_total) for t in timelines]
    axes.plot(counts, shares, label=f"{ranks} ranks")
    if ranks == 4:
        for m in (6, 24):
            axes.plot(m, shares[m - 1], "ko")
            axes.annotate(f"{shares[m - 1]:.0f} %", (m, shares[m - 1] + 3))
axes.set_xlabel("micro-batches")
axes.set_ylabel("bubble = idle / (ranks × makespan), %")
axes.set_title("The bubble, predicted")
axes.set_ylim(0, 100)
axes.grid(alpha=0.3)
axes.legend()
figure

# %% [markdown] name="bubble-seen"
# ![The bubble shrinks with more micro-batches, quickly at first](figures/02-bubble.png)
#
# More micro-batches, less bubble. The first few help most: with 4 ranks the bubble falls from 75 %
# with 1 micro-batch to 33 % with 6 and 11 % with 24. Twice as many, 48, bring it to 6 %.
#
# Why not take thousands, then? A micro-batch needs at least one row of the batch. A GPU computes
# small pieces less efficiently than large ones, and every piece costs a message. And all of them
# have to be kept somewhere, as lesson 5 will show.

# %% [markdown] name="play"
# If your notebook shows sliders, play with both numbers. It is the figure from above.


# %% name="slider"
from minipipe.teach import sliders


def show(ranks, microbatches):
    return mp.plot.timeline(mp.simulate(forward_rows(ranks, microbatches), no_latency))


sliders(show, ranks=(1, 8, 4), microbatches=(1, 24, 6))

# %% [markdown] name="backward"
# ## And backward
#
# Training needs the backward pass, too. It runs the other way: the last stage begins, and hands
# gradients to the stage before it. So the staircase comes once more, mirrored.
#
# Here are 3 ranks and 4 micro-batches, each rank's actions in its order. `2B1` is stage **2**,
# **B**ackward, micro-batch **1**. A backward takes twice as long as a forward.

# %% name="backward-figure" picture="02-forward-backward"
step_rows = mp.Schedule.parse("""
0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3
""")
t = mp.simulate(step_rows, no_latency)
mp.plot.timeline(t, "A whole step: 3 ranks, 4 micro-batches")

# %% [markdown] name="backward-seen"
# ![Two staircases, forward and backward mirrored](figures/02-forward-backward.png)
#
# Each rank is idle for p − 1 = 2 forward slots and for 2 backward slots. The share is the same as
# before: (p − 1) / (m + p − 1) = 2/6, again 33 %.
#
# Step through it, action by action: what does each rank do, what does it hold, what does it wait
# for?

# %% name="stepper"
from minipipe.teach import Stepper

Stepper(t)

# %% [markdown] name="same"
# ## Does it still learn the same?
#
# We have changed something: the model sees micro-batches and not the whole batch. If the update is
# to be that of the whole batch, then the micro-batches' gradients have to be put together rightly.
#
# First the batch has to be cut. 64 rows in 4 micro-batches are 16 each. But 10 rows in 4?

# %% [markdown] name="task-2-3-asked"
# ## Task 2.3: how many rows?
#
# Share the rows out as evenly as possible. Where they don't divide evenly, the **first**
# micro-batches get one row more. So 10 rows in 4 micro-batches are `[3, 3, 2, 2]`.
#
# This function is part of minipipe. In a course's copy of the project, the pipeline will cut every
# batch with *your* function from now on.

# %% name="task-2-3" task="2.3"
### REBUILD minipipe.batch:row_counts

# %% [markdown] name="guess-weight-asked"
# ## Whose gradient counts how much?
#
# The loss of a batch is a *mean* over its rows: every row counts the same.
#
# Say somebody cuts 100 rows into 33, 33, 33 and 1, computes the mean loss of each micro-batch, and
# takes the mean of these four numbers.
#
# **How much does the single last row count in it, in percent?** (It should be 1 %.)

# %% name="guess-weight"
my_guess = ...  # percent

# %% name="reveal-weight"
rows = [33, 33, 33, 1]
reveal(my_guess, 100 * (1 / len(rows)) / rows[-1], "%")

# %% [markdown] name="weights"
# Each of the four micro-batches got a quarter, and the last one has a single row. So this row
# counts 33 times as much as any other.
#
# The cure: **a micro-batch counts as much as it has rows.** With n rows of N its loss is multiplied
# by n / N. Then the sum over all micro-batches is the mean over all rows:
#
# $$\frac{1}{N}\sum_{\text{rows}} \text{loss} \;=\; \sum_{\text{micro-batches}} \frac{n}{N}
# \cdot \text{mean loss of the micro-batch}$$
#
# The gradient of a sum is the sum of the gradients. And autograd already sums: each `backward()`
# *adds* to `.grad`. This is called **gradient accumulation**.

# %% [markdown] name="task-2-4-asked"
# ## Task 2.4: accumulate
#
# Run a batch through the model micro-batch by micro-batch, so that in the end `.grad` holds the
# gradient of the whole batch's loss, and return that loss.

# %% name="task-2-4" task="2.4"
def accumulate(model, loss_fn, inputs, targets, counts):
    """Forward and backward for each micro-batch; .grad then is the whole batch's gradient.

    loss_fn(outputs, targets) is a mean over rows. counts: rows of each micro-batch, in the order of
    the batch. No parameter has a gradient before. Returns the whole batch's loss as a float.
    """
    ### BEGIN SOLUTION
    whole = 0.0
    for x, y in zip(inputs.split(counts), targets.split(counts), strict=True):
        loss = loss_fn(model(x), y) * len(x) / len(inputs)
        loss.backward()
        whole += loss.item()
    return whole
    ### END SOLUTION


# %% [markdown] name="equal"
# On real images, 100 rows cut unevenly: how far are the gradients from those of the whole batch?

# %% name="equal-counted"
import torch
from torch import nn

digits = mp.datasets.load("digits")
images, labels = digits.train_inputs[:100].double(), digits.train_targets[:100]
loss_fn = nn.functional.cross_entropy


def gradient_of(run):
    model = mp.models.build("mlp", digits, seed=0).double()
    run(model)
    return next(model.parameters()).grad


def equal_weights(model):  # the mistake
    for x, y in zip(images.split([33, 33, 33, 1]), labels.split([33, 33, 33, 1]), strict=True):
        (loss_fn(model(x), y) / 4).backward()


whole = gradient_of(lambda model: loss_fn(model(images), labels).backward())
off = (gradient_of(equal_weights) - whole).abs().max() / whole.abs().max()
print(f"every micro-batch counts the same: off by {off:.0%} of the largest gradient")
mine = gradient_of(lambda model: accumulate(model, loss_fn, images, labels, [33, 33, 33, 1]))
off = (mine - whole).abs().max() / whole.abs().max()
print(f"every row counts the same:         off by {off:.0e}")

# %% [markdown] name="equal-seen"
# What is left is rounding. The sum is the same, only added up in another order. The mistake, on the
# other hand, raises no error and the loss still falls: you would only wonder why it learns worse.

# %% [markdown] name="measured"
# ## Is the prediction true?
#
# All figures so far were *predicted*. Now three real processes train with the same rows, and each
# notes when it did what.
#
# Your computer may have fewer cores than ranks. So the devices are **emulated**: each rank does its
# real work, and then sleeps until its slot of time is over, here 15 ms for a forward and 30 ms for
# a backward. Who has to wait for whom is decided by the real messages.


# %% name="measured-figure"
seconds = mp.Costs(forward=0.015, backward_input=0.015, backward_weight=0.015, latency=0)


def measure(rank):
    model = mp.models.build("mlp", digits, seed=0)
    pipe = mp.Pipeline(model, step_rows, loss_fn, pace=mp.Pace(seconds))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for number in range(3):  # the first one also makes connections; the last one is shown
        pipe.zero_grad()
        step = pipe.step(digits.train_inputs[:64], digits.train_targets[:64])
        optimizer.step()
        if rank == 0:
            print(f"step {number}: loss {step.loss:.4f}, "
                  f"idle {100 * step.timeline.bubble.idle_over_total:.1f} %")  # fmt: skip
    return step.timeline


mp.plot.compare(mp.simulate(step_rows, seconds), mp.launch(measure, ranks=3)[0])

# %% [markdown] name="measured-seen"
# Above the prediction, below what three processes did. The measured bubble is usually a little
# larger, since real messages take a moment.

# %% [markdown] name="end"
# ## What you learnt
#
# - A batch is cut into **micro-batches** that follow each other through the stages, so that all
#   ranks work at the same time.
# - While the pipeline fills and drains, ranks are idle: the **bubble**. For p stages and m
#   micro-batches it is (p − 1) / (m + p − 1) of the time: 33 % for 4 and 6, 11 % for 4 and 24.
# - Formulas are for tidy tables. Counting slots works for every table.
# - Gradients are summed over the micro-batches, each weighted by its rows. Then the update is that
#   of the whole batch, however uneven the cut.
#
# ## Next
#
# You have seen the rows of a whole training step. Lesson 3 writes them for any number of ranks and
# micro-batches (this is **GPipe**), and builds an interpreter that runs them on real ranks.
