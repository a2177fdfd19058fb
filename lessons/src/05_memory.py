# %% [markdown] name="question"
# ## Where does the memory go?
#
# Lesson 2 gave good advice: many micro-batches make the bubble small. Somebody takes it, goes from
# 4 micro-batches to 64, and the program runs out of memory. The parameters are the same as before.
#
# What fills the memory? And can a rank throw some of it away?
#
# %% [markdown] name="autograd-keeps"
# ## What autograd keeps
#
# A backward pass needs numbers from the forward pass. So autograd *saves* tensors while the forward
# pass runs, and lets them go when the backward pass has used them. Torch lets us watch:
# `saved_tensors_hooks` takes two functions. The first one sees each tensor when it is saved, the
# second one when it is used again.

# %% name="look"
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3), nn.Tanh())
inputs = torch.randn(4, 6)  # 4 rows, 6 numbers each


def look(tensor):
    address = tensor.untyped_storage().data_ptr() % 1_000_000
    print("saved:", tuple(tensor.shape), "from the memory at …", address)
    return tensor


with saved_tensors_hooks(look, lambda tensor: tensor):
    outputs = layers(inputs)
for name, parameter in layers.named_parameters():
    address = parameter.untyped_storage().data_ptr() % 1_000_000
    print(f"{name} is at … {address}")

# %% [markdown] name="look-read"
# Read the list from top to bottom.
#
# - The first `Linear` keeps its **input**. It needs it for the gradient of its weights.
# - `ReLU` keeps its **output**. It shows which numbers were cut to zero.
# - The second `Linear` keeps its input too. That *is* ReLU's output: the same address, so the same
#   memory. It costs nothing more.
# - The second `Linear` also saves its weights, for the gradient of its input. They are parameters.
#   They are in memory anyway.
# - `Tanh` keeps its output, because its derivative is 1 − output².
#
# What counts is memory, not tensors. A piece of memory is called a *storage*, and several tensors
# may lie in the same one.
#
# How many bytes does autograd keep here? Parameters don't count, each storage counts once, and a
# number (float32) has 4 bytes. Guess, or better: count.

# %% name="guess-bytes"
my_guess = ...  # bytes

# %% name="reveal-bytes"
from minipipe.teach import reveal

reveal(my_guess, 4 * (4 * 6 + 4 * 5 + 4 * 3), "bytes")

# %% [markdown] name="task-5-1-asked"
# ## Task 5.1: a meter
#
# Write `kept_bytes(forward, parameters)`. It calls `forward()` once and returns how many bytes
# autograd keeps for the backward pass.
#
# - Each storage counts once and whole: `tensor.untyped_storage()` has `.data_ptr()`, its address,
#   and `.nbytes()`, its size.
# - The storages of `parameters` don't count. Autograd often saves a *view* of a weight, such as its
#   transpose: another tensor in the same storage.
# - What the first hook returns is what autograd keeps, so return the tensor itself.

# %% name="task-5-1" task="5.1"
from torch.autograd.graph import saved_tensors_hooks


def kept_bytes(forward, parameters=()):
    """Call forward() once; the bytes that autograd keeps for its backward pass.

    Each storage counts once and whole. The storages of `parameters` (an iterable) don't count.
    """
    ### BEGIN SOLUTION
    owned = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    sizes = {}

    def note(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in owned:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = forward()  # noqa: F841  keeps the graph, and so its memory, until we have counted
    return sum(sizes.values())
    ### END SOLUTION


# %% [markdown] name="rows-grow"
# Now use your meter. What grows with the number of rows, and what doesn't?

# %% name="rows"
def count_by_rows():
    model = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(),
                          nn.Linear(256, 10))  # fmt: skip
    own = sum(p.untyped_storage().nbytes() for p in model.parameters())
    for rows in (16, 64, 256, 1024):
        batch = torch.randn(rows, 784)
        kept = kept_bytes(lambda batch=batch: model(batch), model.parameters())
        print(f"{rows:5} rows: parameters {own / 1e6:.2f} MB, kept {kept / 1e6:5.2f} MB")


count_by_rows()

# %% [markdown] name="rows-read"
# Parameters have a fixed size. What autograd keeps, the *activations*, grows with the rows: 4 times
# the rows, 4 times the bytes. With many rows the activations are most of the memory.
#
# A micro-batch of 16 rows keeps a quarter of what 64 rows keep. So micro-batches should save
# memory. They do, if a rank can finish one before it starts the next. The schedule decides that.
#
# ## From F to B
#
# A rank keeps a micro-batch's activations from its forward F to its backward B. Here is GPipe on
# 3 ranks. All forwards come first.

# %% name="gpipe-guess"
import minipipe as mp

