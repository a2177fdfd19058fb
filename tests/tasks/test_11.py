"""Tasks of lesson 11: where to cut."""

from fractions import Fraction
from itertools import combinations

from minipipe.costs import Costs
from minipipe.schedule import Schedule
from minipipe.simulate import simulate
from minipipe.teach.testing import Wrong, expect, kind, part


def counts_of(counts, total, stages, case, what="layers"):
    """An answer's numbers of layers as a list of ints; Wrong where they are no cut."""
    asked = f"{stages} whole numbers are asked for, in a list, that add up to {total} {what}"
    if not isinstance(counts, (list, tuple)):
        raise Wrong(f"case: {case}\n{asked}\nyours is {kind(counts)}")
    for count in counts:
        if isinstance(count, bool) or not hasattr(count, "__index__"):
            raise Wrong(f"case: {case}\n{asked}\nyours: {counts!r:.200}")
    counts = [int(count) for count in counts]
    if len(counts) != stages or sum(counts) != total:
        raise Wrong(f"case: {case}\n{asked}\nyours: {counts!r:.200}: {len(counts)} numbers, "
                    f"{sum(counts)} {what}")  # fmt: skip
    if min(counts) < 1:
        raise Wrong(f"case: {case}\nno stage may be without {what}\nyours: {counts}")
    return counts


def cuts(total, stages):
    """All ways to cut."""
    for ends in combinations(range(1, total), stages - 1):
        yield [b - a for a, b in zip((0, *ends), (*ends, total), strict=True)]


def slowest(costs, counts):
    ends = [sum(counts[: stage + 1]) for stage in range(len(counts))]
    return max(sum(costs[end - count : end]) for end, count in zip(ends, counts, strict=True))


# 11.1


def balanced(answer, costs, stages, least=None):
    case = f"costs={costs}, stages={stages}"
    counts = counts_of(answer(list(costs), stages), len(costs), stages, case)
    right = min(cuts(len(costs), stages), key=lambda c: slowest(costs, c)) if least is None else ""
    least = slowest(costs, right) if least is None else least
    mine = slowest(costs, counts)
    if mine > least * (1 + 1e-9):
        shown = f", with {right}" if right else ""
        raise Wrong(f"case: {case}\nthe slowest stage can take {least}{shown}\n"
                    f"with yours, {counts}, it takes {mine}")  # fmt: skip


def drawn(rng, layers):
    return [rng.choice((0, 1, 1, 2, 3, 5, 9)) for _ in range(layers)]


@part("11.1", "a cut", 20)
def test_is_a_cut(answer, sizes):
    for layers, stages in sizes((1, 1), (2, 1), (2, 2), (3, 2), (5, 3), (9, 9), (12, 5),
                                only=lambda layers, stages: stages <= layers):  # fmt: skip
        costs = [1 + layer % 3 for layer in range(layers)]
        case = f"costs={costs}, stages={stages}"
        counts_of(answer(list(costs), stages), layers, stages, case)


@part("11.1", "slowest stage as fast as possible", 50)
def test_balance(answer, rng, sizes):
    for costs, stages in (([3], 1), ([1, 3], 2), ([1, 1, 2], 2), ([3, 1, 1, 1], 2),
                          ([1, 1, 1, 3], 2), ([4, 1, 1, 1, 1, 4], 3), ([2, 2, 2, 1, 1, 1, 3], 3),
                          ([0, 0, 5, 0, 0], 3), ([1, 5, 1, 1, 1, 1], 3),
                          ([0.5, 0.25, 0.25, 1.0, 0.5], 2)):  # fmt: skip
        balanced(answer, costs, stages)
    for layers, stages in sizes((6, 2), (8, 4), (11, 3), (12, 5),
                                only=lambda layers, stages: stages <= layers):  # fmt: skip
        for _ in range(5):
            balanced(answer, drawn(rng, layers), stages)


@part("11.1", "many layers", 30)
def test_many(answer, rng):
    """Stages that cost 60 each are put together, so that no cut is better than 60."""
    for stages, most in ((4, 9), (8, 15)):
        costs = []
        for stage in range(stages):
            layers = 1 if stage == 0 else most - rng.randint(0, 2)
            ends = sorted(rng.sample(range(1, 60), layers - 1))
            costs += [b - a for a, b in zip((0, *ends), (*ends, 60), strict=True)]
        balanced(answer, costs, stages, 60)


# 11.2

