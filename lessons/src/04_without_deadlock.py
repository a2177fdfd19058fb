# %% [markdown] name="question"
# ## Why does a correct program hang?
#
# Two ranks want to swap a tensor. Each sends its own and then receives the other's. There is no
# mistake in the lines: what is sent is received, from the right rank, in the right shape.
#
# ### Guess first
#
# How many of the two messages arrive: 0, 1 or 2?

# %% name="swap-guess"
my_guess = ...  # messages

# %% name="swap"
import torch
import torch.distributed as dist

import minipipe as mp


def send_first(rank):
    mine, theirs = torch.full((3,), float(rank)), torch.empty(3)
    dist.send(mine, 1 - rank)
    dist.recv(theirs, 1 - rank)
    print("received", theirs.tolist())


try:
    mp.launch(send_first, ranks=2, timeout=1)
except mp.RankError as error:
    print(error)

# %% name="swap-shown"
from minipipe.teach import reveal

reveal(my_guess, 0, "messages")

# %% [markdown] name="swap-read"
# None. `launch` gave up after one second and asked both ranks where they stood: both in `send`.
#
# `dist.send` is **blocking**: it comes back when the other side has taken the message. Rank 0
# waits until rank 1 receives. Rank 1 would receive, but first it waits until rank 0 receives. Each
# waits for the other, for ever. That is a **deadlock**.
#
# It can be worse. Some libraries put *small* messages into a buffer and come back at once. There
# the same lines work with your little test model, and hang with the large one.

# %% [markdown] name="isend"
# ## Sends that don't wait
#
# `dist.isend` only *starts* to send, and gives you a handle. `handle.wait()` comes back when the
# message is out. Between the two you can do something else, such as receiving:

# %% name="isend-run"
def start_then_receive(rank):
    mine, theirs = torch.full((3,), float(rank)), torch.empty(3)
    handle = dist.isend(mine, 1 - rank)
    dist.recv(theirs, 1 - rank)
    handle.wait()
    print("received", theirs.tolist())


mp.launch(start_then_receive, ranks=2, timeout=30)

# %% [markdown] name="handles"
# Until `wait` has come back, the tensor isn't yours: it is still being read. Rank 0 here sends
# ones, and overwrites them too early. Rank 1 takes a moment before it receives.

# %% name="too-early"
import time


def overwrite_too_early(rank):
    if rank == 0:
        mine = torch.ones(3)
        handle = dist.isend(mine, 1)
        mine.zero_()
        handle.wait()
    else:
        time.sleep(0.3)
        theirs = torch.empty(3)
        dist.recv(theirs, 0)
        print("received", theirs.tolist(), "and not ones")


mp.launch(overwrite_too_early, ranks=2, timeout=30)

# %% [markdown] name="waits"
# ## Who waits for whom
#
# Sends that never wait end one kind of deadlock. But a *table* can be stuck by itself, because an
# action waits for its input:
#
# - `2F5` waits for `1F5`: the activation comes from the stage before.
# - `2B5` waits for `3B5`: the gradient comes from the stage behind.
# - And each action waits until all that stands left of it in its row is done.
#
# Here rank 0 works one micro-batch after the other, and rank 1 wants two forwards first. Each row
# alone looks fine.

# %% name="stuck" picture="04-cycle"
from minipipe.plot.style import picture

stuck = """
0F0 0B0 0F1 0B1
1F0 1F1 1B0 1B1
"""
waits = [("0B0", "1B0"), ("1F1", "0F1")]  # who, for what

figure = picture(3.2, width=9)
axes = figure.add_subplot()
at = {}
for rank, row in enumerate(stuck.split("\n")[1:-1]):
    for place, word in enumerate(row.split()):
        at[word] = place, rank
        colour = {"F": "#9ecae9", "B": "#f5c36b"}[word[1]]
        edge = "#c00000" if word in dict(waits) else "white"
        axes.text(place, rank, word, ha="center", va="center", fontsize=16,
                  bbox={"facecolor": colour, "edgecolor": edge, "linewidth": 3, "pad": 9})
for who, what in waits:
    axes.annotate("", at[what], at[who], arrowprops={
        "arrowstyle": "->", "color": "#c00000", "linewidth": 2, "shrinkA": 26, "shrinkB": 26})
axes.set(xlim=(-0.5, 3.5), ylim=(1.5, -0.5), xticks=range(4), yticks=(0, 1),
         xlabel="place in the row", yticklabels=("rank 0", "rank 1"))
