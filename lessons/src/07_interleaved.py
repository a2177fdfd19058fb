# %% [markdown] name="question"
# ## The question
#
# 1F1B with 4 ranks and 8 micro-batches idles for 27 % of the time, as GPipe does. More
# micro-batches would shrink that bubble. But a batch has only so many rows, and a micro-batch of
# two rows wastes a device.
#
# **Can the same ranks idle less with the same micro-batches?** They can, and the idea is simple.
# The price is paid in messages and memory. In this lesson you write the schedule, count its price,
# and find out on which links it pays.
#
# What you write: where the stages go (7.1), the rows (7.2), the messages counted (7.3), the
# latency at which the gain is gone (7.4).
# %% [markdown] name="where-it-comes-from"
# ## Where the bubble comes from
#
# The last rank waits while the first micro-batch goes through all stages before its own. In lesson
# 6 these were *p* − 1 forwards, each as long as a rank's **whole share** of the model. At the end
# the first rank waits for *p* − 1 backwards, of whole shares too. So
#
# bubble time = (*p* − 1)(F + B)
#
# for *p* ranks, with F and B the times of a forward and a backward of one rank's share. The pieces
# are large, and so is the wait for them. What if they were smaller?
# %% [markdown] name="smaller-pieces"
# ## Smaller pieces, dealt like cards
#
# Cut the model into twice as many stages as there are ranks, and deal them round the table: first
# each rank gets one stage, then each gets a second one. Each stage is half as long. The stages of
# one rank are called its **chunks**.
#
# | | rank 0 | rank 1 | rank 2 | rank 3 |
# |---|---|---|---|---|
# | chunk 0 | stage 0 | stage 1 | stage 2 | stage 3 |
# | chunk 1 | stage 4 | stage 5 | stage 6 | stage 7 |
#
# A micro-batch now goes round the ranks twice: it makes two **loops**. From rank 3 it jumps back
# to rank 0, where stage 4 is. Rank 3 gets its first work after three *short* forwards.
#
# Neighbours on one rank would not help: with stages 0 and 1 on rank 0, rank 3 would wait as long
# as before.
# %% [markdown] name="task-7-1-asked"
# ## Task 7.1: which stage is where
#
# Write both directions for any number of ranks and chunks.
# %% name="task-7-1" task="7.1"
def stages_of(rank, ranks, chunks):
    """The stages that a rank holds, ascending, as a list: one a chunk, dealt round the ranks."""
    ### BEGIN SOLUTION
    return [chunk * ranks + rank for chunk in range(chunks)]
    ### END SOLUTION


def rank_of(stage, ranks):
    """The rank that holds a stage."""
    ### BEGIN SOLUTION
    return stage % ranks
    ### END SOLUTION


# %% [markdown] name="two-ranks"
# ## Two ranks first
#
# Here are both schedules for 2 ranks and 4 micro-batches. In the second one each rank has 2
# chunks: rank 0 holds stages 0 and 2, rank 1 stages 1 and 3.
# %% name="two-ranks-rows"
import minipipe as mp

PLAIN = mp.Schedule.parse(
    """
    0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3
    1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3
    """,
    "1f1b",
)
LOOPED = mp.Schedule.parse(
    """
    0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3
    1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3
    """,
    "interleaved",
)
# %% [markdown] name="guess-bubble-asked"
# **Guess first.** The forward and the backward of a whole share take 1 and 2 units. 1F1B has 12
# units of work a rank and 3 units of bubble here: 3 of 15, so 20 % of the time is idle. What share
# does the interleaved table idle, in percent?
# %% name="guess-bubble"
my_guess = ...  # percent
# %% name="guess-bubble-revealed"
from minipipe.teach import reveal

