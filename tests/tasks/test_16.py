"""Tasks of lesson 16: a schedule for an uneven model and little room."""

import torch
from torch import nn

import minipipe as mp
from minipipe.costs import Costs
from minipipe.schedule import Schedule
from minipipe.simulate import simulate
from minipipe.teach.testing import (
    Wrong,
    expect,
    has_all,
    kind,
    part,
    table,
    within,
    wrong_table,
)

# 16.1

STAGES = [1, 2, 3, 2]
JOB = Costs(STAGES, STAGES, STAGES)
CASE = "stages of 1, 2, 3, 2; 8 micro-batches, room for 3"
# What is asked for. With whole B's 84 is the least in this room (solver), the bound with I and W
# is 75: rank 2 can't begin before 3 and works 8 * 9. 75 can be reached.
ASKED = 80


def mine(answer):
    """The answer's table, legal and complete: B's, or I's and W's, or both mixed."""
    if not callable(answer):
        raise Wrong("my_rows must be a function that returns the rows")
    schedule = table(answer(), CASE)
    kinds = {(p.stage, p.microbatch): "" for row in schedule.rows for a in row for p in a.parts}
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if len(action.parts) > 1:
                raise wrong_table(f"{action} is a pair; this job has none", CASE, schedule, None)
            if action.kind in "RU":
                raise wrong_table(f"not asked for: {action}", CASE, schedule, None)
            if action.stage != rank:
                raise wrong_table(f"stage {action.stage} is on row {rank}; stage r has to be on "
                                  "row r", CASE, schedule, None)  # fmt: skip
            kinds[action.stage, action.microbatch] += action.kind
    if schedule.ranks != 4:
        raise wrong_table(f"4 rows are asked for, yours are {schedule.ranks}", CASE, schedule, None)
    asked = [(stage, m) for stage in range(4) for m in range(8)]
    for stage, m in asked:
        done = kinds.pop((stage, m), "")
        if sorted(done) not in (["B", "F"], ["F", "I", "W"]):
            reason = f"stage {stage} has {', '.join(done) or 'nothing'} for micro-batch {m}"
            raise wrong_table(f"{reason}; F and B, or F, I and W are asked for", CASE, schedule,
                              None)  # fmt: skip
    if kinds:
        raise wrong_table(f"not asked for: micro-batch {max(m for _, m in kinds)}", CASE, schedule,
                          None)  # fmt: skip
    return schedule


@part("16.1", "right order", 60)
def test_rows_are_legal(answer):
    mine(answer)


@part("16.1", "within memory", 20)
def test_rows_fit(answer):
    within(mine(answer), CASE, costs=JOB, memory_limit=3)


@part("16.1", "within bubble", 20)
def test_rows_are_fast(answer):
    """In the room that there is."""
    within(mine(answer), CASE, costs=JOB, memory_limit=3, makespan=ASKED)


# 16.2

SMALL = Costs([1, 2], [1, 2], [1, 2])
# By counting: rank 1 waits for 1, works 3 * 6 = 18, and with B's rank 0 goes back for 2.
SMALL_ENTRIES = {
    "one at a time": "0F0 0B0 0F1 0B1 0F2 0B2\n1F0 1B0 1F1 1B1 1F2 1B2",  # 3 * (3 + 6)
    "all at once": "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2",
    "in turn": "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2 1B2",
    "split": "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2\n1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2",
}
SMALL_BOARD = [  # room for 2: bounds 21 with B's, 19 with I and W
    ("split", "fits", 19, 0), ("in turn", "fits", 21, 0), ("one at a time", "fits", 27, 6),
    ("all at once", "too large", 21, None),
]  # fmt: skip
BROKEN = {
    "garbage": "these are no rows",
    "deadlock": "0F0 0B0 0F1 0B1 0F2 0B2\n1F1 1B1 1F0 1B0 1F2 1B2",
    "no backward": "0F0 0F1 0F2\n1F0 1F1 1F2",
    "two of three": "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
    "one rank": "0F0 0B0 0F1 0B1 0F2 0B2",
    "a hole": "0F0 0F1 0B0 0F2 0B1 0B2\n1F0 1B0 1F1 1B1 1F2",
}


def judged(answer, entries, case, costs=SMALL, limit=2, microbatches=3):
    """The answer's board as tuples; Wrong where it is none of these entries."""
    board = answer(dict(entries), costs, limit, microbatches)
    asked = "a list of tuples (name, verdict, makespan, above) is asked for, one an entry"
    if not isinstance(board, (list, tuple)):
        raise Wrong(f"case: {case}\n{asked}; yours is {kind(board)}")
    for entry in board:
        if not isinstance(entry, (list, tuple)) or len(entry) != 4:
            raise Wrong(f"case: {case}\n{asked}; yours has {entry!r:.200}")
    names = [entry[0] for entry in board]
    if sorted(map(str, names)) != sorted(entries):
        raise Wrong(f"case: {case}\n{asked}\nthe entries: {[*entries]}\nyours:       {names}")
    return [tuple(entry) for entry in board]