axes.set_title("red frame: stands here; red arrow: waits for", loc="left", fontsize=14)
figure

# %% [markdown] name="stuck-read"
# ![0B0 waits for 1B0 behind 1F1, and 1F1 for 0F1 behind 0B0](figures/04-cycle.png)
#
# Rank 0 stands at `0B0` and waits for `1B0`. That stands *behind* `1F1` in rank 1's row. And `1F1`
# waits for `0F1`, which stands behind `0B0`. The waits form a **cycle**: 0B0 → 1F1 → 0B0. The
# package's checker says it in words, without running anything:

# %% name="checker"
try:
    mp.check(mp.Schedule.parse(stuck))
except mp.ScheduleError as error:
    print(error)

# %% [markdown] name="task-4-1-asked"
# ### Task 4.1: find the cycle
#
# Return the actions that wait for each other, each for the next one and the last for the first,
# such as `["0B0", "1F1"]`; begin with any of them. "Waits for the next" means: what it needs is the
# next one itself, or stands behind it in the same row. Where nobody is stuck, return `[]`.
#
# A rank may hold several stages, so look up in whose row an action stands. And mind that a rank can
# be stuck *behind* a cycle without being part of it.

# %% name="task-4-1" task="4.1"
from minipipe.actions import Action


def find_cycle(rows):
    """The actions that wait for each other in a cycle, as words, or [] where nobody is stuck.

    rows: for each rank its words, such as ["0F0", "0B0"]; complete, and no action waits for a
    later one of its own row.
    """
    ### BEGIN SOLUTION
    rows = [[Action.parse(word) for word in row] for row in rows]
    where = {action: (rank, place)
             for rank, row in enumerate(rows) for place, action in enumerate(row)}  # fmt: skip
    at = [0] * len(rows)

    def waits_for(rank):
        """The rank that this one waits for, or None."""
        action = rows[rank][at[rank]]
        stage = action.stage + (-1 if action.kind == "F" else 1)
        maker = where.get(action._replace(stage=stage))
        return maker[0] if maker and maker[1] >= at[maker[0]] else None

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and waits_for(rank) is None:
                at[rank] += 1
                moved = True
    stuck = [rank for rank, row in enumerate(rows) if at[rank] < len(row)]
    if not stuck:
        return []
    path = [stuck[0]]
    while (following := waits_for(path[-1])) not in path:
        path.append(following)
    return [str(rows[rank][at[rank]]) for rank in path[path.index(following):]]
    ### END SOLUTION

# %% name="try-4-1"
print(find_cycle([row.split() for row in stuck.split("\n")[1:-1]]))

# %% [markdown] name="lowering"
# ## Where the messages go
#
# A table says nothing about messages. It needn't: they follow from it. To write them down is called
# *lowering* the table: each row becomes a program with three kinds of lines.
#
# | line | what happens |
# |---|---|
# | `0F0` | the rank does this action |
# | `send 0F0 to 1` | it starts to send what 0F0 gave to rank 1, and goes on at once (`isend`) |
# | `receive 1B0 from 1` | it waits for what 1B0 gave, which comes from rank 1 |
#
# For one micro-batch on two ranks:
#
# ```
# rank 0:  0F0 · send 0F0 to 1 · receive 1B0 from 1 · 0B0
# rank 1:  receive 0F0 from 0 · 1F0 · 1B0 · send 1B0 to 0
# ```
#
# Rank 0 sends an activation and gets a gradient. Where two stages that follow each other stand on
# the same rank, there is no message.

# %% [markdown] name="guess-messages"
# ### Guess first
#
# 4 ranks with a stage each, 8 micro-batches, forward and backward. How many messages are that in a
# step?

# %% name="guess-messages-typed"
my_guess = ...  # messages

# %% name="guess-messages-shown"
from minipipe.teach import reveal

borders, directions, microbatches = 3, 2, 8
reveal(my_guess, borders * directions * microbatches, "messages")

# %% [markdown] name="task-4-2-asked"
# ### Task 4.2: lower a table
#
# Return the program of each rank, as a list of such lines. You may place sends and receives where
# you like, as long as it works:
#
# - A rank does the actions of its row, in the row's order.
# - Something is received before it is used, and computed before it is sent.
# - From one rank to another messages arrive in the order in which they were sent, and the receives
#   must name them in that order.
# - Nobody waits for ever, and nothing is sent that nobody receives.
#
# In the tables of this task both ranks of a pair go through their micro-batches in the same order.
# What if they don't is the next section's question.

# %% name="task-4-2" task="4.2"
from minipipe.actions import Action