looped = mp.simulate(LOOPED)
reveal(my_guess, 100 * float(looped.bubble.idle_over_total), "%", within=1)
# %% name="two-ranks-seen" picture="07-two-ranks"
mp.plot.overview([mp.simulate(PLAIN), mp.simulate(LOOPED)], "2 ranks, 4 micro-batches, predicted")
# %% [markdown] name="two-ranks-why"
# ![1F1B and interleaved 1F1B for 2 ranks and 4 micro-batches, predicted](figures/07-two-ranks.png)
#
# The work is the same. The step takes 13.5 units, not 15: the wait at both ends is for a half
# share, so the bubble is 1.5 units, half as long. In general, with *v* chunks a rank:
#
# bubble time = (*p* − 1)(F + B) / *v*
#
# The idle share falls to 1.5 of 13.5, which is 11 %.
# %% [markdown] name="order"
# ## In which order?
#
# Read the row of rank 0 above. Its forwards come in **groups** of as many micro-batches as there
# are ranks: micro-batches 0 and 1 through stage 0, the same two through stage 2, then
# micro-batches 2 and 3 through stage 0, and through stage 2.
#
# A group of *p* is just right. When rank 0 has sent *p* micro-batches into the first loop, the
# first of them comes back from the last rank, and rank 0 can send it into the second loop at once.
#
# The backwards come in the same groups, but the chunks in the opposite order: the last stage's
# gradient comes first. So rank 0 does `2B0 2B1`, then `0B0 0B1`, then `2B2 2B3`, then `0B2 0B3`.
#
# This needs full groups. As in Megatron-LM's paper, let the number of micro-batches be a multiple
# of the number of ranks. (`mp.build` handles the others too, and groups of other sizes.)
# %% [markdown] name="warm-up"
# ## How long is the warm-up?
#
# As in 1F1B a rank begins with a warm-up of forwards only. Then come one forward and one backward
# by turns, and in the end the backwards that are left. Only the warm-up's length is new.
#
# - A rank has to send the whole first group through all chunks but its last one before the first
#   gradient can exist anywhere: (*v* − 1) · *p* forwards.
# - Then the first micro-batch goes on from here to the last rank, and its gradient comes back:
#   over *p* − 1 − *r* ranks there, and over as many back. With 2(*p* − 1 − *r*) more forwards rank
#   *r* has something to do meanwhile.
#
# So the warm-up of rank *r* has (*v* − 1)*p* + 2(*p* − 1 − *r*) forwards, or all *mv* where there
# are fewer. Check it with the rows above: 2 + 2 = 4 forwards on rank 0, 2 + 0 on rank 1. After
# them each row goes on with a forward and a backward by turns.
#
# This is Megatron-LM's warm-up. As long as messages take no time, *p* − 1 − *r* in the place of
# 2(*p* − 1 − *r*) gives the same makespan and keeps less; both are right in the next task. Near
# the end of the lesson you'll see what the other half is good for.
# %% [markdown] name="task-7-2-asked"
# ## Task 7.2: the rows
#
# Write the rows of interleaved 1F1B. Right order is 60 % of the points, within memory and within
# the bubble 20 % each. Any legal order on the looped stages that is as fast and keeps as little is
# right.
#
# Hint for a plan: first make two lists for a rank, all its forwards in order and all its backwards
# in order. Then merge them.
# %% name="task-7-2" task="7.2"
def interleaved(ranks, microbatches, chunks=2):
    """The rows of interleaved 1F1B: lists of actions such as "4F0", one list a rank.

    Rank r holds the stages r, r + ranks, r + 2 ranks, …, `chunks` of them. microbatches is a
    multiple of ranks.
    """
    ### BEGIN SOLUTION
    rows = []
    for rank in range(ranks):
        stages = [chunk * ranks + rank for chunk in range(chunks)]
        forwards, backwards = [], []
        for first in range(0, microbatches, ranks):
            group = range(first, min(first + ranks, microbatches))
            forwards += [f"{stage}F{m}" for stage in stages for m in group]
            backwards += [f"{stage}B{m}" for stage in reversed(stages) for m in group]
        warm_up = (chunks - 1) * ranks + 2 * (ranks - 1 - rank)
        row = forwards[:warm_up]
        for step, backward in enumerate(backwards):
            row += forwards[warm_up + step : warm_up + step + 1]
            row.append(backward)
        rows.append(row)
    return rows
    ### END SOLUTION


# %% [markdown] name="yours-asked"
# Your rows for 4 ranks and 8 micro-batches. Follow micro-batch 0: it passes ranks 0 to 3 in the
# dark blue, then ranks 0 to 3 again in the lighter blue, and goes all the way back.
# %% name="yours" picture="07-interleaved"
mp.plot.timeline(mp.simulate(mp.Schedule(interleaved(4, 8), "interleaved")))
# %% [markdown] name="yours-seen"
# ![Interleaved 1F1B, 4 ranks, 8 micro-batches, 2 chunks, predicted](figures/07-interleaved.png)
#
# The step takes 28.5 units instead of 33, and 15.8 % is idle instead of 27.3 %. That is 16 % more
# throughput. Megatron-LM, which made this schedule known in 2021, reports over 10 % more on real
# machines, and with it trained a model of 1 trillion parameters at 502 petaFLOP/s on 3,072 GPUs:
# 52 % of what they could do at most.
#
# With still more chunks?
# %% name="more-chunks"
for chunks in (1, 2, 4, 8):
    t = mp.simulate(mp.Schedule(interleaved(4, 8, chunks)))
    print(f"{chunks} chunks a rank: {float(t.makespan):6.3f} units,",
          f"idle {float(t.bubble.idle_over_total):5.1%} (predicted, of ranks x makespan),",
          f"rank 0 keeps {float(t.peak_activations[0])} micro-batches,",
          f"{t.messages} messages")  # fmt: skip
