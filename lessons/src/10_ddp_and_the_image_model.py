# %% [markdown] name="question"
# ## The question
#
# Somebody trains an object detector, Ultralytics' YOLO26, on four GPUs and writes
# `device=[0, 1, 2, 3], batch=64`. What does each GPU do? Not a quarter of the *model*. Each GPU
# runs the **whole** model, on a quarter of the *images*: 64 = 4 × 16. After each backward pass the
# gradients are averaged over the four. That is *data parallelism*, and torch's class for it is
# `DistributedDataParallel`, in short DDP.
#
# There is no stage, no bubble, no schedule. **So when would anybody take a pipeline at all?** At
# the end of this lesson you answer that with numbers.

# %% [markdown] name="shares"
# ## 64 images, four ranks
#
# We take the image model of the race: a small residual network on MNIST. Each of four real
# processes gets the same batch, takes its own 16 images, and lets DDP do the rest.

# %% name="ddp-on-ranks"
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import minipipe as mp
from minipipe import datasets, models

data = datasets.load("mnist", train=1024, test=1)
images, labels = data.train_inputs[:64], data.train_targets[:64]
loss_fn = nn.functional.cross_entropy


def with_ddp(rank, images, labels):
    model = models.build("resnet", data)  # the same weights on every rank
    wrapped = DistributedDataParallel(model)
    mine, theirs = images.chunk(4)[rank], labels.chunk(4)[rank]
    loss = loss_fn(wrapped(mine), theirs)
    loss.backward()
    print(f"my {len(mine)} images have a loss of {loss.item():.4f}")
    return [p.grad for p in model.parameters()]


averaged = mp.launch(with_ddp, images, labels, ranks=4)

model = models.build("resnet", data)
loss = loss_fn(model(images), labels)
loss.backward()
print(f"one process, 64 images: {loss.item():.4f}")
pairs = zip(averaged[3], (p.grad for p in model.parameters()), strict=True)
far = max(float((a - b).abs().max()) for a, b in pairs)
print(f"largest difference from rank 3's gradients: {far:.1e}")

# %% [markdown] name="shares-read"
# Four different losses, whose mean is the loss of all 64 images. But all ranks have one and the
# same gradient, and up to rounding it is the one of a single process with all 64.
#
# It has to be so: a mean over 64 rows is the mean of four means over 16 rows each. You met this in
# lesson 2 with micro-batches. A rank's share is nothing else than a big micro-batch that happens
# to be somewhere else.
#
# ## All-reduce by hand
#
# How did the gradients get averaged? Each rank has a vector, and at the end each rank needs the sum
# of all. This is an *all-reduce*. The obvious way is a *star*: everybody sends to rank 0, rank 0
# adds up and sends the sum back. With n ranks and V bytes, rank 0 sends (n − 1) · V and receives as
# much, while the links of the others are idle most of the time.
#
# A *ring* is better. Cut the vector into n pieces. Each rank talks only to the next one.
#
# 1. *Reduce:* in each of n − 1 steps every rank sends one piece to the right, and adds the piece
#    that comes from the left to its own. After that each rank has **one** piece that is the sum of
#    all ranks.
# 2. *Gather:* in another n − 1 steps these finished pieces go round, and replace what is there.
#
# With 4 ranks and gradients of 40 MB: how many MB does each rank send, in both parts together?

# %% name="guess-ring"
my_guess = ...  # MB

# %% name="reveal-ring"
from minipipe.teach import reveal

n, megabytes = 4, 40
steps = 2 * (n - 1)
piece = megabytes / n
reveal(my_guess, steps * piece, "MB", within=0.5)

# %% [markdown] name="walk"
# 2(n − 1) steps of V/n each. Watch three ranks by hand, before you write it. Each line is one
# rank's three pieces; a number in brackets is complete, the sum of all ranks.
#
# | | rank 0 | rank 1 | rank 2 |
# |---|---|---|---|
# | at the start | 1 2 3 | 10 20 30 | 100 200 300 |
# | rank r sent its piece r | 1 2 **303** | **11** 20 30 | 100 **220** 300 |
# | sent what it has just added to | 1 **(222)** 303 | 11 20 **(333)** | **(111)** 220 300 |
# | gather, first step | **(111)** (222) 303 | 11 **(222)** (333) | (111) 220 **(333)** |
# | gather, second step | (111) (222) **(333)** | **(111)** (222) (333) | (111) **(222)** (333) |
#
# ## Task 10.1: ring all-reduce

# %% name="task-10-1" task="10.1"
import torch
import torch.distributed as dist


