"""Tasks of lesson 7: interleaved 1F1B, its messages, and the latency at which it stops paying."""

from fractions import Fraction
from numbers import Real

from minipipe.costs import Costs
from minipipe.lower import lower
from minipipe.schedule import Schedule
from minipipe.simulate import simulate
from minipipe.teach.testing import (
    Wrong,
    expect,
    has_all,
    kind,
    not_one_at_a_time,
    part,
    table,
    within,
    wrong_table,
)

# (ranks, chunks): the stages of each rank, as cards are dealt
PLACES = {
    (1, 1): [[0]],
    (1, 3): [[0, 1, 2]],
    (2, 2): [[0, 2], [1, 3]],
    (3, 2): [[0, 3], [1, 4], [2, 5]],
    (4, 2): [[0, 4], [1, 5], [2, 6], [3, 7]],
    (4, 4): [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
}  # fmt: skip


def goes_round(holders, ranks):
    """A reason, if the stages' ranks don't go round: each stage is on the next rank after that of
    the stage before it, and behind the last rank comes the first; "" if they do."""
    before = ranks - 1
    for stage, rank in enumerate(holders):
        asked = before + 1 if before + 1 < ranks else 0
        if rank != asked:
            after = f"stage {stage - 1} is on rank {before}, so " if stage else ""
            return f"{after}stage {stage} has to be on rank {asked}; yours is on {rank!s:.60}"
        before = asked
    return ""


def hands_go_round(hands, stages):
    """The same for a list of stages of each rank."""
    holders = [[rank for rank, held in enumerate(hands) if stage in held]
               for stage in range(stages)]  # fmt: skip
    several = (" and ".join(map(str, ranks)) or "none" for ranks in holders)
    return goes_round([ranks[0] if len(ranks) == 1 else text
                       for ranks, text in zip(holders, several, strict=True)], len(hands))


@part("7.1", "the stages of a rank", 60)
def test_stages(answer, sizes):
    for ranks, chunks in sizes(*PLACES):
        hands = []
        for rank in range(ranks):
            case = f"stages_of(rank={rank}, ranks={ranks}, chunks={chunks})"
            got = answer(rank, ranks, chunks)
            if not isinstance(got, list):
                raise Wrong(f"case: {case}\na list is asked for, yours is {kind(got)}")
            if (ranks, chunks) in PLACES:
                expect(got, PLACES[ranks, chunks][rank], case)
            elif len(got) != chunks or got != sorted(got):
                raise Wrong(f"case: {case}\n{chunks} stages are asked for, ascending\n"
                            f"yours:    {got}")  # fmt: skip
            hands.append(got)
        reason = hands_go_round(hands, ranks * chunks)
        if reason:
            raise Wrong(f"case: ranks={ranks}, chunks={chunks}\n{reason}\nyours:    {hands}")


@part("7.1", "the rank of a stage", 40)
def test_rank(answer, answer_module, sizes):
    function = getattr(answer_module, "rank_of", None)
    if not callable(function):
        raise Wrong("the cell must define the function `rank_of` too; it does not")
    for ranks, chunks in sizes(*PLACES):
        for rank, stages in enumerate(PLACES.get((ranks, chunks), ())):
            for stage in stages:
                expect(function(stage, ranks), rank, f"rank_of(stage={stage}, ranks={ranks})")
        reason = goes_round([function(stage, ranks) for stage in range(ranks * chunks)], ranks)
        if reason:
            raise Wrong(f"case: rank_of(stage, ranks={ranks})\n{reason}")


# ranks, groups of as many micro-batches, chunks
LOOPS = ((1, 1, 2), (1, 2, 2), (2, 1, 2), (2, 2, 2), (3, 1, 2), (3, 2, 3), (4, 2, 2), (4, 3, 4))


def made(answer, right, p, groups, v):
    m = p * groups
    case = f"ranks={p}, microbatches={m}, chunks={v}"
    shown = right(ranks=p, microbatches=m, chunks=v)
    rows = table(answer(p, m, v), case, shown)
    has_all(rows, p, m, "FB", case, shown, stages=p * v)
    reason = hands_go_round([rows.stages_of(rank) for rank in range(p)], p * v)
    if reason:
        raise wrong_table(f"dealt round the ranks: {reason}", case, rows, shown)
    return rows, m, case, shown


@part("7.2", "right order", 60)
def test_order(answer, right, sizes):
    """Legal, on looped stages, not one micro-batch at a time, and 1F1B: who has forwards left after
    the longest warm-up that is of use does some after the first backward."""
    for p, groups, v in sizes(*LOOPS):
        rows, m, case, shown = made(answer, right, p, groups, v)
        not_one_at_a_time(rows, case, shown)
        for rank, row in enumerate(rows.rows):
            kinds = "".join(action.kind for action in row)
            enough = (v - 1) * p + 2 * (p - 1 - rank) + 1 < m * v
            if enough and "F" not in kinds[kinds.index("B") :]:
                reason = f"rank {rank} does all its forwards before its first backward"
                raise wrong_table(reason, case, rows, shown)


@part("7.2", "within memory", 20)
def test_memory(answer, right, sizes):
    for p, groups, v in sizes(*LOOPS):
        rows, m, case, shown = made(answer, right, p, groups, v)
        kept = [min(m * v, (v - 1) * p + 2 * (p - 1 - rank) + 1) for rank in range(p)]
        within(rows, case, shown, peaks=[Fraction(chunks, v) for chunks in kept])


@part("7.2", "within bubble", 20)
def test_bubble(answer, right, sizes):
    """The bubble is 1F1B's, divided by the number of chunks."""
    for p, groups, v in sizes(*LOOPS):
        rows, m, case, shown = made(answer, right, p, groups, v)
        within(rows, case, shown, makespan=3 * m + Fraction(3 * (p - 1), v))


def all_forward_all_back(place, microbatches, kinds="B"):
    """Rows as lists of text: all of a stage, then all of the next one. place: the stages' ranks."""
    rows = [[] for _ in {*place}]
    for letter in f"F{kinds}":
        for stage, rank in sorted(enumerate(place), reverse=letter != "F"):
            rows[rank] += [f"{stage}{letter}{m}" for m in range(microbatches)]
    return rows


# the ranks of stage 0, 1, …; micro-batches; kinds of the backward
COUNTED = (
    ((0,), 2, "B"), ((0, 1), 1, ""), ((0, 1), 1, "B"), ((0, 1), 2, "B"), ((0, 1, 2), 1, "B"),
    ((0, 1, 0, 1), 2, "B"), ((0, 0, 0), 2, "B"), ((0, 1, 1, 0), 2, "B"),
    ((0, 1, 2, 2, 1, 0), 4, "B"), ((0, 1, 0, 1), 2, "IW"), ((0, 1, 2, 3) * 3, 8, "IW"),
    ((0, 1, 2, 3, 3, 2, 1, 0) * 2, 4, "IW"),
)  # fmt: skip


def counts(answer, rng):
    """Cases with the answer's counts and the right ones, by the package's own lowering."""
    cases = list(COUNTED)
    for _ in range(3):
        ranks = rng.randint(2, 5)
        once = rng.sample(range(ranks), ranks)
        place = rng.choice((once * rng.randint(1, 4), once + once[::-1], [*once, *once[1:]]))
        cases.append((tuple(place), rng.randint(1, 6), "B"))
    for place, microbatches, kinds in cases:
        rows = all_forward_all_back(place, microbatches, kinds)
        shown = "\n".join(" ".join(row) for row in rows)
        case = f"the rows\n{shown if len(shown) < 400 else shown[:400] + ' …'}"
        right = {}
        for (_, _, source, target), number in lower(Schedule(rows)).routes().items():
            right[source, target] = right.get((source, target), 0) + number
        got = answer([list(row) for row in rows])
        if not isinstance(got, dict) or not all(isinstance(n, int) for n in got.values()):
            raise Wrong(f"case: {case}\na dictionary {{(source, target): number}} is asked for; "
                        f"yours is {kind(got)}, {str(got)[:200]}")  # fmt: skip
        yield case, got, right


@part("7.3", "how many", 50)
def test_number_of_messages(answer, rng):
    for case, got, right in counts(answer, rng):
        expect(sum(got.values()), sum(right.values()), f"messages in all, for {case}")


@part("7.3", "on which link", 50)
def test_links(answer, rng):
    for case, got, right in counts(answer, rng):
        if dict(got) != right:
            in_order = {link: right[link] for link in sorted(right)}
            raise Wrong(f"case: {case}\nexpected: {in_order}\nyours:    {dict(got)}")


INTERLEAVED = (
    "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3\n"
    "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
)
ONE_F_ONE_B = "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"


def pairs():
    """Names and two tables of the same work: one stage a rank, and several."""
    yield ("1F1B and interleaved, 2 ranks, 4 micro-batches, 2 chunks",
           Schedule.parse(ONE_F_ONE_B), Schedule.parse(INTERLEAVED))  # fmt: skip
    for ranks, microbatches, chunks in ((2, 2, 2), (2, 3, 3), (3, 3, 2), (4, 4, 2)):
        one, other = (Schedule(all_forward_all_back([*range(ranks)] * v, microbatches))
                      for v in (1, chunks))  # fmt: skip
        yield (f"all forward, then all backward, {ranks} ranks, {microbatches} micro-batches, "
               f"1 and {chunks} chunks", one, other)  # fmt: skip


def latency_of(answer, name, one, other, forward, backward):
    case = f"{name}, forward={forward}, backward={backward}"
    got = answer(one, other, forward, backward)
    if isinstance(got, bool) or not isinstance(got, Real) or not 0 <= got < 1e6:
        raise Wrong(f"case: {case}\na latency is asked for, a number of 0 or more; yours is "
                    f"{kind(got)}, {str(got)[:100]}")  # fmt: skip
    return case, Fraction(got)


def times(one, other, forward, backward, latency):
    costs = Costs(forward, Fraction(backward, 2), Fraction(backward, 2), latency=latency)
    return [simulate(schedule, costs).makespan for schedule in (one, other)]


def agree(answer, name, one, other, forward, backward):
    """At the latency both take equally long, up to a millionth; at each lower one `other` less."""
    case, latency = latency_of(answer, name, one, other, forward, backward)
    first, second = times(one, other, forward, backward, latency)
    shown = f"case: {case}\nyour latency: {float(latency):.7g}"
    if abs(first - second) > Fraction(1, 100_000) * (forward + backward):
        raise Wrong(f"{shown}\nthere the first takes {float(first):.7g}, the second "
                    f"{float(second):.7g}; equal times are asked for")  # fmt: skip
    for part_of in range(4):
        lower_one = latency * Fraction(part_of, 4)
        first, second = times(one, other, forward, backward, lower_one)
        if second >= first:
            raise Wrong(f"{shown}\nalready at {float(lower_one):.7g} the second isn't faster: "
                        "the smallest such latency is asked for")  # fmt: skip


@part("7.4", "1 and 2 units", 50)
def test_break_even(answer):
    for name, one, other in pairs():
        agree(answer, name, one, other, 1, 2)


@part("7.4", "other times", 30)
def test_other_times(answer, rng):
    cases = [(2, 2), (4, 6), (100, 200), (rng.randint(1, 9), rng.randint(1, 9))]
    tables = [*pairs()][:3]
    for forward, backward in cases:
        for name, one, other in tables:
            agree(answer, name, one, other, forward, backward)


@part("7.4", "no gain at all", 20)
def test_never_faster(answer):
    name, one, other = next(pairs())
    case, latency = latency_of(answer, f"the other way round: {name}", other, one, 1, 2)
    expect(float(latency), 0.0, f"{case}: the second isn't faster even without latency")
    case, latency = latency_of(answer, "a schedule and itself", other, other, 1, 2)
    expect(float(latency), 0.0, f"{case}: equally fast at each latency")
