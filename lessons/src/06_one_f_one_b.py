# %% [markdown] name="question"
# ## Must we choose?
#
# With GPipe we had to choose. Many micro-batches make the bubble small, but every rank keeps them
# all. Few micro-batches need little memory, but the ranks are idle for long.
#
# Recompute helps, and costs time. Is there an order of the *same* actions that needs less memory
# and no more time?
#
# %% [markdown] name="two-orders"
# ## Two orders
#
# Here are two tables with the same actions. The first one is GPipe. The second one goes backward as
# soon as it can.

# %% name="tables"
import minipipe as mp

gpipe = mp.Schedule.parse("""
0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3
1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3
""", name="gpipe")
early = mp.Schedule.parse("""
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
""", name="early backward")

# %% [markdown] name="bubble-asked"
# GPipe's bubble is (p − 1)/(m + p − 1) = 1/5 here, with p = 2 ranks and m = 4 micro-batches: 20 %.
# What is the bubble of the other table? A forward takes 1, a backward 2. Guess before you run.

# %% name="bubble-guess"
my_guess = ...  # percent

# %% name="bubble-reveal"
from minipipe.teach import reveal

t_gpipe, t_early = mp.simulate(gpipe), mp.simulate(early)
reveal(my_guess, 100 * float(t_early.bubble.idle_over_total), "%", within=1)

# %% name="bubble-figure"
from minipipe.teach import side_by_side

side_by_side(mp.plot.timeline(t_gpipe), mp.plot.timeline(t_early))

# %% [markdown] name="bubble-read"
# The bubble is the same, 20 %. Both steps take 15. The idle time has only moved: GPipe's rank 0
# waits once for 3, in the other table it waits for 2 and then for 1.
#
# But on rank 1 a micro-batch goes forward and comes back *at once*. Rank 1 never keeps more than
# one.
#
# ## How many forwards first?
#
# The last rank can go backward right after its forward. An earlier rank can't. It has to wait until
# micro-batch 0 has gone down to the last rank and its gradient has come back. While it waits, it
# starts other micro-batches, one for each stage that micro-batch 0 visits on its way down.
#
# Take 4 ranks. How many forwards does rank 1 do before its first backward, micro-batch 0 included?

# %% name="warm-up-guess"
my_guess = ...  # forwards

# %% name="warm-up-reveal"
reveal(my_guess, len([1, 2, 3]), "forwards, one each for the stages 1, 2 and 3")

# %% [markdown] name="phases"
# ## Three phases
#
# The order is called **1F1B**: *one forward, one backward*. PipeDream made it known in 2018. A row
# has three phases. In the table above, rank 0 does
#
# | warm-up | steady state | cool-down |
# |---|---|---|
# | `0F0` | `0F1 0B0` `0F2 0B1` `0F3 0B2` | `0B3` |
#
# - **Warm-up**: forwards only. The pipeline fills.
# - **Steady state**: a forward, a backward, a forward, a backward. Each new micro-batch takes the
#   memory that the one before has given back.
# - **Cool-down**: backwards only. The pipeline drains.
#
# The first pair of the steady state begins with a forward. So that forward is not part of the
# warm-up, and the last rank has no warm-up at all.
#
# ## Task 6.1: the rows of 1F1B
#
# Write the rows for any number of ranks and micro-batches. Rank r holds stage r. Mind the case with
# fewer micro-batches than ranks: a rank can't warm up with more than there are.

# %% name="task-6-1" task="6.1"
def one_f_one_b(ranks, microbatches):
    """The rows of 1F1B: lists of actions such as "0F0", one list a rank."""
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        warm_up = min(microbatches, ranks - 1 - rank)
        row = [f"{rank}F{m}" for m in range(warm_up)]
        for m in range(microbatches):
            if warm_up + m < microbatches:
                row.append(f"{rank}F{warm_up + m}")
            row.append(f"{rank}B{m}")
        rows.append(row)
    return rows
    ### END SOLUTION


# %% [markdown] name="timeline-asked"
# Draw your rows. Find the three phases of each rank.

# %% name="timeline" picture="06-timeline"
mp.plot.timeline(mp.simulate(mp.Schedule(one_f_one_b(4, 8), name="1f1b")))

# %% [markdown] name="timeline-read"
# ![1F1B with 4 ranks and 8 micro-batches](figures/06-timeline.png)
#
# ## Same bubble, less memory
#
# Now GPipe beside it, with 4 ranks and 8 micro-batches. GPipe keeps 8 micro-batches on each rank.