def programs(rows):
    """For each rank the lines of its program: actions, "send 0F0 to 1", "receive 1B0 from 1".

    rows: for each rank its words, such as ["0F0", "0B0"]. A rank may hold several stages.
    """
    ### BEGIN SOLUTION
    rows = [[Action.parse(word) for word in row] for row in rows]
    rank_of = {action.stage: rank for rank, row in enumerate(rows) for action in row}
    result = []
    for rank, row in enumerate(rows):
        lines = []
        for action in row:
            step = 1 if action.kind == "F" else -1
            source, target = (rank_of.get(action.stage + by, rank) for by in (-step, step))
            if source != rank:
                made = action._replace(stage=action.stage - step)
                lines.append(f"receive {made} from {source}")
            lines.append(str(action))
            if target != rank:
                lines.append(f"send {action} to {target}")
        result.append(lines)
    return result
    ### END SOLUTION

# %% name="try-4-2"
two_rows = [["0F0", "0F1", "0B0", "0B1"], ["1F0", "1B0", "1F1", "1B1"]]
for rank, lines in enumerate(programs(two_rows)):
    print(f"rank {rank}:", " · ".join(lines))

# %% [markdown] name="order"
# ## A message has no name
#
# On the wire there is no "1B0". There are numbers, and they arrive in the order in which they
# were sent. The receiver has to know which they are.
#
# In this table rank 1 goes back with the last micro-batch first, rank 0 with the first one first.
# It is legal, and nobody gets stuck:

# %% name="order-table"
mixed = mp.Schedule.parse("""
0F0 0F1 0B0 0B1
1F0 1F1 1B1 1B0
""")
mp.check(mixed)
print("legal")

# %% [markdown] name="order-why"
# Now rank 0 receives "just before it needs it", as its row says: first for `0B0`, then for `0B1`.
# The gradient of micro-batch m is a tensor full of m here, so that one can see which it is.

# %% name="order-run"
def backward_only(rank):
    if rank == 1:
        handles = [dist.isend(torch.full((2,), float(m)), 0) for m in (1, 0)]  # 1B1, then 1B0
        for handle in handles:
            handle.wait()
    else:
        for m in (0, 1):  # for 0B0, then for 0B1
            gradient = torch.empty(2)
            dist.recv(gradient, 1)
            print(f"takes {gradient.tolist()} for the gradient of micro-batch {m}")


mp.launch(backward_only, ranks=2, timeout=30)

# %% [markdown] name="order-read"
# No error, no hang: the shapes are the same, and the training is wrong. (gloo, which sends here,
# also knows *tags* that can tell messages apart. NCCL, which sends between GPUs, has none.)
#
# The rule: **post the receives of an ordered pair of ranks in the order in which the other side
# sends**, and file what comes under its micro-batch until it is needed. That can never hold you up
# longer: what was sent before the message that you need is there before it.

# %% [markdown] name="task-4-3-asked"
# ### Task 4.3: the order of receives
#
# For one ordered pair of ranks: in which order must `target` receive what `source` sends it? Name
# each message by the action that made it.

# %% name="task-4-3" task="4.3"
from minipipe.actions import Action


def receive_order(rows, source, target):
    """The messages from rank `source` to rank `target`, as words such as "1B0", in the order in
    which `target` has to post its receives. rows: for each rank its words."""
    ### BEGIN SOLUTION
    holds = {Action.parse(word).stage for word in rows[target]}
    order = []
    for word in rows[source]:
        action = Action.parse(word)
        user = action.stage + (1 if action.kind == "F" else -1)
        if user in holds:
            order.append(word)
    return order
    ### END SOLUTION

# %% name="try-4-3"
print(receive_order([str(row).split() for row in str(mixed).splitlines()], 1, 0))

# %% [markdown] name="engine"
# The package's `mp.lower` does what you did in 4.2 and 4.3. Its simulator and its engine run the
# same lowered program, so a table that would be stuck is found before any process starts. This
# is the table with mixed orders, by time:

# %% name="engine-figure" picture="04-mixed"
mp.plot.timeline(mp.simulate(mixed), title="Rank 1 goes back last in, first out; rank 0 does not")

# %% [markdown] name="engine-read"
# ![Rank 0 waits until unit 7 for the gradient of micro-batch 0](figures/04-mixed.png)
#
# With the receives in the right order this table trains well. It only takes 11 units, and would
# take 9 if both ranks went back in one order: rank 0 has the gradient of micro-batch 1 early, and
# still waits for the other one.

