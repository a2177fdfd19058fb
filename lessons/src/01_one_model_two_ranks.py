# %% [markdown] name="question"
# ## The question
#
# Your model has grown. It no longer fits on one GPU, but you have two, and each has room for
# half of it.
#
# So you cut the model in the middle. The first half lives in one process, the second half in
# another. The two share no memory. All they can do is send each other tensors.
#
# **Can two such processes train the model together, and learn exactly what one process would?**
#
# By the end of this lesson you will have done it, with real processes and without any framework:
# only `send`, `recv` and autograd.

# %% [markdown] name="words"
# Two words that you will meet all the time:
#
# - A **stage** is a group of layers that follow each other. Put the stages one behind the other and
#   you have the whole model again.
# - A **rank** is one of the processes that work together. Ranks have numbers: 0, 1, 2, … On a real
#   cluster each rank has its own GPU. You need none here: our ranks compute on the processor.
#
# ```
#            rank 0                                  rank 1
#            stage 0                                 stage 1
#
#  images ─→ layers 0, 1, 2 ── activation ──send──→  layers 3, 4, 5 ─→ loss
#                           ←──send── gradient ──                    ←─┘
# ```
#
# The output of a layer is called its **activation**. It goes forward over the cut. Its gradient
# comes back.

# %% [markdown] name="model"
# ## A model to cut
#
# Our model reads small pictures of handwritten digits, 8 × 8 pixels each. It is tiny, so that you
# see everything at once. What you build works for a large one, too.
#
# `.double()` makes all numbers 64 bits wide. Then rounding is so small that *equal* can be taken
# seriously.

# %% name="make-model"
import torch
import torch.distributed as dist
from torch import nn

import minipipe as mp


def make_model():
    torch.manual_seed(0)  # the same weights each time, in every process
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 32),
        nn.Tanh(),
        nn.Linear(32, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    ).double()


loss_fn = nn.functional.cross_entropy
digits = mp.datasets.load("digits")
images, labels = digits.train_inputs[:32].double(), digits.train_targets[:32]
print("a batch:", tuple(images.shape), "labels:", labels[:8].tolist(), "…")
for number, layer in enumerate(make_model()):
    print(number, layer)

# %% [markdown] name="task-1-1-asked"
# ## Task 1.1: cut it
#
# An `nn.Sequential` is a list of layers that run one after the other. Cut it into stages.
#
# - No layer may get lost, come twice, or change its place.
# - A stage holds the model's own layers, not copies of them.
# - The stages are as even as possible: their numbers of layers differ by 1 at most. So 5 layers in
#   2 stages are 3 and 2, or 2 and 3.
#
# Run the cell when you are ready. `%%task` saves your answer and tests it.

# %% name="task-1-1" task="1.1"
from itertools import pairwise  # pairwise([0, 3, 6]) gives (0, 3) and (3, 6)

from torch import nn