gpipe = mp.Schedule.parse("""
0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5
1F0 1F1 1F2 1F3 1F4 1F5 1B0 1B1 1B2 1B3 1B4 1B5
2F0 2F1 2F2 2F3 2F4 2F5 2B0 2B1 2B2 2B3 2B4 2B5
""", name="gpipe")
my_guess = ...  # how many micro-batches does rank 2, the last one, keep at most?

# %% name="gpipe-reveal"
t_gpipe = mp.simulate(gpipe)
reveal(my_guess, t_gpipe.peak_activations[2], "micro-batches")

# %% [markdown] name="orders"
# Every rank keeps all 6, the last one too. With 64 micro-batches it would keep all 64. That is the
# answer to the question at the top: micro-batches are smaller, but GPipe keeps them all.
#
# Below, GPipe's curves are on the left. On the right the same actions stand in another order. All
# numbers are predicted, and a backward takes twice as long as a forward.

# %% name="orders-figure" picture="05-two-orders"
other = mp.Schedule.parse("""
0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
""", name="another order")
mp.plot.memory(t_gpipe, mp.simulate(other))

# %% [markdown] name="orders-read"
# ![GPipe climbs to 6 on each rank, the other order to 3, 2, 1](figures/05-two-orders.png)
#
# A step up is a forward, a step down is a backward. Both end at the same time, but the right one
# keeps at most 3, 2 and 1 micro-batches. Lesson 6 is about this order. Here we stay with GPipe and
# ask what else can be done.
#
# ## Keep less: compute again
#
# A stage can throw its activations away at once and keep only its **input**. When the gradient
# comes, it runs the forward pass a second time, from the kept input, and then goes backward. This
# is *recomputation*, also called *gradient checkpointing*. GPipe's paper does it in every stage.
#
# The price is time: one more forward. Where a backward takes as long as two forwards, the work of a
# micro-batch grows from 3 to 4.
#
# There is one trap. Look at dropout:

# %% name="dropout"
torch.manual_seed(0)
dropout = nn.Dropout(0.5)
print("first time: ", dropout(torch.ones(8)).tolist())
print("second time:", dropout(torch.ones(8)).tolist())

# %% [markdown] name="dropout-read"
# A second forward draws other random numbers, so other elements are dropped. The gradient would
# belong to another network than the one that made the loss. So the stage must keep one more thing:
# the **state of the random numbers** at its forward pass. `torch.get_rng_state()` reads it,
# `torch.set_rng_state(state)` sets it.
#
# Setting it back has a trap of its own. After the recompute, the random numbers must go on where
# they were. Else the next micro-batch gets the masks of an old one.
#
# ## Task 5.2: checkpointing by hand
#
# Write the class `Recomputing`: a stage that keeps only input and random state of each micro-batch.
#
# - `forward(microbatch, x)` returns what the layers give, and leaves **no graph** behind.
# - `backward(microbatch, gradient)` takes the gradient of the output. It runs the forward again,
#   with a graph and with the same random numbers, then backward. It returns the gradient of `x`.
#   The gradients of the parameters add up in `.grad`, as always.
# - Afterwards the random numbers go on as if nothing had been computed again.
# - Several micro-batches may be on their way at once, and may come back in any order. They may even
#   have been given the same `x`, and `x` itself is not to be changed.

# %% name="task-5-2" task="5.2"
import torch


class Recomputing:
    """A stage that keeps only input and random state of a micro-batch, and computes again."""

    def __init__(self, layers):
        self.layers = layers
        self.kept = {}  # micro-batch -> what is kept of it

    def forward(self, microbatch, x):
        """layers(x) without a graph; the input and the state of the random numbers are kept."""
        ### BEGIN SOLUTION
        self.kept[microbatch] = x, torch.get_rng_state()
        with torch.no_grad():
            return self.layers(x)
        ### END SOLUTION

    def backward(self, microbatch, gradient):
        """Compute again with a graph, then go backward from `gradient`; the gradient of the input.

        `.grad` of the parameters grows. The random numbers go on as if this had not been.
        """
        ### BEGIN SOLUTION
        x, state = self.kept.pop(microbatch)
        x = x.detach().requires_grad_()
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        outputs = self.layers(x)
        torch.set_rng_state(now)
        outputs.backward(gradient)
        return x.grad
        ### END SOLUTION


# %% [markdown] name="batchnorm"
# ## BatchNorm counts twice
#
# Dropout is not the only layer that a second forward surprises. In training, BatchNorm updates its
# running mean and variance in each forward pass. What does your stage do to it?

# %% name="batchnorm-twice"
def count_updates():
    norm = nn.BatchNorm1d(6)
    stage = Recomputing(norm)
    stage.forward(0, torch.randn(4, 6))
    stage.backward(0, torch.ones(4, 6))
    print("micro-batches: 1, updates of the statistics:", int(norm.num_batches_tracked))


count_updates()