# %% [markdown] name="zoo"
# ## A zoo of faults
#
# Five small programs, and in each of them one thing is wrong. Some hang, some raise an error, and
# some only compute something else. They are run for real, and the symptom is printed below each.
# Find the cause.
#
# First what they share. `material` makes the stages and a batch of two micro-batches; `receive`
# waits for a tensor; `symptom` runs a program, and compares each rank's gradients with those of
# one process.

# %% name="zoo-shared"
from torch import nn

PIECES, SHAPE = 2, (4, 6)  # micro-batches; rows and width of each
loss_of = nn.functional.mse_loss


def material(count):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(count)]
    return stages, torch.randn(PIECES, *SHAPE), torch.randn(PIECES, *SHAPE)


def receive(source):
    tensor = torch.empty(SHAPE)
    dist.recv(tensor, source)
    return tensor


def symptom(program, ranks, stages):
    try:
        results = mp.launch(program, ranks=ranks, timeout=1.5)
    except mp.RankError as error:
        print(error)
        return
    parts, inputs, targets = material(stages)
    whole = nn.Sequential(*parts)
    loss_of(whole(inputs.flatten(0, 1)), targets.flatten(0, 1)).backward()
    for rank, gradient in enumerate(results):
        right = parts[rank][0].weight.grad
        far = float((gradient - right).abs().max() / right.abs().max())
        print(f"rank {rank}: the gradient is off by {far:.0%} of its largest element")

# %% [markdown] name="zoo-a"
# ### Program A
#
# Three ranks, one micro-batch.

# %% name="zoo-a-run"
def program_a(rank):
    stages, inputs, targets = material(3)
    x, gradient, handles = inputs[0], torch.empty(SHAPE), []
    if rank > 0:
        dist.recv(x, rank - 1)
        x.requires_grad_()
    y = stages[rank](x)
    if rank < 2:
        handles.append(dist.isend(y.detach(), rank + 1))
        dist.recv(gradient, rank + 1)
        y.backward(gradient)
    else:
        loss_of(y, targets[0]).backward()
    if rank > 0:
        handles.append(dist.isend(x.grad, 0))
    for handle in handles:
        handle.wait()
    return stages[rank][0].weight.grad


symptom(program_a, ranks=3, stages=3)

# %% [markdown] name="zoo-b"
# ### Program B
#
# Two ranks, two micro-batches.

# %% name="zoo-b-run"
def program_b(rank):
    stages, inputs, targets = material(2)
    kept, handles = [], []
    for m in range(PIECES):
        if rank == 0:
            kept.append((None, stages[0](inputs[m])))
            handles.append(dist.isend(kept[m][1].detach(), 1))
        else:
            x = receive(0).requires_grad_()
            kept.append((x, loss_of(stages[1](x), targets[m])))
    for m in range(PIECES):
        x, y = kept[m]
        if rank == 0:
            y.backward(receive(1))
        else:
            y.backward()
            handles.append(dist.isend(x.grad, 0))
    for handle in handles:
        handle.wait()
    return stages[rank][0].weight.grad


symptom(program_b, ranks=2, stages=2)

# %% [markdown] name="zoo-c"
# ### Program C
#
# Two ranks, one micro-batch. Rank 1 has something else to do at first.

# %% name="zoo-c-run"
def program_c(rank):
    stages, inputs, targets = material(2)
    x, gradient = torch.empty(SHAPE), torch.empty(SHAPE)
    if rank == 0:
        y = stages[0](inputs[0])
        dist.isend(y.detach(), 1)
        dist.recv(gradient, 1)
        y.backward(gradient)
    else:
        time.sleep(0.3)
        dist.recv(x, 0)
        loss_of(stages[1](x.requires_grad_()), targets[0]).backward()
        dist.isend(x.grad, 0).wait()
    return stages[rank][0].weight.grad


symptom(program_c, ranks=2, stages=2)

# %% [markdown] name="zoo-d"
# ### Program D
#
# One rank that holds both stages, one micro-batch. There is nothing to send: the rank hands the
# tensor over by itself, and does the backward pass of one stage after the other, as if they stood
# on two ranks.

# %% name="zoo-d-run"
def program_d(rank):
    stages, inputs, targets = material(2)
    y = stages[0](inputs[0])
    x = y
    x.retain_grad()
    loss_of(stages[1](x), targets[0]).backward()  # backward of stage 1
    y.backward(x.grad)  # backward of stage 0
    return stages[0][0].weight.grad


symptom(program_d, ranks=1, stages=2)