def shown(entries, name, limit=2):
    rows = "\n      ".join(entries[name].splitlines())
    return f"{name!r}, costs 1 and 2 a stage, limit={limit}, microbatches=3:\n      {rows}"


@part("16.2", "verdicts", 40)
def test_verdicts(answer):
    for name, verdict, *_ in SMALL_BOARD:
        one = {name: SMALL_ENTRIES[name]}
        board = judged(answer, one, shown(one, name))
        expect(board[0][1], verdict, f"{shown(one, name)}\nthe verdict")
    for name, text in BROKEN.items():
        board = judged(answer, {name: text}, shown(BROKEN, name))
        expect(board[0][1], "not legal", f"{shown(BROKEN, name)}\nthe verdict")
    large = {"in turn": SMALL_ENTRIES["in turn"]}
    expect(judged(answer, large, shown(large, "in turn", 1), limit=1)[0][1], "too large",
           f"{shown(large, 'in turn', 1)}\nthe verdict")  # fmt: skip


@part("16.2", "numbers", 30)
def test_numbers(answer):
    for entry in SMALL_BOARD:
        one = {entry[0]: SMALL_ENTRIES[entry[0]]}
        board = judged(answer, one, shown(one, entry[0]))
        expect(board[0][2:], entry[2:], f"{shown(one, entry[0])}\nmakespan and above")
    for name, text in BROKEN.items():
        board = judged(answer, {name: text}, shown(BROKEN, name))
        expect(board[0][2:], (None, None), f"{shown(BROKEN, name)}\nmakespan and above")
    # Room for 1: one at a time can't be beaten there, 3 * 9.
    one = {"one at a time": SMALL_ENTRIES["one at a time"]}
    board = judged(answer, one, shown(one, "one at a time", 1), limit=1)
    expect(board[0][2:], (27, 0), f"{shown(one, 'one at a time', 1)}\nmakespan and above")


@part("16.2", "order", 30)
def test_board_order(answer, rng):
    ordered = [name for name, *_ in SMALL_BOARD]
    for size in (2, 3, 4, 4):
        some = rng.sample(ordered, size)
        entries = {name: SMALL_ENTRIES[name] for name in some}
        names = [entry[0] for entry in judged(answer, entries, f"entries {some}")]
        right = [name for name in ordered if name in some]
        expect(names, right, f"entries {some}: the order of the names")
    # Equal makespans stay in the order of the entries; what isn't legal comes last, in its order.
    mixed = {"garbage": BROKEN["garbage"], "b": SMALL_ENTRIES["in turn"],
             "all": SMALL_ENTRIES["all at once"], "a hole": BROKEN["a hole"],
             "a": SMALL_ENTRIES["in turn"], "fast": SMALL_ENTRIES["split"]}  # fmt: skip
    names = [entry[0] for entry in judged(answer, mixed, f"entries {[*mixed]}")]
    expect(names, ["fast", "b", "a", "all", "garbage", "a hole"],
           f"entries {[*mixed]}, a and b being the same table: the order of the names")  # fmt: skip


# 16.3

TRAINED = (
    "0F0 0B0 0F1 0B1\n1F0 1B0 1F1 1B1\n2F0 2B0 2F1 2B1\n3F0 3B0 3F1 3B1",
    "0F1 0F0 0F2 0I1 0I0 0I2 0W2 0W1 0W0\n1F1 1F0 1F2 1I1 1I0 1W0 1W1 1I2 1W2\n"
    "2F1 2F0 2I1 2F2 2I0 2B2 2W1 2W0\n3F1 3B1 3F0 3B0 3F2 3B2",
)
CUTS, ROWS, STEPS, RATE = [1, 2, 1, 1], 8, 3, 0.3


def job():
    torch.manual_seed(3)
    sizes = ((5, 6), (6, 4), (4, 6), (6, 5), (5, 3))
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes]
    model = nn.Sequential(*layers).double()
    return model, torch.randn(ROWS, 5).double(), torch.randn(ROWS, 3).double()


def trained(rank, train):
    """On each rank: what the answer returns for each table."""
    found = []
    for rows in TRAINED:
        model, x, y = job()
        result = train(rank, rows, model, list(CUTS), x, y, RATE, STEPS)
        if not isinstance(result, (tuple, list)) or len(result) != 2:
            raise Wrong("two values are asked for, the losses and this rank's part of the model; "
                        f"yours is {kind(result)}")  # fmt: skip
        losses, weights = result
        if not isinstance(weights, dict) or not all(isinstance(w, torch.Tensor)
                                                    for w in weights.values()):  # fmt: skip
            raise Wrong("the second value has to be a dictionary from names to tensors; yours is "
                        f"{kind(weights)}")  # fmt: skip
        if isinstance(losses, torch.Tensor):
            losses = losses.tolist()
        if isinstance(losses, (list, tuple)):
            losses = [float(each) if isinstance(each, torch.Tensor) else each for each in losses]
        found.append((losses, {name: w.detach().clone() for name, w in weights.items()}))
    return found


