# %% [markdown] name="question"
# ## Your schedule
#
# Here is a job nobody has a name for. Four ranks, 8 micro-batches, one stage a rank. The model
# can't be cut evenly: its stages take 1, 2, 3 and 2, for a forward, and again for each half of the
# backward pass. And each rank has room for only **3** micro-batches.
#
# Which schedule do you take?

# %% name="named"
import minipipe as mp

stages = [1, 2, 3, 2]
costs = mp.Costs(stages, stages, stages)  # forward, gradient for the input, gradient for weights
room = 3


def named_tables():
    """By name. Those that you have not written are left out."""
    tables = {}
    for name in ("naive", "gpipe", "1f1b", "zb-h1", "zb-h2"):
        try:
            tables[name] = mp.build(name, ranks=4, microbatches=8)
        except mp.ScheduleError as error:
            print(f"{name}: {error}")
    return tables


def show_named():
    for name, table in named_tables().items():
        t = mp.simulate(table, costs)
        kept = max(t.peak_activations)
        note = "" if kept <= room else ": no room"
        print(f"{name:8} makespan {t.makespan:4}, keeps {kept}{note}")


show_named()

# %% [markdown] name="named-read"
# Only naive fits, and it takes 192. 1F1B takes 84, ZB-H1 76 and ZB-H2 75, but they need room for 4
# and for 7. None of them knows that stage 2 is slow.
#
# (Interleaved schedules and V shapes need two or more stages a rank. This model's are fixed.)
#
# In this last lesson you make the schedule yourself.
#
# ## What can't be beaten
#
# First, how good can it get? Rank 2 has the slowest stage. Its forwards and backwards take
# 3 + 3 + 3 for each micro-batch, and it can't begin before micro-batch 0 has been through the
# stages 0 and 1. What is the least makespan that this allows?

# %% name="bound-guess"
my_guess = ...  # units

# %% name="bound-reveal"
from minipipe.teach import reveal

reveal(my_guess, (1 + 2) + 8 * 9, "units: 3 to wait, 72 to work")

# %% [markdown] name="bound-read"
# No order of the actions can be faster than 75. `mp.lower_bound(table, costs, memory_limit)` makes
# this argument for every rank, and some more.
#
# That holds for tables that split the backward pass. With whole B's, rank 2's last gradient still
# has to go back through the stages 1 and 0, which takes 4 + 2 more: 81. In room for 3 even that
# can't be reached. A solver has proven that 84 is the least there.
#
# ## Where is the time lost?
#
# This is 1F1B with our stages. It needs room for 4, and takes 84.

# %% name="look-figure" picture="16-1f1b"
mp.plot.timeline(mp.simulate(mp.build("1f1b", ranks=4, microbatches=8), costs),
                 title="1F1B with stages of 1, 2, 3 and 2")  # fmt: skip

# %% [markdown] name="look-read"
# ![1F1B: rank 2 is busy most of the time, the others wait for it](figures/16-1f1b.png)
#
# The ranks 0, 1 and 3 are idle a lot. That can't be helped: they have less to do. But *rank 2 must
# never wait*. Each unit in which it waits makes the step longer, except for the 3 at the start.
#
# So ask for each gap in rank 2's row: what was missing? An input from rank 1? A gradient from rank
# 3? Room? Then look at what those ranks did instead.
#
# Some means you know:
#
# - B can be I and W (lesson 8). The rank before waits for I, nobody waits for W. A W fills a gap.
# - A micro-batch takes room until its **W**. A W put off for too long blocks the next F.
# - A clock can write rows (lesson 6).
#
# This function shows how far you are, and where rank 2 waits.

# %% name="look"
def look(rows):
    """Print what a table scores on the job, and draw it."""
    table = mp.Schedule.parse(rows) if isinstance(rows, str) else mp.Schedule(rows)
    mp.check(table)
    t = mp.simulate(table, costs)
    print(f"makespan {t.makespan}, keeps {[*map(str, t.peak_activations)]} (room for {room})")
    end = 0
    for span in sorted((span for span in t.spans if span.rank == 2), key=lambda span: span.start):
        if span.start > end:
            print(f"rank 2 waits from {end} to {span.start}, for {span.action}")
        end = span.end
    return mp.plot.timeline(t)