def cut(model, parts):
    """Cut an nn.Sequential into `parts` stages: a list of nn.Sequential, in the model's order.

    parts is at least 1, and at most the number of layers.
    """
    ### BEGIN SOLUTION
    layers = list(model)
    borders = [len(layers) * part // parts for part in range(parts + 1)]
    return [nn.Sequential(*layers[begin:end]) for begin, end in pairwise(borders)]
    ### END SOLUTION


# %% [markdown] name="same-output"
# Is it still the same model? Run the stages one behind the other and compare with the whole.

# %% name="one-behind-the-other"
model = make_model()
first, second = cut(model, 2)
print(first)
print(second)
print("same output, to the last bit:", torch.equal(second(first(images)), model(images)))

# %% [markdown] name="guess-message-asked"
# ## What goes over the cut?
#
# Only the activation between layer 2 and layer 3. The batch has 32 images, and layer 2 gives 32
# numbers for each of them.
#
# **How many numbers will the message hold?** Type your guess in place of the three dots.

# %% name="guess-message"
my_guess = ...  # numbers

# %% name="reveal-message"
from minipipe.teach import reveal

activation = make_model()[:3](images)
reveal(my_guess, activation.numel(), "numbers")
print("shape of the activation:", tuple(activation.shape))
print("parameters of the model:", sum(p.numel() for p in make_model().parameters()))

# %% [markdown] name="message-small"
# The message is smaller than the model, and it stays so when the model gets more layers. This is
# why pipelines get along with slow connections: the weights never travel.

# %% [markdown] name="ranks"
# ## Two real processes
#
# `mp.launch(function, ranks=2)` starts two processes. Each runs `function(rank)`. What a rank
# prints appears here, with its number in front. What the two return comes back as a list.

# %% name="hello"
import os


def hello(rank):
    print(f"I am rank {rank} of {dist.get_world_size()}, process {os.getpid()}")
    return rank * 100


print("this notebook is process", os.getpid())
print("returned:", mp.launch(hello, ranks=2))

# %% [markdown] name="send-recv"
# Three different process numbers: three programs, none of which can see another's variables.
#
# They talk with two functions of `torch.distributed`:
#
# - `dist.send(tensor, rank)` sends a tensor's numbers to another rank.
# - `dist.recv(buffer, rank)` waits until numbers come from that rank, and writes them into
#   `buffer`, a tensor that you have made before.
#
# A message is bare numbers. It says nothing about their shape or type. So **the receiver must know
# both beforehand**, and make a buffer that fits.

# %% name="first-message"
def first_message(rank):
    if rank == 0:
        dist.send(torch.tensor([1.0, 2.0, 3.0]), 1)
        print("sent")
    else:
        buffer = torch.empty(3)
        print("the buffer before: 3 places, with whatever lay in memory")
        dist.recv(buffer, 0)
        print("the buffer after: ", buffer.tolist())


nothing = mp.launch(first_message, ranks=2)

# %% [markdown] name="task-1-2-asked"
# ## Task 1.2: forward over the cut
#
# Now let an activation travel. Both ranks call the same function. An `if` on the rank tells them
# apart, as above.
#
# - Rank 0 runs its stage on the inputs, sends the result to rank 1, and returns it.
# - Rank 1 receives the activation, runs its own stage on it, and returns that.
#
# Rank 1 is told the `shape` of the activation. All tensors here are `torch.float64`, and the
# buffer must be so, too.

# %% name="task-1-2" task="1.2"
import torch
import torch.distributed as dist


def forward_over_the_cut(rank, stage, inputs, shape):
    """Forward pass over two ranks; returns what this rank's stage gave.

    stage: this rank's part of the model. inputs: the batch on rank 0, None on rank 1.
    shape: of the activation that goes from rank 0 to rank 1, in torch.float64.
    """
    ### BEGIN SOLUTION
    if rank == 0:
        outputs = stage(inputs)
        dist.send(outputs.detach(), 1)
        return outputs
    activation = torch.empty(shape, dtype=torch.float64)
    dist.recv(activation, 0)
    return stage(activation)
    ### END SOLUTION


# %% [markdown] name="forward-seen"
# Two processes, each with half of the layers, against one process with all of them:


# %% name="forward-real"
def forward(rank):
    stage = cut(make_model(), 2)[rank]
    print(f"I hold {len(stage)} layers, {sum(p.numel() for p in stage.parameters())} parameters")
    outputs = forward_over_the_cut(rank, stage, images if rank == 0 else None, (32, 32))
    return outputs.detach()


two_ranks = mp.launch(forward, ranks=2)[1]
print("largest difference:", (two_ranks - make_model()(images)).abs().max().item())

# %% [markdown] name="graph-ends"
# ## The graph ends at the cut
#
# Forward is the easy half. To learn we need gradients, and there autograd meets a wall.
#
# Autograd remembers how each tensor was made, and `loss.backward()` walks this memory, the *graph*,
# back to the weights. But only numbers crossed the cut. On rank 1 the graph begins at the received
# activation. On rank 0 it ends at the sent one. Nobody can walk from one to the other.
#
# So we help, with the chain rule. Watch it with a single number, in one process. `detach()` does
# to a tensor what a message does: the numbers stay, the memory is gone.

# %% name="tiny-cut"
a = torch.tensor(2.0, requires_grad=True)
y = 3 * a  # "stage 0"

z = y.detach()  # "the message": the same number without a history
z.requires_grad_()  # from now on autograd keeps track of what is done with z

loss = z**2  # "stage 1"
loss.backward()
print("z.grad =", z.grad.item(), " and a.grad =", a.grad)

# %% [markdown] name="guess-chain-asked"
# The backward pass ran from the loss to `z`, and there it stopped: d loss / d z = 2 z = 12. Since
# `z` asked for a gradient, it has one. `a` got nothing.
#
# Now the second half: `y.backward(gradient)` starts the backward pass in the middle. It says: *take
# this as the gradient for* `y`, *and go on from there.*
#
# **What will** `a.grad` **be after** `y.backward(z.grad)`**?** (y was 3 a.)

# %% name="guess-chain"
my_guess = ...

# %% name="reveal-chain"
y.backward(z.grad)
reveal(my_guess, a.grad.item())

# %% [markdown] name="chain-seen"
# Without a cut the loss is (3 a)² = 9 a², its derivative 18 a, and with a = 2 that is 36. The cut
# has changed nothing.
#
# That is the whole trick. Two things to remember:
#
# - **The receiver** makes the activation ask for a gradient *before* it runs its stage. Afterwards
#   the gradient stands in `activation.grad`.
# - **The sender** keeps its output, and later calls `output.backward(gradient)` with what comes
#   back. The gradient has the same shape as the output.

# %% [markdown] name="task-1-3-asked"
# ## Task 1.3: backward over the cut
#
# The activation has just been sent, and it has arrived. Go on from there on both ranks.
#
# - **Rank 1** has the plain numbers in `activation`. It computes the loss, runs the backward pass
#   through its stage, sends the gradient of the activation back to rank 0, and returns the loss as
#   a plain number (`loss.item()`).
# - **Rank 0** has the output of its stage in `activation`, with its graph. It waits for the
#   gradient, finishes the backward pass, and returns None.

# %% name="task-1-3" task="1.3"
import torch
import torch.distributed as dist


def backward_over_the_cut(rank, stage, activation, targets, loss_fn):
    """Finish a step after the activation was sent: gradients in .grad of both stages' parameters.

    activation: on rank 0 the output of its stage, on rank 1 the same numbers as they arrived.
    targets: on rank 1; None on rank 0. loss_fn(outputs, targets) gives the loss.
    Returns the loss on rank 1, as a float, and None on rank 0.
    """
    ### BEGIN SOLUTION
    if rank == 0:
        gradient = torch.empty_like(activation)
        dist.recv(gradient, 1)
        activation.backward(gradient)
        return None
    activation.requires_grad_()
    loss = loss_fn(stage(activation), targets)
    loss.backward()
    dist.send(activation.grad, 0)
    return loss.item()
    ### END SOLUTION


# %% [markdown] name="step"
# ## A training step
#
# You have all the pieces. A training step over two ranks is this:
#
# ```
# rank 0:  forget old gradients · forward · send ·  wait …                      · backward · update
# rank 1:  forget old gradients ·  wait …        · forward · backward · send    ·            update
# ```
#
# Each rank has an optimizer for its own parameters, and updates only those. No weight and no
# weight's gradient ever leaves its rank.
#
# ## Task 1.4: the whole step
#
# One function again, called by both ranks. Leave the new gradients in `.grad` when you are done, so
# that one can look at them.

# %% name="task-1-4" task="1.4"
import torch
import torch.distributed as dist


def training_step(rank, stage, optimizer, inputs, targets, shape, loss_fn):
    """One training step over two ranks; returns the loss, a float, on rank 1 and None on rank 0.

    Forgets the old gradients first, then forward, backward and the optimizer's step.
    stage, optimizer: this rank's own. inputs: on rank 0, else None. targets: on rank 1, else None.
    shape: of the activation that goes from rank 0 to rank 1, in torch.float64.
    """
    ### BEGIN SOLUTION
    optimizer.zero_grad()
    loss = None
    if rank == 0:
        outputs = stage(inputs)
        dist.send(outputs.detach(), 1)
        gradient = torch.empty(shape, dtype=torch.float64)
        dist.recv(gradient, 1)
        outputs.backward(gradient)
    else:
        activation = torch.empty(shape, dtype=torch.float64)
        dist.recv(activation, 0)
        activation.requires_grad_()
        loss = loss_fn(stage(activation), targets)
        loss.backward()
        dist.send(activation.grad, 0)
    optimizer.step()
    return None if loss is None else loss.item()
    ### END SOLUTION


# %% [markdown] name="train"
# ## Train for real
#
# 60 steps on the digits, with your function, on two processes. `mp.datasets.batches` gives every
# rank the same batches. Rank 0 takes the images, rank 1 the labels.


# %% name="train-two-ranks"
def batches():
    return mp.datasets.batches(digits, batch=64, steps=60, seed=1)


def make_optimizer(part):
    return torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9)