# %% [markdown] name="price"
# ## The price
#
# 1. **Memory.** With 2 chunks and Megatron-LM's warm-up rank 0 keeps 5.5 micro-batches (counted in
#    whole shares), 1F1B only 4. In chunks, rank *r* keeps (*v* − 1)*p* + 2(*p* − 1 − *r*) + 1, one
#    more than its warm-up has. With 1 chunk these rows keep 7, and gain nothing: that is what
#    plain 1F1B is for.
# 2. **Layers.** 4 ranks with 8 chunks each need a model of 32 layers or more that take equally
#    long.
# 3. **Messages.** Each border between two stages is crossed by each micro-batch, forward and
#    backward. More stages have more borders, and now *all* borders lie between ranks, the jump
#    from the last rank back to rank 0 among them.
# %% [markdown] name="guess-messages-asked"
# **Guess first.** 1F1B with 4 ranks and 8 micro-batches sends 48 messages a step: 3 borders, 8
# micro-batches, there and back. How many are there with 2 chunks a rank?
# %% name="guess-messages"
my_messages = ...  # a number of messages
# %% name="guess-messages-revealed"
reveal(my_messages, 2 * 8 * (4 * 2 - 1), "messages")
# %% [markdown] name="task-7-3-asked"
# ## Task 7.3: count the messages
#
# Count them from rows, for each link, that is for each pair of a sending and a receiving rank. It
# has to work for any rows, other placements included:
#
# - a forward sends its activation to the rank that holds the next stage,
# - a backward, B or I, sends its gradient to the rank that holds the stage before,
# - W sends nothing, and within one rank there is no message.
# %% name="task-7-3" task="7.3"
from minipipe.actions import Action


def messages(rows):
    """How many messages go over each link in a step: {(source rank, target rank): number}.

    rows: lists of text such as "4F0", one list a rank; each stage stands on one row. Links without
    messages are left out. Action.parse("4F0") has .stage, .kind and .microbatch.
    """
    ### BEGIN SOLUTION
    actions = [[Action.parse(text) for text in row] for row in rows]
    holder = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    counted = {}
    for source, row in enumerate(actions):
        for action in row:
            way = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
            target = holder.get(action.stage + way, source)
            if target != source:
                counted[source, target] = counted.get((source, target), 0) + 1
    return counted
    ### END SOLUTION


# %% [markdown] name="links-asked"
# On which links do they go? Once your function passes, look at both schedules.
# %% name="links"
for schedule in (PLAIN, LOOPED):
    counted = messages([line.split() for line in str(schedule).splitlines()])
    print(f"{schedule.name:12} {sum(counted.values()):3} messages:", counted)