TABLES = [Schedule.parse(text) for text in (
    "0F0 0B0\n1F0 1B0",
    "0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1",
    "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2",
    "0F0 0F1 0F2 0F3 0B3 0B2 0B1 0B0\n1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0",
    "0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3\n1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3\n"
    "2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3",
    "0F0 0F1 0F2 0F3 0B0 0F4 0B1 0F5 0B2 0B3 0B4 0B5\n"
    "1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 1F5 1B3 1B4 1B5\n"
    "2F0 2F1 2B0 2F2 2B1 2F3 2B2 2F4 2B3 2F5 2B4 2B5\n"
    "3F0 3B0 3F1 3B1 3F2 3B2 3F3 3B3 3F4 3B4 3F5 3B5")]  # fmt: skip


def placed(answer, schedule, embedding, head, blocks):
    p = schedule.ranks
    rows = "\n      ".join(str(schedule).splitlines())
    case = f"embedding={embedding}, head={head}, blocks={blocks}, schedule:\n      {rows}"

    def makespan(counts):
        times = list(counts)
        times[0], times[-1] = times[0] + embedding, times[-1] + head
        return simulate(schedule, Costs(times, times, times)).makespan

    counts = counts_of(answer(schedule, embedding, head, blocks), blocks, p, case, "blocks")
    mine, (least, best) = makespan(counts), min((makespan(c), c) for c in cuts(blocks, p))
    if mine > least:
        raise Wrong(f"case: {case}\nexpected: {best}, makespan {least}\n"
                    f"yours:    {counts}, makespan {mine}")  # fmt: skip


@part("11.2", "two stages", 50)
def test_two(answer):
    for schedule in TABLES[:4]:
        for embedding, head, blocks in ((0, 0, 2), (0, 0, 4), (0, 1, 4), (1, 0, 4), (0, 2, 5),
                                        (Fraction(1, 2), Fraction(5, 2), 6)):  # fmt: skip
            placed(answer, schedule, embedding, head, blocks)


@part("11.2", "more stages", 50)
def test_more(answer, sizes, rng):
    for place, blocks in sizes((4, 3), (4, 7), (5, 6), (5, 10)):
        for _ in range(2):
            placed(answer, TABLES[place], rng.randint(0, 2), rng.randint(0, 4), max(blocks, 4))
        placed(answer, TABLES[place], 1, 1, max(blocks, 4))


# 11.3

GPIPE = [Schedule.parse(text) for text in (
    "0F0 0B0",
    "0F0 0F1 0F2 0B0 0B1 0B2",
    "0F0 0B0\n1F0 1B0",
    "0F0 0F1 0B0 0B1\n1F0 1F1 1B0 1B1",
    "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1 1F2 1B0 1B1 1B2",
    "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3\n"
    "2F0 2F1 2F2 2F3 2B0 2B1 2B2 2B3",
    "0F0 0F1 0F2 0F3 0F4 0F5 0B0 0B1 0B2 0B3 0B4 0B5\n"
    "1F0 1F1 1F2 1F3 1F4 1F5 1B0 1B1 1B2 1B3 1B4 1B5\n"
    "2F0 2F1 2F2 2F3 2F4 2F5 2B0 2B1 2B2 2B3 2B4 2B5\n"
    "3F0 3F1 3F2 3F3 3F4 3F5 3B0 3B1 3B2 3B3 3B4 3B5")]  # fmt: skip


def uneven(answer, rng):
    """Cases from small to large: the answer's result, the simulated timeline, the case."""
    for schedule in GPIPE:
        p, m = schedule.ranks, schedule.microbatches
        for proportional in (True, True, False, False):
            forward = [rng.randint(1, 5) for _ in range(p)]
            backward = [2 * f if proportional else rng.randint(1, 9) for f in forward]
            case = f"forward={forward}, backward={backward}, microbatches={m}"
            result = answer(list(forward), list(backward), m)
            if not isinstance(result, (tuple, list)) or len(result) != 2:
                raise Wrong(f"case: {case}\ntwo values are asked for, the makespan and the list of "
                            f"idle shares; yours: {result!r:.200}")  # fmt: skip
            yield result, simulate(schedule, Costs(forward, backward, 0)), case


@part("11.3", "makespan", 60)
def test_makespan(answer, rng):
    for result, t, case in uneven(answer, rng):
        expect(result[0], t.makespan, f"{case}: the makespan")


@part("11.3", "idle shares", 40)
def test_idle(answer, rng):
    for result, t, case in uneven(answer, rng):
        work = [0] * t.schedule.ranks
        for span in t.spans:
            work[span.rank] += span.end - span.start
        shares = [1 - Fraction(each) / Fraction(t.makespan) for each in work]
        expect(result[1], shares, f"{case}: the idle shares")