def ring_all_reduce(vector):
    """The sum of `vector` over all ranks, by a ring; every rank calls this at the same time.

    vector: one dimension, any length, the same on all ranks; it may be changed. In each of
    2 * (ranks - 1) steps a rank sends one piece of about 1/ranks of the vector with dist.isend,
    to one of its two neighbours. No collective operation. Returns the sum.
    """
    ### BEGIN SOLUTION
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pieces = list(vector.tensor_split(ranks))
    for step in range(2 * (ranks - 1)):
        out, into = pieces[(rank - step) % ranks], pieces[(rank - step - 1) % ranks]
        arriving = torch.empty_like(into)
        sending = dist.isend(out, (rank + 1) % ranks)
        dist.irecv(arriving, (rank - 1) % ranks).wait()
        sending.wait()
        into.copy_(into + arriving if step < ranks - 1 else arriving)
    return torch.cat(pieces)
    ### END SOLUTION

# %% [markdown] name="use-ring-text"
# Your ring at work, with the numbers of the table:

# %% name="use-ring"
def with_ring(rank):
    print(ring_all_reduce(torch.tensor([1.0, 2.0, 3.0]) * 10**rank).tolist())


_ = mp.launch(with_ring, ranks=3)

# %% [markdown] name="ring-figure-text"
# ## What the busiest rank sends
#
# The ring's 2(n − 1)/n is nearly 2, however many ranks there are. The star's rank 0 sends more with
# every further rank.

# %% name="ring-figure" picture="10-ring-and-star"
from minipipe.plot import Picture

figure = Picture(figsize=(9, 4), dpi=100, layout="constrained")
axes = figure.add_subplot()
sizes = range(2, 17)
axes.plot(sizes, [n - 1 for n in sizes], "o-", label="star: rank 0")
axes.plot(sizes, [2 * (n - 1) / n for n in sizes], "s-", label="ring: every rank")
axes.set_xlabel("ranks")
axes.set_ylabel("sent, in sizes of the vector")
axes.set_title("All-reduce: what the busiest rank sends (computed)", loc="left")
axes.legend()
axes.grid(alpha=0.3)
figure

# %% [markdown] name="ring-figure-read"
# ![What the busiest rank sends in a star and in a ring](figures/10-ring-and-star.png)
#
# The price of the ring is *latency*: 2(n − 1) messages one after the other. So with L seconds a
# message and W bytes a second, it takes about 2(n − 1) · (L + V/(nW)). Libraries join many small
# gradients into large *buckets*, so that L counts less often, and begin with the first bucket while
# the backward pass still computes the rest.
#
# ## Task 10.2: a DDP step by hand
#
# You may use `dist.all_reduce` now, but not DDP. Each rank gets its own rows, and there may be more
# of them on one rank than on another: 10 images on 4 ranks are 3, 3, 2 and 2. Then a mean of means
# is not the mean any more. (torch's DDP divides by the number of ranks all the same.)

# %% name="task-10-2" task="10.2"
import torch
import torch.distributed as dist


def ddp_step(model, loss_fn, inputs, targets):
    """One backward pass over the rows of all ranks; every rank calls this at the same time.

    model: the same weights on every rank, no gradients yet. inputs, targets: this rank's rows.
    loss_fn(outputs, targets): a mean over rows. Afterwards each parameter's .grad is the gradient
    of the mean over all ranks' rows, on every rank. Returns that mean loss, a number.
    """
    ### BEGIN SOLUTION
    rows = torch.tensor(float(len(inputs)))
    dist.all_reduce(rows)
    loss = loss_fn(model(inputs), targets) * (len(inputs) / rows.item())
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item()
    ### END SOLUTION

# %% [markdown] name="train-text"
# ## Three ways to train one model
#
# Now the image model trains for 8 steps: on one process, with DDP on four ranks, and with 1F1B on
# four ranks. Same weights, same batches of 64. The lower panel shows how far the losses are apart.

# %% name="train"
def train(rank, way):
    model = models.build("resnet", data)
    if way == "1f1b":
        pipe = mp.Pipeline(model, mp.build("1f1b", ranks=4, microbatches=4), loss_fn)
        parameters, step = pipe.parameters(), lambda x, y: pipe.step(x, y).loss
    else:
        ranks = 4 if way == "ddp" else 1
        run = DistributedDataParallel(model) if way == "ddp" else model
        parameters = model.parameters()

        def step(x, y):
            loss = loss_fn(run(x.chunk(ranks)[rank]), y.chunk(ranks)[rank])
            loss.backward()
            loss = loss.detach()
            torch.distributed.all_reduce(loss)
            return float(loss) / ranks

    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    losses = []
    for x, y in datasets.batches(data, 64, 8):
        optimizer.zero_grad()
        losses.append(step(x, y))
        optimizer.step()
    if rank == 0:
        print(f"{way}: loss {losses[0]:.4f} in the first step, {losses[-1]:.4f} in the last")
    return losses