# %% [markdown] name="slow"
# ## Slow links
#
# Until now a message took no time. Let each one take `latency` units, from the end of an action
# until its result has arrived. A whole share's forward takes 1 unit and its backward 2.
# %% name="slow-seen" picture="07-latency"
def latency_figure():
    latencies = [step / 8 for step in range(17)]
    figure = mp.plot.Picture(figsize=(9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    tables = {"1F1B": mp.build("1f1b", ranks=4, microbatches=8)}
    for chunks in (2, 4):
        rows = mp.build("interleaved", ranks=4, microbatches=8, chunks=chunks)
        tables[f"interleaved, {chunks} chunks"] = rows
    for (name, table), style in zip(tables.items(), ("-", "--", ":"), strict=True):
        times = [float(mp.simulate(table, mp.Costs(latency=c)).makespan) for c in latencies]
        axes.plot(latencies, times, style, linewidth=3, label=name)
    axes.set_xlabel("latency of a message (1 = the forward of a rank's share)")
    axes.set_ylabel("time of a step (same unit)")
    axes.set_title("4 ranks, 8 micro-batches, predicted", loc="left")
    axes.legend()
    return figure


latency_figure()
# %% [markdown] name="slow-read"
# ![Time of a step over the latency of a message, predicted](figures/07-latency.png)
#
# Each line begins with the gain that you know. At first the forwards done ahead hide some of the
# messages. But the more finely a schedule is cut, the more steeply its line climbs in the end.
# With 4 chunks the gain is gone at a latency of 0.375, a bit more than the time of one stage's
# forward there (0.25). With 2 chunks it lasts until 1.375.
#
# And the warm-up's second half? Without it, with *p* − 1 − *r* forwards where Megatron-LM has
# 2(*p* − 1 − *r*), the step with 2 chunks takes 28.5 units without latency too, and rank 0 keeps 4
# micro-batches, not 5.5. But at a latency of 0.5 it takes 43.5 units instead of 35.5, and loses
# against 1F1B's 41. Forwards done ahead keep a rank busy while messages are under way.
#
# Chunks suit fast links, as between the GPUs of one server. Between servers, or across a city,
# plain 1F1B with more micro-batches is the better choice.
# %% [markdown] name="task-7-4-asked"
# ## Task 7.4: when does it pay?
#
# Write a function that finds the latency at which the gain is gone, for any two schedules of the
# same model. `mp.simulate(schedule, costs).makespan` predicts a step's time. Any way that finds
# the latency up to a millionth is right, and trying out all latencies is not one.
# %% name="task-7-4" task="7.4"
from fractions import Fraction

import minipipe as mp


def break_even(plain, looped, forward, backward):
    """The smallest latency at which `looped` is no longer faster than `plain`, as a number.

    plain, looped: schedules (mp.Schedule). forward, backward: times of a whole share's F and B, in
    the unit of the latency; half of a backward is I, half is W. 0 where `looped` isn't even faster
    without latency.
    """
    ### BEGIN SOLUTION
    half = Fraction(backward) / 2

    def is_faster(latency):
        costs = mp.Costs(forward, half, half, latency=latency)
        return mp.simulate(looped, costs).makespan < mp.simulate(plain, costs).makespan

    if not is_faster(0):
        return 0
    low, high = Fraction(0), Fraction(1)
    while is_faster(high):
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if is_faster(middle) else (low, middle)
    return float(high)
    ### END SOLUTION


# %% name="paying"
print("2 ranks, 4 micro-batches: interleaved pays up to a latency of",
      round(break_even(PLAIN, LOOPED, 1, 2), 6))  # fmt: skip
# %% [markdown] name="real"
# ## On real ranks
#
# Now both tables for two ranks run for real: two processes, each emulating a device on which a
# whole share's forward takes 15 ms and its backward 30 ms. First on fast links, then on links with
# an emulated latency as long as a forward. Before you look: which one should win where? By your
# 7.4, or by the figure above, the gain ends at 0.625 of a forward here.
# %% name="real-run"
import torch
from torch import nn

SLOT = 0.015  # seconds: F, I and W of a rank's whole share


def paced(rank, schedules, latencies):
    """Measured times of a step, the median of 3, of each schedule at each latency."""
    torch.manual_seed(0)
    batch, found = (torch.randn(16, 16), torch.randn(16, 16)), {}
    for schedule in schedules:
        cuts = [4 // schedule.stages] * schedule.stages
        model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])
        pipe = mp.Pipeline(model, schedule, nn.functional.mse_loss, cuts=cuts)
        pipe.step(*batch)  # a first step, unpaced
        for latency in latencies:
            pace = mp.Pace(mp.Costs(SLOT, SLOT, SLOT, latency=latency))
            seen = sorted(pipe.step(*batch, pace=pace).timeline.makespan for _ in range(3))
            found[schedule.name, latency] = seen[1]
            print(f"{schedule.name}, latency {1000 * latency:.0f} ms: done")
    return found


measured = mp.launch(paced, (PLAIN, LOOPED), (0, SLOT), ranks=2, timeout=60)[0]
print("time of a step      predicted   measured on emulated devices (median of 3)")
for latency in (0, SLOT):
    for schedule in (PLAIN, LOOPED):
        costs = mp.Costs(SLOT, SLOT, SLOT, latency=latency)
        predicted = float(mp.simulate(schedule, costs).makespan)
        print(f"{schedule.name:12} {1000 * latency:4.0f} ms {1000 * predicted:8.0f} ms"
              f" {1000 * measured[schedule.name, latency]:8.0f} ms")  # fmt: skip
# %% [markdown] name="real-read"
# Without latency interleaved is faster, with 15 ms it is slower: the order turns, as predicted.
# What is measured is a little longer than what is predicted, since a real message between two
# processes takes its time as well, some tenths of a millisecond, and interleaved has three times
# as many of them here (24 instead of 8).
# %% [markdown] name="learnt"
# ## What you learnt
#
# - Several small, non-adjacent stages a rank make the waits at both ends of a step shorter: the
#   bubble is 1F1B's divided by the number of chunks.
# - Micro-batches go round the ranks in groups of *p*; the warm-up is (*v* − 1)*p* + 2(*p* − 1 −
#   *r*) forwards long.
# - The price is memory, in chunks one more than the warm-up has, and 2*m*(*pv* − 1) messages
#   instead of 2*m*(*p* − 1).
# - Whether it pays is a question of latency, and a simulation of the rows answers it.
#
# ## Next
#
# Chunks make the bubble smaller, but never zero. Lesson 8 looks into the backward pass: half of
# its work is not urgent at all, and can be done while a rank would idle.