# %% [markdown] name="batchnorm-read"
# Two updates for one micro-batch. The gradients are right, because in training BatchNorm uses the
# micro-batch's own mean. But the running statistics, which are used later for testing, have seen
# this micro-batch twice. minipipe's engine lends the layers copies of their buffers for the second
# run. The last cells of this lesson check that on real ranks.
#
# ## R in the rows
#
# In a table the second forward is an action of its own, `R`. `0R3` before `0B3` says: stage 0 keeps
# only the input of micro-batch 3, and here it computes the rest again.
#
# `R` needs no gradient from anybody. A rank may do it while it waits for one.

# %% name="r-rows"
again = mp.Schedule.parse("""
0F0 0F1 0F2 0F3 0R0 0B0 0R1 0B1 0R2 0B2 0R3 0B3
1F0 1F1 1F2 1F3 1R0 1B0 1R1 1B1 1R2 1B2 1R3 1B3
""", name="with R")
plain = mp.Schedule.parse("""
0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
""", name="without R")
mp.plot.timeline(mp.simulate(again))

# %% [markdown] name="r-guess-asked"
# Say that a stage's input takes a quarter of what the stage keeps in all. Without R each rank keeps
# 4 micro-batches at most. And with R? Count at the moment when a rank has just done `R0`.

# %% name="r-guess"
my_guess = ...  # micro-batches

# %% name="r-reveal"
t_again = mp.simulate(again, mp.Costs(input_size=0.25))
reveal(my_guess, t_again.peak_activations[0], "micro-batches", within=0.01)

# %% name="r-figure" picture="05-recompute"
mp.plot.memory(mp.simulate(plain), t_again)

# %% [markdown] name="r-read"
# ![Without R up to 4 micro-batches, with R up to 1.75](figures/05-recompute.png)
#
# Three inputs of a quarter each, and one whole micro-batch: 1.75. GPipe with recompute keeps m
# *small* things and one large one. Look at the time axes too: the step takes 19 units, not 15.
#
# ## Task 5.3: the curve by counting
#
# Write `kept_over_time(row, input_size)`. It returns what a rank keeps **after** each action of its
# row, in micro-batches.
#
# - Without R, a micro-batch counts 1 from its F to its B.
# - With R, it counts `input_size` from its F to its R, and 1 from its R to its B.
# - After its B it counts 0.
#
# A row is a list such as `["0F0", "0F1", "0R0", "0B0", "0B1"]`. `Action.parse("0R1")` gives an
# action with `.kind` ("R") and `.microbatch` (1).

# %% name="task-5-3" task="5.3"
from minipipe.actions import Action


def kept_over_time(row, input_size=0):
    """What a rank keeps after each action F, B or R of its row: a list of numbers.

    A micro-batch counts 1 from its F to its B; one that has an R counts `input_size` from its F
    to its R, and 1 from there to its B.
    """
    ### BEGIN SOLUTION
    actions = [Action.parse(text) for text in row]
    again = {action.microbatch for action in actions if action.kind == "R"}
    level, levels = 0, []
    for action in actions:
        first = input_size if action.microbatch in again else 1
        level += {"F": first, "R": 1 - first, "B": -1}[action.kind]
        levels.append(level)
    return levels
    ### END SOLUTION


# %% [markdown] name="some-asked"
# ## Recompute only some
#
# R costs time, so do it only where the memory asks for it. A row may have an R for some
# micro-batches and none for the others. And it matters *which*:

# %% name="some"
for row in ("0F0 0F1 0F2 0R0 0B0 0B1 0B2", "0F0 0F1 0F2 0B0 0B1 0R2 0B2"):
    t = mp.simulate(mp.Schedule.parse(row), mp.Costs(input_size=0.25))
    print(f"{row}   keeps {t.peak_activations[0]} micro-batches, takes {t.makespan}")

# %% [markdown] name="task-5-4-asked"
# Both rows have one R. In the first one, R happens when everything else is still there. In the
# second one, two micro-batches are gone before R needs its room.
#
# ## Task 5.4: GPipe in a given memory
#
# Write `gpipe_in_memory(ranks, microbatches, input_size, limit)`: rows of GPipe that keep at most
# `limit` micro-batches on each rank, with as few R's as possible.
#
# - All forwards of a rank come before its first B or R.
# - A kept input counts `input_size`, everything else is counted as in task 5.3.
# - The limit is never smaller than what R for every micro-batch would need.

# %% name="task-5-4" task="5.4"
def gpipe_in_memory(ranks, microbatches, input_size, limit):
    """Rows of GPipe with R where needed: lists of actions such as "0F0", one list a rank.

    Each rank keeps at most `limit` micro-batches, and as few of them as possible have an R.
    """
    ### BEGIN SOLUTION
    again = 0
    while microbatches - again + again * input_size > limit:
        again += 1
    rows = []
    for rank in range(ranks):
        row = [f"{rank}F{m}" for m in range(microbatches)]
        for m in range(microbatches):
            if m >= microbatches - again:
                row.append(f"{rank}R{m}")
            row.append(f"{rank}B{m}")
        rows.append(row)
    return rows
    ### END SOLUTION