entries = [{"name": way, "losses": mp.launch(train, way, ranks=ranks)[0]}
           for way, ranks in (("one-process", 1), ("ddp", 4), ("1f1b", 4))]
mp.plot.losses(entries)

# %% [markdown] name="batchnorm-text"
# The three learn the same. The choice between them is about bytes, memory and time, not about what
# is learnt. **With one exception.**
#
# ## BatchNorm sees its own rows only
#
# BatchNorm normalises by the mean and the deviation of the rows that it sees. With DDP it sees a
# rank's 16, in a pipeline a micro-batch's. Let us give a small model a BatchNorm layer, and compare
# three gradients: DDP with 4 × 16 images, one process that does 4 micro-batches of 16, and one
# process with all 64 at once.

# %% name="batchnorm"
def with_batchnorm():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(),
                         nn.Linear(8 * 13 * 13, 10)).double()


def gradient(model, pieces):
    """The gradient of the first layer, from the mean of the pieces' losses; updates counted."""
    for x, y in pieces:
        (loss_fn(model(x.double()), y) / len(pieces)).backward()
    return model[0].weight.grad, int(model[1].num_batches_tracked)


def ddp_batchnorm(rank):
    model = with_batchnorm()
    wrapped = DistributedDataParallel(model)
    loss_fn(wrapped(images.chunk(4)[rank].double()), labels.chunk(4)[rank]).backward()
    print(f"running mean of the first channel: {model[1].running_mean[0]:.5f}")
    return model[0].weight.grad, int(model[1].num_batches_tracked)


ddp, updates = mp.launch(ddp_batchnorm, ranks=4)[0]
print(f"DDP, 4 x 16: {updates} update of the running statistics a step")
for name, number in (("4 micro-batches of 16", 4), ("64 at once", 1)):
    pieces = list(zip(images.chunk(number), labels.chunk(number), strict=True))
    other, updates = gradient(with_batchnorm(), pieces)
    far = (other - ddp).abs().max() / ddp.abs().max()
    print(f"{name}: gradient differs from DDP's by {far:.1e} (relative), {updates} update(s)")

# %% [markdown] name="batchnorm-read"
# DDP and micro-batches agree: the same groups of 16. Both differ from one process with 64, and by
# percents, not by rounding. Look at the running means too: each rank has its own. DDP keeps rank
# 0's, which it copies to all before the next forward pass, so what the other ranks saw is lost. A
# pipeline updates them once a micro-batch, here four times a step.
#
# None of this is a bug, but it is a difference, and it grows as shares get smaller. What can be
# done: `SyncBatchNorm` (DDP only, on GPUs: one more all-reduce in each such layer), or a norm that
# looks at one row at a time, such as GroupNorm. The image model here has GroupNorm, for this very
# reason.
#
# ## Bytes
#
# DDP sends gradients: as many bytes as there are parameters, whatever the batch. A pipeline sends
# what crosses its cuts: activations down, and gradients of the same size up. They grow with the
# batch, whatever the number of parameters.
#
# For our image model with 64 rows on 4 ranks: the parameters have 0.161 MB. At each cut a row is
# 16 × 7 × 7 float32 numbers. How many MB does a rank in the *middle* of the pipeline send in a
# step? (A MB is 10⁶ bytes.)

# %% name="guess-bytes"
my_guess = ...  # MB

# %% name="reveal-bytes"
one_cut = 64 * 16 * 7 * 7 * 4  # bytes
reveal(my_guess, 2 * one_cut / 1e6, "MB", within=0.03)

# %% [markdown] name="task-10-3-asked"
# Activations to the right and gradients to the left: two cuts' worth. DDP's ring sends
# 1.5 · 0.161 = 0.24 MB. So for this model, DDP sends *less*. That depends on the model.
#
# ## Task 10.3: bytes sent and held

# %% name="task-10-3" task="10.3"
import torch