# %% [markdown] name="zoo-e"
# ### Program E
#
# Two ranks, two micro-batches.

# %% name="zoo-e-run"
def program_e(rank):
    stages, inputs, targets = material(2)
    kept, handles = [], []
    for m in range(PIECES):
        if rank == 0:
            kept.append((None, stages[0](inputs[m])))
            handles.append(dist.isend(kept[m][1].detach(), 1))
        else:
            x = receive(0).requires_grad_()
            kept.append((x, loss_of(stages[1](x), targets[m]) / PIECES))
    for m in range(PIECES):
        if rank == 0:
            x, y = kept[m]
            y.backward(receive(1))
        else:
            x, y = kept.pop()
            y.backward()
            handles.append(dist.isend(x.grad, 0))
    for handle in handles:
        handle.wait()
    return stages[rank][0].weight.grad


symptom(program_e, ranks=2, stages=2)

# %% [markdown] name="task-4-4-asked"
# ### Task 4.4: name them
#
# Which fault does each program have? Write a dictionary `faults` from the letters `"A"` to `"E"` to
# one of these names. Three of the names are not used.
#
# | name | what it means |
# |---|---|
# | `"both send first"` | two ranks are in a blocking send to each other |
# | `"dropped handle"` | nobody keeps the handle of a send, so the message can get lost |
# | `"forgotten detach"` | two stages share one graph, so one backward pass runs through both |
# | `"gradients not cleared"` | gradients of an earlier step are still in there |
# | `"micro-batch left out"` | a micro-batch goes forward, but not back |
# | `"missing 1/M"` | the losses of the micro-batches are added up, not averaged |
# | `"swapped order"` | the two sides do not agree on the order of messages |
# | `"wrong peer"` | a message goes to, or is awaited from, the wrong rank |

# %% name="task-4-4" task="4.4"
# faults = {"A": "…", "B": "…", "C": "…", "D": "…", "E": "…"}
### BEGIN SOLUTION
faults = {
    "A": "wrong peer",
    "B": "missing 1/M",
    "C": "dropped handle",
    "D": "forgotten detach",
    "E": "swapped order",
}
### END SOLUTION

# %% [markdown] name="ring"
# ## Repair one
#
# In a *ring* each rank sends to the next one, and the last to rank 0. You will meet rings again:
# in interleaved schedules, and when gradients are summed over all ranks. Here everybody sends
# first, so it is the deadlock from above with three ranks in the cycle:

# %% name="ring-run"
def stuck_shift(rank, ranks):
    mine = torch.full((3,), float(rank))
    theirs = torch.empty_like(mine)
    dist.send(mine, (rank + 1) % ranks)
    dist.recv(theirs, (rank - 1) % ranks)
    print("received", theirs.tolist())


try:
    mp.launch(stuck_shift, 3, ranks=3, timeout=1)
except mp.RankError as error:
    print(error)

# %% [markdown] name="task-4-5-asked"
# ### Task 4.5: a ring that can't get stuck
#
# Write `shift` so that it works with any number of ranks from two on, odd or even, and for any
# shape. When it returns, the caller may overwrite `mine` at once, without harm to what the next
# rank receives. Use sends and receives only, no collective operation such as `all_gather`.

# %% name="task-4-5" task="4.5"
import torch
import torch.distributed as dist


def shift(mine, rank, ranks):
    """Send `mine` to the next rank of the ring; return what the rank before has sent, a tensor of
    the same shape and type. All ranks call it together."""
    ### BEGIN SOLUTION
    theirs = torch.empty_like(mine)
    handle = dist.isend(mine, (rank + 1) % ranks)
    dist.recv(theirs, (rank - 1) % ranks)
    handle.wait()
    return theirs
    ### END SOLUTION

# %% [markdown] name="learnt"
# ## What you learnt
#
# - A blocking send waits for the receiver. Two ranks that both send first wait for ever.
# - `isend` starts a message and gives a handle. Keep it, wait for it, and leave the tensor alone
#   until then.
# - A table can be stuck by itself: follow who waits for whom, and look for a cycle.
# - Messages follow from the table. Per ordered pair of ranks they arrive in the sender's order, and
#   the receives have to be posted in this order.
# - A hang tells you where each rank stands. A wrong order or a missing 1/M tells you nothing: only
#   a comparison with one process shows it.
#
# ## Next
#
# GPipe runs now, and can't get stuck. But every rank keeps all micro-batches. Lesson 5 looks at
# what is kept, byte by byte, and at how to keep less.