# %% [markdown] name="trade-asked"
# What does memory cost? Your rows for 4 ranks and 8 micro-batches, with less and less room:

# %% name="trade"
def show_trade():
    for limit in (8, 6, 4, 3, 2):
        table = mp.Schedule(gpipe_in_memory(4, 8, 0.125, limit))
        t = mp.simulate(table, mp.Costs(input_size=0.125))
        count = sum(action.kind == "R" for action in table.rows[0])
        print(f"room for {limit}: {count} of 8 computed again, "
              f"keeps {float(max(t.peak_activations)):.3f}, takes {t.makespan} units")


show_trade()

# %% [markdown] name="real-asked"
# ## On real ranks
#
# So far all was counted. Now two real processes train one step, with the two tables from above.
# The model has dropout and BatchNorm. `peak_activation_bytes` is what minipipe's meter saw: the
# same kind of meter as yours, run in each rank.

# %% name="real"
def train(rank, schedule):
    torch.manual_seed(0)
    layers = [nn.Linear(128, 128), nn.BatchNorm1d(128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh(),
              nn.Dropout(0.2)]  # fmt: skip
    more = [nn.Linear(128, 128), nn.Tanh(), nn.Dropout(0.2), nn.Linear(128, 10)]
    x, y = torch.randn(256, 128), torch.randint(10, (256,))
    pipe = mp.Pipeline(nn.Sequential(*layers, *more), schedule, nn.functional.cross_entropy,
                       cuts=[6, 4])  # fmt: skip
    step = pipe.step(x, y)
    print(f"{schedule.name}: kept at most {step.peak_activation_bytes / 1e6:.2f} MB", flush=True)
    updates = int(pipe.state_dict()["1.num_batches_tracked"]) if rank == 0 else None
    return step.loss, [p.grad for p in pipe.parameters()], updates


def run_both():
    first, second = (mp.launch(train, schedule, ranks=2) for schedule in (plain, again))
    for rank in range(2):
        equal = all(map(torch.equal, first[rank][1], second[rank][1]))
        print(f"rank {rank}: gradients equal bit by bit: {equal}")
    print(f"losses: {first[0][0]:.6f} and {second[0][0]:.6f}")
    print(f"updates of BatchNorm for 4 micro-batches: {first[0][2]} and {second[0][2]}")


run_both()

# %% [markdown] name="real-read"
# Less memory, the same loss, the same gradients to the last bit. Dropout dropped the same elements,
# and BatchNorm counted each micro-batch once.
#
# ## BatchNorm sees micro-batches
#
# One difference to training without a pipeline stays, with or without R. BatchNorm normalises each
# micro-batch by that micro-batch's *own* mean and deviation. One process that gets the whole batch
# uses the mean of all rows.

# %% name="norm-whole"
torch.manual_seed(0)
batch = torch.randn(8, 1)
whole, parts = nn.BatchNorm1d(1), nn.BatchNorm1d(1)
by_batch = whole(batch)
by_parts = torch.cat([parts(part) for part in batch.chunk(2)])
print("whole batch:       ", [f"{v:5.2f}" for v in by_batch.flatten().tolist()])
print("2 micro-batches:   ", [f"{v:5.2f}" for v in by_parts.flatten().tolist()])
print("running mean:      ", f"{float(whole.running_mean):.4f} and {float(parts.running_mean):.4f}")
print("updates:           ", int(whole.num_batches_tracked), "and", int(parts.num_batches_tracked))

# %% [markdown] name="learnt"
# The same numbers went in, other ones came out. No schedule can repair that: a micro-batch that
# goes forward can't know the rows of the next one. So compare a pipeline with BatchNorm to one
# process that runs the *same micro-batches*. Layers such as LayerNorm and GroupNorm look at one row
# at a time, and have no such problem.
#
# ## What you learnt
#
# - Autograd saves tensors from F to B. Their bytes grow with the rows; those of the parameters
#   don't.
# - GPipe keeps all m micro-batches on every rank, so a small bubble costs memory.
# - Recompute keeps only the input, and pays with one more forward. Which micro-batches are computed
#   again decides how much room is needed.
# - A second forward needs the same random numbers, and must not update BatchNorm a second time.
# - BatchNorm's statistics are those of a micro-batch, not of the batch.
#
# ## Next
#
# The right half of the first figure kept 3, 2 and 1 micro-batches without computing anything again,
# and took no longer. Lesson 6 writes this order: one forward, one backward.
