"""Tasks of lesson 4: cycles, lowering, order of messages, a zoo of faults, a ring."""

import hashlib
import re
from collections import defaultdict, deque
from graphlib import CycleError, TopologicalSorter

import minipipe as mp
from minipipe.teach.testing import Wrong, expect, kind, part, refusing

# Tables by hand, from small to large; in all of them both ends of a pair agree on the order.
ONE_RANK = "0F0 0B0"
TWO_STAGES = "0F0 1F0 1B0 0B0"  # on one rank
PAIR = "0F0 0B0 / 1F0 1B0"
GPIPE = "0F0 0F1 0B0 0B1 / 1F0 1F1 1B0 1B1"
ONE_F_ONE_B = (
    "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3 / 1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3 / "
    "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3"
)
LOOP = "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 / 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"
V_SHAPE = "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1 / 1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"
LEGAL = (ONE_RANK, TWO_STAGES, PAIR, GPIPE, V_SHAPE, LOOP, ONE_F_ONE_B)
# Legal, but the two ends have orders of their own.
MIXED = (
    "0F0 0F1 0B0 0B1 / 1F0 1F1 1B1 1B0",
    "0F0 0F1 0F2 0B0 0B1 0B2 / 1F1 1F0 1F2 1B2 1B0 1B1 / 2F0 2F1 2F2 2B2 2B1 2B0",
    "0F0 0F1 2F1 2F0 2B1 2B0 0B0 0B1 / 1F0 1F1 3F0 3F1 3B0 3B1 1B1 1B0",
)
STUCK = (
    "0F0 0B0 0F1 0B1 / 1F0 1F1 1B0 1B1",
    "0F1 0F0 0B1 0B0 / 1F0 1B0 1F1 1B1 / 2F1 2B1 2F0 2B0",
    # Rank 0 is stuck behind the cycle of ranks 1 and 2.
    "0F0 0F1 0B0 0B1 / 1F0 1B0 1F1 1B1 / 2F0 2F1 2B0 2B1",
    # Three ranks in the cycle, two stages each.
    "0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1 / 1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1 / "
    "2F1 2F0 5F0 5F1 5B0 5B1 2B0 2B1",
)


def split(text):
    return [row.split() for row in text.split("/")]


def renumbered(text, rng):
    """The same table with other numbers for the micro-batches."""
    numbers = sorted(set(re.findall(r"[FB](\d+)", text)))
    others = rng.sample(numbers, len(numbers))
    return re.sub(r"([FB])(\d+)", lambda m: m[1] + others[numbers.index(m[2])], text)


def shown(rows):
    return "rows:\n" + "\n".join(f"  rank {rank}: {' '.join(row)}" for rank, row in enumerate(rows))


def copied(rows):
    return [list(row) for row in rows]


def maker(word):
    """What an action needs from another stage, as a word, whether or not it is in the table."""
    stage, kind, m = re.fullmatch(r"(\d+)([FB])(\d+)", word).groups()
    return f"{int(stage) + (-1 if kind == 'F' else 1)}{kind}{m}"


# 4.1


def has_cycle(rows):
    """By sorting all actions topologically: each behind the one on its left, and its maker."""
    words = {word for row in rows for word in row}
    graph = {word: {maker(word)} & words for word in words}
    for row in rows:
        for left, word in zip(row, row[1:], strict=False):
            graph[word].add(left)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError:
        return True
    return False


def as_words(found, case):
    if found is None:
        return []
    if isinstance(found, str) or not isinstance(found, (list, tuple)):
        raise Wrong(f"case: {case}\na list of actions is asked for, such as ['0B0', '1F1'], or []; "
                    f"yours is {found!r:.80}")  # fmt: skip
    return [str(word) for word in found]