# One micro-batch at a time: it fits. That is all.
look([[f"{rank}{kind}{m}" for m in range(8) for kind in "FIW"] for rank in range(4)])

# %% [markdown] name="task-16-1-asked"
# ## Task 16.1: your rows
#
# `my_rows()` returns your table: text like in `mp.Schedule.parse`, or a list of lists. Write it by
# hand, or write a program that writes it.
#
# - 4 ranks, stage r on rank r, 8 micro-batches. All F's, and for each a B, or an I and a W.
# - No rank keeps more than 3 micro-batches.
# - The makespan is at most **80**. That is 4 less than 1F1B needs with more room.
#
# 80 leaves you 5 units of play. If you want more: 75 is the proven bound, and it *can* be reached
# in this room. It counts nothing extra, but it is the top of the leaderboard below.

# %% name="task-16-1" task="16.1"
def my_rows():
    """Rows for the job: text, or one list of actions a rank."""
    ### BEGIN SOLUTION
    return """
    0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0F4 0I2 0W2 0F5 0I3 0W3 0F6 0I4 0W4 0F7 0I5 0W5 0I6 0W6 0I7 0W7
    1F0 1F1 1F2 1I0 1W0 1F3 1I1 1W1 1I2 1F4 1W2 1F5 1I3 1W3 1F6 1I4 1W4 1I5 1F7 1W5 1I6 1W6 1I7 1W7
    2F0 2F1 2F2 2I0 2W0 2I1 2W1 2I2 2F3 2W2 2F4 2I3 2F5 2I4 2W3 2I5 2F6 2W4 2F7 2I6 2W5 2I7 2W6 2W7
    3F0 3I0 3W0 3F1 3I1 3W1 3F2 3I2 3W2 3F3 3I3 3W3 3F4 3I4 3W4 3F5 3I5 3W5 3F6 3I6 3W6 3F7 3I7 3W7
    """
    ### END SOLUTION


# %% name="look-mine"
look(my_rows())

# %% [markdown] name="solver"
# ## Against the machine
#
# Now that you have rows of your own, let the search of `minipipe.planning` look for some. It starts
# from the named schedules and from rows written by a clock, and then swaps actions, many thousand
# times. (Until your own rows pass, it refuses.)

# %% name="machine"
def machine():
    from minipipe.planning.search import search

    found = search(ranks=4, microbatches=8, memory=room, costs=costs)
    print(f"search: makespan {found.makespan}, {found.word}; bound {found.bound}")


machine()

# %% [markdown] name="board-asked"
# ## A fair race
#
# A leaderboard needs rules. Who keeps too much isn't in the race. Who deadlocks isn't either. And
# what about somebody who runs only 7 of the 8 micro-batches, or no backward pass at all? Such a
# table is legal, and very fast.
#
# ## Task 16.2: the leaderboard
#
# `leaderboard(entries, costs, limit, microbatches)` judges tables. `entries` is a dictionary from
# names to texts. It returns a list of tuples `(name, verdict, makespan, above)`.
#
# | verdict | when | makespan | above |
# |---|---|---|---|
# | `"fits"` | legal, complete, at most `limit` kept on each rank | simulated | over lower bound |
# | `"too large"` | legal and complete, but some rank keeps more | simulated | `None` |
# | `"not legal"` | anything else | `None` | `None` |
#
# - *Legal*: `mp.Schedule.parse` and `mp.check` raise no `mp.ScheduleError`.
# - *Complete*: it has `microbatches` micro-batches, as many stages as `costs.forward` is long, and
#   is not `forward_only`. A `Schedule` knows all three.
# - *Over lower bound* is the makespan − `mp.lower_bound(table, costs, limit)`: the bound of the
#   same actions, in that room.
# - Those that fit come first, by makespan. Then the too large ones, by makespan. Then the rest.
#   Where that is equal, the order of the entries stays.

# %% name="task-16-2" task="16.2"
import minipipe as mp