def compare(model, cuts, inputs):
    """What each rank sends in a step and holds, with DDP and in a pipeline; a dictionary.

    model: an nn.Sequential. cuts: the number of layers of each rank's stage. inputs: the whole
    batch. Bytes, by the tensors' own element sizes:
    "ddp_sent": what each rank sends in a ring all-reduce of the gradients; parameters with
    requires_grad=False get none. "ddp_held": all parameters. "pipeline_sent", "pipeline_held":
    the same for a pipeline of len(cuts) ranks, lists with a number for each rank; it sends the
    whole batch's activations to the next rank, and gradients of the same size back.
    """
    ### BEGIN SOLUTION
    def size(tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    ranks = len(cuts)
    gradients = size(p for p in model.parameters() if p.requires_grad)
    stages, first = [], 0
    for layers in cuts:
        stages.append(model[first : first + layers])
        first += layers
    borders = [0]
    with torch.no_grad():
        for stage in stages[:-1]:
            inputs = stage(inputs)
            borders.append(size([inputs]))
    borders.append(0)
    return {
        "ddp_sent": 2 * (ranks - 1) / ranks * gradients,
        "ddp_held": size(model.parameters()),
        "pipeline_sent": [borders[rank] + borders[rank + 1] for rank in range(ranks)],
        "pipeline_held": [size(stage.parameters()) for stage in stages],
    }
    ### END SOLUTION

# %% [markdown] name="three-models-text"
# Three models on four ranks with 64 rows. ResNet-18 is torchvision's, here with pictures of
# 224 × 224 pixels. The last one is eight wide linear layers. They live on torch's device `meta`,
# where tensors have shapes, but no numbers: nothing is computed.

# %% name="three-models"
with torch.device("meta"):
    wide = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)])
print("in MB, the busiest or fullest rank   sent: DDP  pipeline  parameters: DDP  pipeline")
for name, model, cuts, shape in (
    ("image model, 28 x 28 pixels", models.resnet(), [3, 2, 2, 3], (64, 1, 28, 28)),
    ("ResNet-18, 224 x 224 pixels", models.resnet18(1000), [6, 2, 2, 5], (64, 3, 224, 224)),
    ("8 linear layers of 1024", wide, [2, 2, 2, 2], (64, 1024)),
):
    found = compare(model.to("meta"), cuts, torch.empty(shape, device="meta"))
    sent, held = max(found["pipeline_sent"]), max(found["pipeline_held"])
    print(f"{name:36} {found['ddp_sent'] / 1e6:9.2f} {sent / 1e6:9.2f} "
          f"{found['ddp_held'] / 1e6:16.2f} {held / 1e6:9.2f}")

# %% [markdown] name="three-models-read"
# Convolutions use few parameters on large images, so both columns are of one order there. Wide
# linear layers, of which language models are made, are the other way round: the pipeline sends a
# hundredth of what DDP sends. And a pipeline's rank holds only its part of the parameters, of their
# gradients, and of the optimizer's state. (ResNet-18 has most of its parameters in its last
# blocks: of the memory, its fullest rank saves little.)
#
# Activations are kept too. DDP keeps those of 16 rows through the *whole* model. GPipe keeps those
# of all 64 rows through a *quarter* of it: the same. (1F1B keeps less.)
#
# ## Which one, and when?
#
# So here are the rules:
#
# 1. What doesn't fit into a device's memory is out.
# 2. Of what fits, the faster one wins.
#
# DDP's time: compute of its share of the rows, then the ring. (Real DDP hides a part of the ring
# behind the backward pass. We leave that out.) The pipeline's time: simulate its table. `mp.Costs`
# takes the bandwidth and the size of a message too.
#
# ## Task 10.4: choose

# %% name="task-10-4" task="10.4"
import minipipe as mp


def choose(ranks, rows, microbatches, forward, backward, state, activations, gradients, border,
           memory, bandwidth):
    """The faster way that fits: "ddp", "pipeline", or "neither"; of two equally fast ones either.

    A batch has `rows` rows, and one device takes `forward` and `backward` seconds for one row
    through the whole model. state: bytes of all parameters, their gradients, and the optimizer's
    state. activations: bytes that the whole model keeps of one row. memory: bytes of one device.
    bandwidth: bytes a second of each link, without latency.

    DDP: rows / ranks on each rank, then a ring all-reduce of `gradients` bytes.
    Pipeline: GPipe with equal stages, of which each rank holds one, and rows / microbatches in
    each micro-batch; one row is `border` bytes at each cut, in both directions. A rank computes
    while its messages travel, and a link carries one after the other, as mp.simulate has it.
    A rank's part of the state and its activations have to fit into the memory, or fill it exactly.
    """
    ### BEGIN SOLUTION
    kept = activations * rows / ranks  # DDP: of few rows, GPipe: of a part of the layers
    times = {}
    if state + kept <= memory:
        ring = 2 * (ranks - 1) / ranks * gradients / bandwidth
        times["ddp"] = rows / ranks * (forward + backward) + ring
    if state / ranks + kept <= memory:
        table = [[f"{rank}F{m}" for m in range(microbatches)]
                 + [f"{rank}B{m}" for m in range(microbatches)] for rank in range(ranks)]
        each = rows / microbatches  # rows
        costs = mp.Costs(each * forward / ranks, each * backward / ranks, 0,
                         message_size=each * border, bandwidth=bandwidth)
        times["pipeline"] = mp.simulate(mp.Schedule(table), costs).makespan
    return min(times, key=times.get, default="neither")
    ### END SOLUTION