# %% name="memory" picture="06-memory"
mp.plot.memory(mp.simulate(mp.build("gpipe", ranks=4, microbatches=8)),
               mp.simulate(mp.Schedule(one_f_one_b(4, 8), name="1f1b")))  # fmt: skip

# %% [markdown] name="memory-read"
# ![GPipe keeps 8 on each rank, 1F1B 4, 3, 2 and 1](figures/06-memory.png)
#
# 1F1B keeps 4, 3, 2 and 1. Rank r of p keeps **min(m, p − r)**: the forwards before its first
# backward, and never more. Both take 33 units.
#
# Now use 100 micro-batches in place of 8. How many does rank 0 of 4 keep at most with 1F1B?

# %% name="hundred-guess"
my_guess = ...  # micro-batches

# %% name="hundred-reveal"
reveal(my_guess, min(100, 4 - 0), "micro-batches (with GPipe: 100)")

# %% [markdown] name="many-asked"
# So the choice at the top is gone. The number of micro-batches makes the bubble small, and the
# memory doesn't notice:

# %% name="many"
def show_many():
    print("micro-batches   bubble   GPipe keeps   1F1B keeps")
    for m in (4, 8, 16, 32, 64):
        t = mp.simulate(mp.Schedule(one_f_one_b(4, m)))
        bubble, kept = float(t.bubble.idle_over_total), max(t.peak_activations)
        print(f"{m:13}   {bubble:6.1%}   {m:11}   {kept:10}")


show_many()

# %% [markdown] name="real-asked"
# ## On real ranks
#
# Four real processes now train one step with GPipe and one with 1F1B. Each stage is a `Linear` with
# a `Tanh` (the last one only a `Linear`), so each keeps two tensors of 32 × 256 numbers for each
# micro-batch: 65,536 bytes.
#
# Four processes on two processor cores can't show a pipeline's speed. So the devices are
# *emulated*: an action does its real work, then its rank sleeps until the action's time is over,
# here 20 ms for a forward and 40 ms for a backward. The bytes are not emulated. They are what
# autograd really kept.

# %% name="real"
import torch
from torch import nn

from minipipe.emulation import measure_latency


def squared_error(outputs, targets):
    return ((outputs - targets) ** 2).mean()


def train(rank, schedules):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3)],
                          nn.Linear(256, 256))  # fmt: skip
    x, y = torch.randn(2, 8 * 32, 256)
    slots = {"forward": 0.02, "backward_input": 0.02, "backward_weight": 0.02}
    latency, results = measure_latency(), []
    for schedule in schedules:
        pipe = mp.Pipeline(model, schedule, squared_error, cuts=[1, 1, 1, 1])
        pipe.step(x, y)  # the first step is slower: connections are made
        pace = mp.Pace(mp.Costs(**slots))
        step = pipe.step(x, y, pace=pace)
        print(f"{schedule.name}: kept at most {step.peak_activation_bytes:,} bytes", flush=True)
        predicted = mp.simulate(schedule, mp.Costs(**slots, latency=latency))
        results.append((schedule.name, predicted, step.timeline, pace.overruns))
    return results


def run_both():
    schedules = [mp.build(name, ranks=4, microbatches=8) for name in ("gpipe", "1f1b")]
    everyone = mp.launch(train, schedules, ranks=4)
    for name, predicted, emulated, _ in everyone[0]:
        print(f"{name:5}: bubble (idle / total) predicted "
              f"{float(predicted.bubble.idle_over_total):.1%}, on emulated devices "
              f"{float(emulated.bubble.idle_over_total):.1%}")  # fmt: skip
        print(f"       kept, in units of 65,536 bytes: "
              f"{[peak / 65536 for peak in emulated.peak_activations]}")  # fmt: skip
    late = sum(overruns for results in everyone for *_, overruns in results)
    print(f"actions that took longer than their slot: {late} of 128"
          + "; this computer is busy, run the cell again" * (late > 1))  # fmt: skip
    return [emulated for _, _, emulated, _ in everyone[0]]


mp.plot.memory(*run_both())

