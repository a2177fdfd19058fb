"""What several schedules are written with: actions by turns, and phases named by their pattern."""

import re
from itertools import count

from minipipe.actions import Action


def by_turns(forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], warm_up: int,
             back: str = "B", lag: int = 0) -> list[Action]:  # fmt: skip
    """One row: `warm_up` forwards, one forward and one backward by turns, the backwards left.

    forwards, backwards: (stage, micro-batch) in their order. back: the kinds of a backward: B, RB,
    or I, whose W then follows `lag` backwards later.
    """
    row = [Action(stage, "F", m) for stage, m in forwards[:warm_up]]
    weights = [Action(stage, "W", m) for stage, m in backwards] if back == "I" else []
    for step, (stage, m) in enumerate(backwards):
        row += [Action(s, "F", k) for s, k in forwards[warm_up + step : warm_up + step + 1]]
        row += [Action(stage, kind, m) for kind in back]
        row += weights[max(0, step - lag) : max(0, step - lag + 1)]
    return row + weights[max(0, len(weights) - lag) :]


def phases(stages: tuple[int, int], first: tuple[int, int],
           *patterns: tuple[int, str]) -> list[Action]:  # fmt: skip
    """One row from phases (how often, pattern), a pattern as a reader sees it in the figure.

    `F0 F1B0` is the forward of chunk 0 (which is the first of `stages`), then an overlapped pair;
    each chunk's micro-batches are counted up from `first`. `W1` is the oldest W of chunk 1 that is
    still due, `W` the oldest of both.
    """
    numbers = {(kind == "F", chunk): count(first[chunk]) for kind in "FB" for chunk in (0, 1)}
    due: list[Action] = []

    def action(kind: str, chunk: str) -> Action:
        if kind == "W":
            oldest = next(w for w in due if not chunk or w.stage == stages[int(chunk)])
            due.remove(oldest)
            return oldest
        made = Action(stages[int(chunk)], kind, next(numbers[kind == "F", int(chunk)]))
        if kind == "I":
            due.append(made._replace(kind="W"))
        return made

    row = []
    for times, pattern in patterns:
        for token in pattern.split() * times:
            one, *other = (action(*part) for part in re.findall(r"([FBIW])(\d?)", token))
            row.append(one._replace(overlapped=other[0]) if other else one)
    return row