# %% [markdown] name="choose-figure-text"
# ## Fast links, slow links
#
# Two models on four devices, with links from 0.1 to 100 GB/s. Sizes and times are round numbers of
# the right order: a ResNet-18 with 64 images of 224 × 224 pixels (45 MB of gradients, 0.4 MB a row
# at a cut), and a language model with 1.3 billion parameters (5.2 GB of gradients, 8 texts of 2,048
# words with 17 MB each at a cut). Lower is better; the dotted line is compute alone, without bubble
# and without links.

# %% name="choose-figure" picture="10-ddp-or-pipeline"
figure = Picture(figsize=(13, 4.6), dpi=100, layout="constrained")
panels = figure.subplots(1, 2)
cases = {  # rows, seconds forward and backward a row, bytes of gradients, bytes a row at a cut
    "ResNet-18, 64 images": (64, 0.0004, 0.0008, 45e6, 0.4e6),
    "language model, 8 texts": (8, 0.06, 0.12, 5.2e9, 17e6),
}
speeds = [10 ** (step / 8) * 1e8 for step in range(25)]  # bytes a second
for axes, (name, (rows, forward, backward, gradients, border)) in zip(
    panels, cases.items(), strict=True
):
    compute = rows / 4 * (forward + backward)
    ring = [compute + 1.5 * gradients / speed for speed in speeds]
    table = mp.build("gpipe", ranks=4, microbatches=8)
    gpipe = [mp.simulate(table, mp.Costs(rows / 8 * forward / 4, rows / 8 * backward / 4, 0,
                                         message_size=rows / 8 * border, bandwidth=speed)).makespan
             for speed in speeds]
    gigabytes = [speed / 1e9 for speed in speeds]
    axes.plot(gigabytes, [1e3 * t for t in ring], label="DDP")
    axes.plot(gigabytes, [1e3 * t for t in gpipe], label="GPipe, 8 micro-batches")
    axes.axhline(1e3 * compute, color="grey", linestyle=":", label="compute alone")
    axes.set(xscale="log", yscale="log", title=f"{name}, 4 devices (predicted)",
             xlabel="bandwidth of a link (GB/s)", ylabel="time of a step (ms)")
    axes.legend()
    axes.grid(alpha=0.3)
figure

# %% [markdown] name="choose-figure-read"
# ![Predicted time of a step of DDP and GPipe over bandwidth](figures/10-ddp-or-pipeline.png)
#
# On the right of each panel DDP wins: it has no bubble, and its ring is quick. On the left both
# lines are made of sending alone. For the image model the two are never far apart; they cross at
# about 7 GB/s. For the language model they cross at about 57 GB/s, and with links of 1 GB/s (a good
# network between servers) DDP takes 8.2 s where the pipeline takes 0.6 s.
#
# And a model that doesn't fit on one device leaves no choice between these two.

# %% [markdown] name="learnt"
# ## What you learnt
#
# - DDP runs the whole model on every rank with a part of the rows (64 = 4 × 16), and averages
#   gradients. Its step equals one process's step, if uneven shares are weighted by their rows.
# - A ring all-reduce takes 2(n − 1) steps and sends 2(n − 1)/n of the vector on every rank.
# - BatchNorm sees only a rank's or a micro-batch's rows, and that changes what is learnt.
# - DDP sends gradients, whatever the batch; a pipeline sends what crosses its cuts, whatever the
#   number of parameters.
# - If the model fits and links are fast, take DDP. If it doesn't fit, or its parameters are heavy
#   and links slow, cut it.
#
# ## Next
#
# Cut it, but where? So far all stages were equal. Lesson 11 cuts models whose layers are not.