def by_one_process():
    """Losses and weights of the same training, with autograd alone."""
    model, x, y = job()
    losses = []
    for _ in range(STEPS):
        loss = nn.functional.mse_loss(model(x), y)
        losses.append(loss.item())
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= RATE * gradient
    return losses, {name: each.detach() for name, each in model.state_dict().items()}


def of_stage(rank):
    first = sum(CUTS[:rank])
    return [f"{layer}.0.{kind}" for layer in range(first, first + CUTS[rank])
            for kind in ("weight", "bias")]  # fmt: skip


def on_ranks(answer):
    if not callable(answer):
        raise Wrong("train must be a function")
    return mp.launch(trained, answer, ranks=4, timeout=15, output=False)


def about(rows):
    shown = "\n      ".join(rows.splitlines())
    return f"{ROWS} rows, cuts={CUTS}, learning_rate={RATE}, {STEPS} steps, rows=\n      {shown}\n"


@part("16.3", "losses", 40)
def test_losses(answer):
    losses, _ = by_one_process()
    found = on_ranks(answer)
    for place, rows in enumerate(TRAINED):
        for rank in range(4):
            expect(found[rank][place][0], losses, f"{about(rows)}losses on rank {rank}", 1e-9)


@part("16.3", "weights", 60)
def test_weights(answer):
    _, weights = by_one_process()
    found = on_ranks(answer)
    for place, rows in enumerate(TRAINED):
        for rank in range(4):
            part, names = found[rank][place][1], of_stage(rank)
            expect(sorted(part), sorted(names), f"{about(rows)}names of rank {rank}'s part")
            for name in names:
                expect(part[name], weights[name], f"{about(rows)}{name}, rank {rank}", 1e-9)


# 16.4

# 1F1B in each room, which a designer is held against: it knows nothing of costs.
FIXED = [(limit, Schedule.parse(text)) for limit, text in (
    (3, """
0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0B4 0B5
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
"""),
    (2, """
0F0 0F1 0B0 0F2 0B1 0F3 0B2 0F4 0B3 0F5 0B4 0B5
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2F5 2B5
"""),
    (4, """
0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0F6 0B3 0F7 0B4 0B5 0B6 0B7
1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
"""),
    (3, """
0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0F5 0B3 0F6 0B4 0F7 0B5 0B6 0B7
1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1F6 1B4 1F7 1B5 1B6 1B7
2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2F6 2B5 2F7 2B6 2B7
3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5 3F6 3B6 3F7 3B7
"""),
)]  # fmt: skip
SIZES = ((1, 1, 1), (1, 3, 2), (2, 1, 1), (2, 2, 2), (2, 3, 1), (3, 4, 2), (4, 8, 3), (4, 8, 6))


def drawn(rng, ranks, equal=False):
    """Costs of so many stages; equal: the same for F, I and W."""
    lists = [[rng.randint(1, 4) for _ in range(ranks)] for _ in range(3)]
    return Costs(*([lists[0]] * 3 if equal else lists))


def designed(answer, costs, limit, microbatches):
    names = ("forward", "backward_input", "backward_weight")
    case = ", ".join(f"{name}={getattr(costs, name)}" for name in names)
    case += f"; limit={limit}, microbatches={microbatches}"
    schedule = table(answer(costs, limit, microbatches), case)
    has_all(schedule, len(costs.forward), microbatches, "FIW" if schedule.splits_backward else "FB",
            case)  # fmt: skip
    return schedule, case


@part("16.4", "right order", 60)
def test_design_order(answer, rng, sizes):
    for p, m, limit in sizes(*SIZES):
        for equal in (True, False):
            designed(answer, drawn(rng, p, equal), limit, m)


@part("16.4", "within memory", 20)
def test_design_memory(answer, rng, sizes):
    for p, m, limit in sizes(*SIZES):
        for equal in (True, False):
            costs = drawn(rng, p, equal)
            schedule, case = designed(answer, costs, limit, m)
            within(schedule, case, costs=costs, memory_limit=limit)


@part("16.4", "within bubble", 20)
def test_design_bubble(answer, rng):
    for limit, fixed in FIXED:
        p, m = fixed.ranks, fixed.microbatches
        total = total_fixed = 0
        for number in range(12):
            costs = drawn(rng, p, number % 3 == 0)
            schedule, case = designed(answer, costs, limit, m)
            within(schedule, case, costs=costs, memory_limit=limit)
            mine, theirs = (simulate(each, costs).makespan for each in (schedule, fixed))
            if mine > 1.2 * theirs:  # of 8,400 drawn cases the worst was 13 %
                raise wrong_table(f"it takes {mine} units; 1F1B in the same room takes {theirs}, "
                                  "and 20 % more are allowed", case, schedule, None)  # fmt: skip
            total, total_fixed = total + mine, total_fixed + theirs
        if total > 0.95 * total_fixed:
            raise Wrong(f"case: 12 kinds of costs with {p} ranks, {m} micro-batches, room for "
                        f"{limit}\n1F1B takes {total_fixed} units in all, so at most "
                        f"{0.95 * total_fixed:.0f} are asked for\nyours takes {total}")  # fmt: skip