# %% [markdown] name="real-read"
# GPipe keeps exactly 8 times 65,536 bytes on each rank, 1F1B 4, 3, 2 and 1 times. On rank 0 that is
# 8 : 4, on rank 3 it is 8 : 1.
#
# If no action overran its slot, the bubbles are nearly equal, and near what was predicted. (On a
# busy computer ranks wake up late, and messages are slow. Then only the bytes mean something.)
#
# Look closely at the two predictions: both are above 27.3 %, and 1F1B's is the larger one. They
# know how long a message takes, which was measured before the step. In 1F1B's steady state
# neighbours wait for each other's messages again and again. GPipe waits for one only when the
# pipeline fills and when it turns round.
# %% [markdown] name="stepped-asked"
# ## Step through the run
#
# The step with 1F1B once more, recorded, and now action by action: the buttons go forward and back.
# For each rank you see what it runs or what it waits for, and which micro-batches it holds; below,
# which messages are under way. Find the moment at which rank 0 goes backward for the first time.
# What does it hold then? And who waited for whom just before?
# %% name="stepped"
from minipipe.teach import Stepper


def run_one():
    everyone = mp.launch(train, [mp.build("1f1b", ranks=4, microbatches=8)], ranks=4)
    return everyone[0][0][2]


Stepper(run_one())
# %% [markdown] name="uneven"
# ## Stages are not equal
#
# So far each micro-batch counted 1 on each rank. In real networks the early layers often keep more
# than the late ones: images shrink from layer to layer. And with 1F1B the early ranks keep more
# micro-batches too. Both together decide whether the model fits.
#
# ## Task 6.2: peak bytes of any table
#
# Write `peak_bytes(rows, sizes)`: the most bytes that each rank keeps at once.
#
# - `rows` is any legal table with F and B: a list of lists such as `[["0F0", "0B0"], …]`.
# - One micro-batch of stage s takes `sizes[s]` bytes from its F to its B.
# - A rank may hold several stages. Don't take the rank's number for the stage's: read the action.
#   `Action.parse("2F5")` has `.stage`, `.kind` and `.microbatch`.
#
# Count. A formula for 1F1B is not enough.

# %% name="task-6-2" task="6.2"
from minipipe.actions import Action


def peak_bytes(rows, sizes):
    """The most bytes that each rank keeps at once, a list with one number a rank.

    A micro-batch of stage s takes sizes[s] bytes from its F to its B.
    """
    ### BEGIN SOLUTION
    peaks = []
    for row in rows:
        kept, peak = 0, 0
        for action in map(Action.parse, row):
            kept += sizes[action.stage] * (1 if action.kind == "F" else -1)
            peak = max(peak, kept)
        peaks.append(peak)
    return peaks
    ### END SOLUTION


# %% [markdown] name="bytes-asked"
# Now hold your count against real ranks. The network below gets narrower from stage to stage.
# First a step with a single micro-batch shows what each stage keeps of it. From that you predict
# the whole table's bytes. Then the table runs.

# %% name="bytes"
def narrow(rank, schedule, rows):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in ((512, 512), (512, 128),
              (128, 64), (64, 10))]  # fmt: skip
    pipe = mp.Pipeline(nn.Sequential(*layers), schedule, squared_error, cuts=[1, 1, 1, 1])
    step = pipe.step(torch.randn(rows, 512), torch.randn(rows, 10))
    return list(step.timeline.peak_activations)


def compare_bytes():
    one = mp.Schedule([[f"{stage}F0", f"{stage}B0"] for stage in range(4)])
    sizes = mp.launch(narrow, one, 16, ranks=4)[0]
    rows = [list(map(str, row)) for row in one_f_one_b(4, 8)]
    print("a micro-batch of each stage:", sizes)
    print("1F1B, counted from rows:    ", peak_bytes(rows, sizes))
    print("1F1B, measured:             ", mp.launch(narrow, mp.Schedule(rows), 128, ranks=4)[0])


compare_bytes()

# %% [markdown] name="bytes-read"
# Equal, to the byte. And very uneven: rank 0 keeps four micro-batches of the largest stage. If it
# doesn't fit there, the free memory of the last rank is of no use. Lesson 11 is about better cuts.
#
# ## Which limit do you have?
#
# 1F1B asks for p − r micro-batches on rank r. Perhaps there is only room for 3. Or there is plenty
# of room. Is there one rule that gives the rows for *any* room?
#
# Yes, and it is short. Let a clock run. Whenever a rank is free:
#
# 1. If a gradient is there for its next backward, it goes **backward**.
# 2. Else, if the input of its next forward is there *and it has room*, it goes **forward**.
# 3. Else it waits.
#
# ## Task 6.3: the clock writes the rows
#
# `rows_within(limits, microbatches)` makes the rows for `len(limits)` ranks. Rank r may have at
# most `limits[r]` micro-batches between F and B. A forward takes 1, a backward 2, a message
# nothing.
#
# The clock is there. You write what a free rank does. Micro-batches go in order, 0, 1, 2, …, in
# both directions. (You may also write all of it in your own way. What counts is the rows.)