def expect_cycle(answer, rows):
    case = shown(rows)
    found = as_words(answer(copied(rows)), case)
    if not has_cycle(rows):
        expect(found, [], f"{case}\nnobody is stuck")
        return
    if not found:
        raise Wrong(f"case: {case}\nthere is a cycle, but yours finds none")
    where = {word: (rank, place) for rank, row in enumerate(rows) for place, word in enumerate(row)}
    case = f"{case}\nyours: {found}"
    for word in found:
        if word not in where:
            raise Wrong(f"case: {case}\n{word} is no action of the table")
    if len(set(found)) < max(len(found), 2):
        raise Wrong(f"case: {case}\na cycle is of two actions or more, and names each once")
    for word, following in zip(found, [*found[1:], found[0]], strict=True):
        needed = maker(word)
        if needed not in where or where[needed][0] == where[word][0]:
            raise Wrong(f"case: {case}\n{word} waits for no other rank")
        rank, place = where[needed]
        if where[following][0] != rank or where[following][1] > place:
            raise Wrong(f"case: {case}\n{word} waits for {needed} (rank {rank}, place {place}); "
                        f"that is not {following}, nor does it stand behind it")  # fmt: skip


@part("4.1", "finds the cycle", 60)
def test_cycle_found(answer, rng):
    for text in STUCK:
        for case in (text, renumbered(text, rng)):
            expect_cycle(answer, split(case))


@part("4.1", "finds none where none is", 20)
def test_no_cycle(answer, rng):
    """Only for who finds one where one is: [] alone is no answer."""
    for text in (STUCK[0], *LEGAL, *MIXED):
        for case in (text, renumbered(text, rng)):
            expect_cycle(answer, split(case))


@part("4.1", "any table", 20)
def test_random_tables(answer, rng):
    """Rows in random order, but each forward before its backward."""
    for ranks, microbatches in ((2, 2), (2, 3), (3, 2), (3, 3)):
        for _ in range(8):
            expect_cycle(answer, [random_row(rank, microbatches, rng) for rank in range(ranks)])


def random_row(stage, microbatches, rng):
    numbers = [m for m in range(microbatches) for _ in "FB"]
    rng.shuffle(numbers)
    seen, row = set(), []
    for m in numbers:
        row.append(f"{stage}{'B' if m in seen else 'F'}{m}")
        seen.add(m)
    return row


# 4.2

LINE = re.compile(r"(\d+[FB]\d+)|(send|receive) (\d+[FB]\d+) (to|from) (\d+)")


def parsed(lowered, rows, case):
    """The programs as tuples (verb, word, other rank); Wrong for what is no program."""
    asked = 'a list of lines for each rank is asked for, such as [["0F0", "send 0F0 to 1"], …]'
    if not isinstance(lowered, (list, tuple)) or any(
            isinstance(lines, str) or not isinstance(lines, (list, tuple)) for lines in lowered):
        raise Wrong(f"case: {case}\n{asked}; yours is {lowered!r:.200}")
    if len(lowered) != len(rows):
        raise Wrong(f"case: {case}\n{len(rows)} programs are asked for, yours are {len(lowered)}")
    result = []
    for rank, lines in enumerate(lowered):
        program = []
        for line in lines:
            match = LINE.fullmatch(" ".join(str(line).split()))
            if not match or (match[2] and (match[2] == "send") != (match[4] == "to")):
                raise Wrong(f"case: {case}\nrank {rank} has the line {str(line)!r:.60}; a line is "
                            "like '0F0', 'send 0F0 to 1' or 'receive 1B0 from 1'")  # fmt: skip
            if match[2] and not int(match[5]) < len(rows):
                raise Wrong(f"case: {case}\nrank {rank}, '{line}': there is no rank {match[5]}")
            if match[2] and int(match[5]) == rank:
                raise Wrong(f"case: {case}\nrank {rank}, '{line}': a rank needs no message to "
                            "itself")  # fmt: skip
            program.append((match[2] or "do", match[1] or match[3], int(match[5] or 0)))
        done = [word for verb, word, _ in program if verb == "do"]
        expect(done, rows[rank], f"{case}\nthe actions in the program of rank {rank}")
        result.append(program)
    return result