def leaderboard(entries, costs, limit, microbatches):
    """Tuples (name, verdict, makespan, above), the best first; see the table of verdicts."""
    ### BEGIN SOLUTION
    board = []
    for name, text in entries.items():
        try:
            table = mp.Schedule.parse(text)
            mp.check(table)
        except mp.ScheduleError:
            table = None
        if (table is None or table.forward_only or table.microbatches != microbatches
                or table.stages != len(costs.forward)):  # fmt: skip
            board.append((name, "not legal", None, None))
            continue
        t = mp.simulate(table, costs)
        if max(t.peak_activations) <= limit:
            above = t.makespan - mp.lower_bound(table, costs, limit)
            board.append((name, "fits", t.makespan, above))
        else:
            board.append((name, "too large", t.makespan, None))
    verdicts = ["fits", "too large", "not legal"]
    return sorted(board, key=lambda entry: (verdicts.index(entry[1]), entry[2] or 0))
    ### END SOLUTION


# %% name="board"
def as_text(rows):
    return rows if isinstance(rows, str) else str(mp.Schedule(rows))


def entries():
    mine = as_text(my_rows())
    return {**{name: str(table) for name, table in named_tables().items()}, "mine": mine}


def print_board(board):
    for place, (name, verdict, makespan, above) in enumerate(board, 1):
        print(f"{place}. {name:8} {verdict:9}", "" if makespan is None else f"{makespan:4}",
              "" if above is None else f"  {above} above the bound")  # fmt: skip


print_board(leaderboard(entries(), costs, room, 8))

# %% [markdown] name="task-16-3-asked"
# ## Run it for real
#
# A table is only worth something if it trains. You have built all of it: stages, messages,
# micro-batches, gradients. `mp.Pipeline` puts it together, and takes any legal table.
#
# ## Task 16.3: train by any table
#
# `train(rank, rows, model, cuts, x, y, learning_rate, steps)` runs on each rank. It trains the
# model with the table `rows` (text), plain SGD and `torch.nn.functional.mse_loss`, each step with
# the whole batch x, y. It returns
#
# - the list of the losses, one number a step, each taken before that step's update,
# - this rank's part of the trained model: a dictionary from the full model's names to tensors.
#
# All of it has to equal training in one process, for every table.

# %% name="task-16-3" task="16.3"
import torch
from torch import nn

import minipipe as mp


def train(rank, rows, model, cuts, x, y, learning_rate, steps):
    """(losses, this rank's part of the model's state) after some steps of SGD by a table.

    rows: a table's text. cuts: how many layers each stage has.
    """
    ### BEGIN SOLUTION
    pipe = mp.Pipeline(model, mp.Schedule.parse(rows), nn.functional.mse_loss, cuts=cuts)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=learning_rate)
    losses = []
    for _ in range(steps):
        pipe.zero_grad()
        losses.append(pipe.step(x, y).loss)
        optimizer.step()
    return losses, pipe.state_dict()
    ### END SOLUTION


# %% [markdown] name="equal-asked"
# Your table, on four real processes, against one process. The numbers are float64, so that rounding
# can't hide a mistake.

# %% name="equal"
def small_model(depth):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers).double(), *torch.randn(2, 64, 12, dtype=torch.float64)