# %% name="task-6-3" task="6.3"
import math


def rows_within(limits, microbatches):
    """Rows for len(limits) ranks, lists of actions such as "0F0", written by a clock.

    Rank r never has more than limits[r] micro-batches between F and B, and is not idle without
    need. F takes 1, B takes 2.
    """
    ranks = len(limits)
    rows = [[] for _ in limits]
    free = [0] * ranks  # when each rank has finished what it does now
    forwards, backwards = [0] * ranks, [0] * ranks  # how many of each a rank has begun
    ends = {}  # "0F0" -> when it ends

    def is_over(action, now):
        return ends.get(action, math.inf) <= now

    for now in range(3 * ranks * microbatches):
        for rank in range(ranks):
            if free[rank] > now:
                continue
            # Begin an action: add it to the rank's row, note its end in `ends` and in `free`,
            # count it in `forwards` or `backwards`. Or begin none.
            ### BEGIN SOLUTION
            f, b = forwards[rank], backwards[rank]
            source = f"{rank}F{b}" if rank == ranks - 1 else f"{rank + 1}B{b}"
            has_input = rank == 0 or is_over(f"{rank - 1}F{f}", now)
            if is_over(source, now):
                action, time = f"{rank}B{b}", 2
                backwards[rank] += 1
            elif f < microbatches and f - b < limits[rank] and has_input:
                action, time = f"{rank}F{f}", 1
                forwards[rank] += 1
            else:
                continue
            rows[rank].append(action)
            free[rank] = ends[action] = now + time
            ### END SOLUTION
    return rows


# %% [markdown] name="limits-asked"
# With 4 ranks and 8 micro-batches, what do other limits give?

# %% name="limits"
def show_limits():
    for limits in ([8, 8, 8, 8], [4, 3, 2, 1], [3, 3, 3, 3], [2, 2, 2, 2], [1, 1, 1, 1]):
        t = mp.simulate(mp.Schedule(rows_within(limits, 8)))
        print(f"limits {limits}: takes {t.makespan}, bubble "
              f"{float(t.bubble.idle_over_total):5.1%}, keeps {list(t.peak_activations)}")
    same = mp.Schedule(rows_within([4, 3, 2, 1], 8)) == mp.Schedule(one_f_one_b(4, 8))
    print("limits [4, 3, 2, 1] give the rows of 1F1B:", same)


show_limits()

# %% [markdown] name="limits-read"
# - With limits of p − r the clock writes **1F1B**, action for action. So 1F1B is what you get if
#   you go backward whenever you can and keep no more than you need.
# - More room than that does not make the step faster. 33 is the least that any order can reach.
# - Less room costs time: 39 units with room for 3, 51 with room for 2. These too are the least that
#   is possible in that room.
# - With room for 1 only one rank is busy at a time. That is the naive schedule of lesson 3.

# %% name="limits-figure" picture="06-limits"
def draw_limits():
    tables = [mp.Schedule(rows_within([k] * 4, 8), name=f"room for {k}") for k in (4, 3, 2, 1)]
    return mp.plot.overview([mp.simulate(table) for table in tables],
                            title="Less room, more time: 4 ranks, 8 micro-batches")  # fmt: skip


draw_limits()

# %% [markdown] name="limits-seen"
# ![Four timelines: room for 4, 3, 2 and 1](figures/06-limits.png)
#
# The black line is a bound for any amount of room. With less room it can't be reached.
#
# Move the slider through the same tables, one at a time.

# %% name="limits-slider"
from minipipe.teach import sliders


def slide():
    figures = {k: mp.plot.timeline(mp.simulate(mp.Schedule(rows_within([k] * 4, 8))))
               for k in (1, 2, 3, 4)}  # fmt: skip
    sliders(lambda room: figures[room], room=(1, 4, 4))


slide()

# %% [markdown] name="learnt"
# ## What you learnt
#
# - 1F1B has a warm-up, a steady state of one forward and one backward, and a cool-down.
# - Its bubble is GPipe's. Rank r keeps min(m, p − r) micro-batches, however many there are.
# - So memory no longer stops you from using many micro-batches, and those make the bubble small.
# - Bytes are micro-batches times what a stage keeps. The first ranks are hit twice.
# - Memory and time can be traded: with less room than p − r the step takes longer.
#
# ## Next
#
# More micro-batches are not always possible: the batch has only so many rows. Lesson 7 makes the
# bubble itself smaller. Each rank gets several small stages, and the pipeline fills in less time.