def execute(programs, rows, case):
    """Run the programs: sends go on at once, receives wait, a connection is a queue."""
    words = {word for row in rows for word in row}
    wires, known = defaultdict(deque), [set() for _ in rows]
    at, moved = [0] * len(rows), True

    def line(rank):
        verb, word, other = programs[rank][at[rank]]
        text = {"do": word, "send": f"send {word} to {other}"}
        return f"rank {rank}, line {at[rank]} ({text.get(verb, f'receive {word} from {other}')})"

    def wrong(rank, reason):
        listed = "\n".join(
            f"  rank {number}: " + " · ".join(
                {"do": w, "send": f"send {w} to {o}"}.get(v, f"receive {w} from {o}")
                for v, w, o in program)
            for number, program in enumerate(programs))  # fmt: skip
        raise Wrong(f"case: {case}\nyour programs:\n{listed}\n{line(rank)}: {reason}"[:3000])

    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program):
                verb, word, other = program[at[rank]]
                if verb == "receive":
                    if not wires[other, rank]:
                        break
                    came = wires[other, rank].popleft()
                    if came != word:
                        wrong(rank, f"but what comes next from rank {other} is {came}")
                elif verb == "send" and word not in known[rank]:
                    wrong(rank, f"{word} has not been computed here before")
                elif verb == "do":
                    needed = {maker(word)} & words
                    if needed - known[rank]:
                        wrong(rank, f"{maker(word)} is not there yet")
                if verb == "send":
                    wires[rank, other].append(word)
                else:
                    known[rank].add(word)
                at[rank] += 1
                moved = True
    for rank, program in enumerate(programs):
        if at[rank] < len(program):
            wrong(rank, "it waits for ever; nothing more is under way to it")
    for (source, target), left in wires.items():
        if left:
            at[source] = programs[source].index(("send", left[0], target))
            wrong(source, f"rank {target} never receives it")


def expect_runs(answer, text):
    rows = split(text)
    case = shown(rows)
    execute(parsed(answer(copied(rows)), rows, case), rows, case)


@part("4.2", "a stage a rank", 60)
def test_lowered(answer, rng):
    for text in (ONE_RANK, PAIR, GPIPE, ONE_F_ONE_B):
        for case in (text, renumbered(text, rng)):
            expect_runs(answer, case)


@part("4.2", "several stages a rank", 40)
def test_lowered_chunks(answer, rng):
    for text in (TWO_STAGES, V_SHAPE, LOOP):
        for case in (text, renumbered(text, rng)):
            expect_runs(answer, case)


# 4.3


def expect_order(answer, text):
    rows = split(text)
    program = mp.lower(mp.Schedule(rows))
    for source in range(len(rows)):
        for target in range(len(rows)):
            if source == target:
                continue
            sent = program.channel(source, target)
            right = [f"{message.stage}{message.kind}{message.microbatch}" for message in sent]
            case = f"{shown(rows)}\nsource {source}, target {target}"
            found = as_words(answer(copied(rows), source, target), case)
            expect(found, right, case)


@part("4.3", "a stage a rank", 60)
def test_receive_order(answer, rng):
    for text in (PAIR, GPIPE, MIXED[0], MIXED[1], ONE_F_ONE_B):
        for case in (text, renumbered(text, rng)):
            expect_order(answer, case)


@part("4.3", "several stages a rank", 40)
def test_receive_order_chunks(answer, rng):
    for text in (V_SHAPE, LOOP, MIXED[2]):
        for case in (text, renumbered(text, rng)):
            expect_order(answer, case)


# 4.4