def train_one_process():
    model, losses = make_model(), []
    optimizer = make_optimizer(model)
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_fn(model(x.double()), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train(rank):
    stage, losses = cut(make_model(), 2)[rank], []
    optimizer = make_optimizer(stage)
    for step, (x, y) in enumerate(batches()):
        x, y = (x.double(), None) if rank == 0 else (None, y)
        loss = training_step(rank, stage, optimizer, x, y, (64, 32), loss_fn)
        if rank == 1:
            losses.append(loss)
            if step % 15 == 0:
                print(f"step {step}: loss {loss:.3f}")
    return losses


one, two = train_one_process(), mp.launch(train, ranks=2)[1]
print("largest difference of a loss:", max(abs(a - b) for a, b in zip(one, two, strict=True)))
mp.plot.losses([{"name": "one-process", "losses": one}, {"name": "two ranks", "losses": two}])

# %% [markdown] name="train-seen"
# Above: the two curves lie on each other. Below: how far apart they are. That is rounding at most,
# and often exactly 0: every layer does the same arithmetic as before, only in another process.
#
# So the answer to the question is *yes*. Cutting a model over ranks does not change what it learns.

# %% [markdown] name="guess-idle-asked"
# ## And how fast is it?
#
# Look again at the two lines of a training step. While rank 0 computes, rank 1 has nothing to do,
# and the other way round. Say that a forward through a stage takes 1 unit of time, a backward 2,
# and a message nothing.
#
# **How much of the time is a rank idle, in percent?**

# %% name="guess-idle"
my_guess = ...  # percent

# %% [markdown] name="rows"
# We write down what each rank does, in its order, one row a rank: `0F0` is stage **0**,
# **F**orward, batch number **0**, and `1B0` is stage **1**, **B**ackward, batch **0**. From these
# rows `mp.simulate` computes when everything happens.

# %% name="reveal-idle"
step = mp.Schedule.parse("""
0F0 0B0
1F0 1B0
""")
t = mp.simulate(step, mp.Costs(latency=0))
reveal(my_guess, 100 * float(t.bubble.idle_over_total), "%", within=1)

# %% name="idle-figure" picture="01-two-ranks"
mp.plot.timeline(t, "One training step on two ranks")

# %% [markdown] name="idle-seen"
# ![A step on two ranks, predicted: each computes half of the time](figures/01-two-ranks.png)
#
# The hatched time is idle time: half of all. Two GPUs, and no faster than one: now there is room
# for the model, but half of the machine is wasted.

# %% [markdown] name="end"
# ## What you learnt
#
# - A model is cut by depth into **stages**, one for each **rank**. No layer is lost or copied.
# - Over the cut go an activation forward and its gradient back. Weights stay where they are. The
#   receiver has to know shape and type.
# - A message carries numbers and no graph. The receiver makes the activation ask for a gradient;
#   the sender goes on with `output.backward(gradient)`.
# - The result is that of one process, up to rounding.
# - With one batch at a time only one rank is busy.
#
# ## Next
#
# Lesson 2 gets the ranks to work at the same time: it cuts the batch as well.