def compare_with_one_process():
    model, x, y = small_model(8)
    results = mp.launch(train, as_text(my_rows()), model, [1, 2, 3, 2], x, y, 0.5, 5, ranks=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        print(f"step {step}: one process {loss.item():.12f}, pipeline {results[0][0][step]:.12f}")
    trained = {name: each for _, part in results for name, each in part.items()}
    far = max((trained[name] - each).abs().max() for name, each in model.state_dict().items())
    print(f"largest difference of a weight after 5 steps: {far:.1e}")


compare_with_one_process()

# %% [markdown] name="rule-asked"
# ## From a table to a rule
#
# You have solved one job. Tomorrow the stages take 2, 3, 1 and 4. A *rule* would do all of them.
#
# In lesson 6 a clock wrote rows: backward if possible, else forward if there is room, else wait.
# Now there are three kinds of actions, and each stage has its own times. A clock that ticks won't
# do. Instead, go from action to action: of everything that any rank could do next, take what can
# **begin first**. That is *list scheduling*. It never leaves a rank idle that has something to do.
#
# But which of several that can begin at the same time? Somebody waits for an I, and an F fills the
# pipeline. Nobody waits for a W. What do you take first, what last?
#
# ## Task 16.4: a designer
#
# `design(costs, limit, microbatches)` writes rows for any costs. `costs` has a list for each of
# forward, backward_input and backward_weight. No rank may have more than `limit` micro-batches
# between F and W.
#
# The frame is there. You say which action comes next. (Or write all of it in your own way.) It is
# judged against 1F1B with the same room, on costs that you don't know:
#
# - the rows are legal, and fit;
# - in no case are they more than 20 % slower than 1F1B (on odd costs a simple rule can lose);
# - twelve cases of a size together are at least 5 % faster.

# %% name="task-16-4" task="16.4"
def design(costs, limit, microbatches):
    """Rows, lists of actions such as "0F0", for len(costs.forward) ranks; each keeps at most
    `limit` micro-batches."""
    times = {"F": costs.forward, "I": costs.backward_input, "W": costs.backward_weight}
    ranks = len(costs.forward)
    rows = [[] for _ in range(ranks)]
    free = [0] * ranks  # when each rank has finished what it has to do so far
    counts = [{"F": 0, "I": 0, "W": 0} for _ in range(ranks)]  # how many of each are in its row
    ends = {}  # "0F0" -> when it ends
    for _ in range(3 * ranks * microbatches):
        # Choose a rank, a kind and a start: of all that could be next, what can begin first.
        ### BEGIN SOLUTION
        choices = []
        for rank in range(ranks):
            f, i, w = (counts[rank][kind] for kind in "FIW")
            source = f"{rank}F{i}" if rank == ranks - 1 else f"{rank + 1}I{i}"
            if source in ends:
                choices.append((max(free[rank], ends[source]), 0, rank, "I"))
            has_input = rank == 0 or f"{rank - 1}F{f}" in ends
            if f < microbatches and f - w < limit and has_input:
                came = 0 if rank == 0 else ends[f"{rank - 1}F{f}"]
                choices.append((max(free[rank], came), 1, rank, "F"))
            if w < i:
                choices.append((free[rank], 2, rank, "W"))
        start, _, rank, kind = min(choices)
        ### END SOLUTION
        action = f"{rank}{kind}{counts[rank][kind]}"
        counts[rank][kind] += 1
        rows[rank].append(action)
        free[rank] = ends[action] = start + times[kind][rank]
    return rows


# %% name="rule"
def show_rule():
    for limit in (2, 3, 4, 8):
        t = mp.simulate(mp.Schedule(design(costs, limit, 8)), costs)
        bound = mp.lower_bound(t.schedule, costs, limit)
        print(f"room for {limit}: makespan {t.makespan}, bound {bound}, "
              f"keeps {[*map(float, t.peak_activations)]}")  # fmt: skip


show_rule()

# %% [markdown] name="rule-read"
# With the rule "I before F before W" the clock needs 76 in room for 3, one more than the bound, and
# 75 in room for 4. And it writes rows for any costs, at once, without a search.
#
# minipipe's *zb-auto*, after the Zero Bubble paper, is such a rule with three choices. May an F
# hold up an I that is on its way? May a rank be further ahead than in 1F1B? May a W hold up others?
# It tries each both ways, keeps the best rows, and finds 75 in room for 3. (A student's tree has
# only some tables of it, since its code shows this task's answer.)
#
# In room for 2 the rule takes 83, and the bound says 76. Is the rule bad there? No: a solver has
# proven that 83 is the least. A bound is only what nobody can beat. It need not be reachable.
#
# ## The leaderboard

# %% name="leaderboard-figure" picture="16-leaderboard"
def draw_board():
    rule = str(mp.Schedule(design(costs, room, 8)))
    board = leaderboard({**entries(), "rule": rule}, costs, room, 8)[::-1]
    bound = min(makespan - above for _, _, makespan, above in board if above is not None)
    figure = mp.plot.Picture(figsize=(10, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, verdict, makespan, _ in board:
        fits = verdict == "fits"
        axes.barh(name, makespan, color="#4C78A8" if fits else "#D0D0D0")
        axes.text(makespan, name, f" {makespan}{'' if fits else ', no room'}", va="center")
    axes.axvline(bound, color="black", label=f"lower bound: {bound}")
    axes.set_xlim(0, 215)
    axes.set_xlabel("makespan, simulated (units of the costs)")
    axes.set_title("4 ranks, 8 micro-batches, stages of 1, 2, 3 and 2, room for 3 micro-batches")
    axes.legend(loc="lower right")
    return figure


draw_board()

# %% [markdown] name="leaderboard-read"
# ![The own table and the rule take less than half of naive's time](figures/16-leaderboard.png)
#
# Here "mine" is a table that reaches the bound, and "rule" the designer. Grey ones don't fit.
#
# How many percent faster is 75 than 1F1B's 84, which needs more room: by how much does the time of
# a step fall?

# %% name="win-guess"
my_guess = ...  # percent

# %% name="win-reveal"
reveal(my_guess, 100 * (1 - 75 / 84), "%", within=1)

# %% [markdown] name="race-asked"
# ## The last race
#
# Both on four processes with emulated devices: a unit takes 4 ms. Makespan and bubble are measured
# there, and predicted beforehand by the simulator, with the measured latency of a message. The
# bytes are those that autograd really kept.

# %% name="race"
from minipipe.emulation import measure_latency


def paced(rank, tables):
    model, x, y = small_model(4)
    slots, latency, results = [0.004 * each for each in stages], measure_latency(), []
    for table in tables:
        pipe = mp.Pipeline(model, table, nn.functional.mse_loss, cuts=[1, 1, 1, 1])
        pipe.step(x, y)  # the first step is slower: connections are made
        step = pipe.step(x, y, pace=mp.Pace(mp.Costs(slots, slots, slots)))
        predicted = mp.simulate(table, mp.Costs(slots, slots, slots, latency=latency))
        results.append((predicted, step.timeline))
    return results


def race():
    mine = mp.Schedule(mp.Schedule.parse(as_text(my_rows())).rows, name="mine")
    results = mp.launch(paced, [mp.build("1f1b", ranks=4, microbatches=8), mine], ranks=4)[0]
    for predicted, measured in results:
        print(f"{measured.schedule.name}: predicted {1e3 * predicted.makespan:.0f} ms, on "
              f"emulated devices {1e3 * measured.makespan:.0f} ms; "
              f"bytes kept: {measured.peak_activations}")  # fmt: skip
    return mp.plot.compare(*results[1])


race()

# %% [markdown] name="race-read"
# 75 × 4 ms is 300 ms, and messages take a little time. The prediction knows that.
#
# Each stage keeps 1,536 bytes of a micro-batch here (the last one also what the loss needs). So
# rank 0 keeps four micro-batches with 1F1B, and three with your rows: less room and less time, both
# at once. On a busy computer the emulated times are longer than predicted, because a rank may wake
# up late.
#
# ## What you learnt
#
# - A lower bound tells when to stop. Find the rank that must never wait, and what it works.
# - Split the backward pass, let nobody wait for an I, fill gaps with W's, and don't let W's block
#   the room.
# - A rule of a few lines (list scheduling) comes close to the best table for any costs. Search and
#   solvers find the rest, and can prove it.
# - A leaderboard needs rules: legal, complete, within memory, the same job.
# - A table that is checked and simulated trains as it stands, and gives the numbers of one process.
#
# ## Next
#
# That was the course. You have cut a model, sent its activations by hand, found deadlocks, written
# GPipe, 1F1B and zero bubble, and now a schedule that no paper has. What to try:
#
# - `minipipe search --help` and `minipipe optimize --help`: other placements, slow links.
# - `minipipe run FILE`: train the image model with your rows.
# - The engine itself: `minipipe/engine/interpreter.py`. You know every idea in it.