NAMES = (
    "both send first", "dropped handle", "forgotten detach", "gradients not cleared",
    "micro-batch left out", "missing 1/M", "swapped order", "wrong peer",
)  # fmt: skip
# Not in plain words, so that a look at this file does not spoil the hunt.
RIGHT = {
    "A": "4455f5d2f4b5",
    "B": "087026cc6e8f",
    "C": "25477ba87094",
    "D": "536b2f2ef274",
    "E": "2b0203997ad0",
}


def sealed(letter, name):
    return hashlib.sha256(f"the zoo of lesson 4: {letter} is {name}".encode()).hexdigest()[:12]


def expect_named(faults, letters):
    if not isinstance(faults, dict):
        raise Wrong('a dictionary such as {"A": "…", "B": "…"} is asked for, yours is '
                    f"{kind(faults)}")  # fmt: skip
    for letter in "ABCDE":
        if letter not in faults:
            raise Wrong(f"program {letter} is missing in your dictionary")
        if faults.get(letter) not in NAMES:
            raise Wrong(f"program {letter}: {faults.get(letter)!r} is none of the names: "
                        f"{', '.join(map(repr, NAMES))}")  # fmt: skip
    wrong = sum(sealed(letter, faults[letter]) != RIGHT[letter] for letter in letters)
    if wrong:
        listed = "\n".join(f"  {letter}: {faults[letter]}" for letter in letters)
        raise Wrong(f"not the fault of {wrong} of {len(letters)}:\n{listed}")


@part("4.4", "what hangs", 40)
def test_hanging(answer):
    expect_named(answer, "AC")


@part("4.4", "what raises", 20)
def test_raising(answer):
    expect_named(answer, "D")


@part("4.4", "what is silently wrong", 40)
def test_silent(answer):
    expect_named(answer, "BE")


# 4.5

COLLECTIVES = [f"torch.distributed:{name}" for name in (
    "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "broadcast",
    "all_to_all", "all_to_all_single", "gather", "scatter", "reduce", "reduce_scatter",
)]  # fmt: skip
SHAPES = ((1,), (3, 2), (300, 200))


def ring(rank, answer, ranks, late):
    """What an answer returns on this rank for each shape. late: rank 1 comes later than the others,
    and `mine` is overwritten as soon as the answer has returned."""
    import time

    import torch

    results = []
    for shape in SHAPES[1:2] if late else SHAPES:
        mine = torch.full(shape, float(rank + 1), dtype=torch.float64)
        if late and rank == 1:
            time.sleep(0.3)
        with refusing(*COLLECTIVES, why="a ring is made of sends and receives"):
            got = answer(mine, rank, ranks)
        if late:
            mine.fill_(-1)
        if isinstance(got, torch.Tensor):
            got = got.flatten()[:4].clone() if tuple(got.shape) == shape else got.shape
        results.append(got)
    return results


def on_ring(answer, ranks, late=False):
    import torch

    if not callable(answer):
        raise Wrong(f"shift must be a function, yours is {kind(answer)}")
    seen = mp.launch(ring, answer, ranks, late, ranks=ranks, timeout=5, threads=1)
    for number, shape in enumerate(SHAPES[1:2] if late else SHAPES):
        for rank in range(ranks):
            case = f"ranks: {ranks}, shape {shape}, rank r sends r + 1; returned on rank {rank}"
            if late:
                case += ",\nwhere all overwrite `mine` with -1 after `shift` has returned"
            got, size = seen[rank][number], min(4, torch.Size(shape).numel())
            if isinstance(got, torch.Size):
                raise Wrong(f"case: {case}\nshape {shape} is asked for, yours has {tuple(got)}")
            right = torch.full((size,), float((rank - 1) % ranks + 1), dtype=torch.float64)
            expect(got, right, f"{case} (the first elements)")


@part("4.5", "the tensors arrive", 60)
def test_ring(answer):
    on_ring(answer, 2)
    on_ring(answer, 3)


@part("4.5", "mine may be overwritten", 40)
def test_ring_overwritten(answer):
    on_ring(answer, 3, late=True)
