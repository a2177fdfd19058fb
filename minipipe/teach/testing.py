"""What tests of tasks are written with: parts, the smallest failing case, pictures of tables.

    from minipipe.teach.testing import expect, part, table

    @part("2.2", "counts", 60)
    def test_bubble(answer, sizes):
        for ranks, microbatches in sizes((1, 1), (2, 3), (4, 6)):
            case = f"ranks={ranks}, microbatches={microbatches}"
            expect(answer(ranks, microbatches), Fraction(ranks - 1, …), case)

Cases go from small to large, so that the first failing one is the smallest. `answer` is the
function or table of the task's name; `answer_module` all that the cell defines; `sizes` adds
hidden cases where the grader has set a seed; `rng` is a random.Random of that seed.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from numbers import Number
from typing import Any
from unittest import mock

import pytest

from minipipe.actions import ScheduleError
from minipipe.check import check
from minipipe.costs import Costs
from minipipe.schedule import Schedule
from minipipe.simulate import simulate


class Wrong(AssertionError):
    """An answer is wrong: the text is for the student; `picture` a PNG to show with it."""

    def __init__(self, text: str, picture: bytes | None = None):
        super().__init__(text)
        self.picture = picture


def part(task: str, name: str, share: int) -> Callable:
    """Mark a test as one of a task's: all tests of a part have to pass for its share, in percent
    of the task's points. Tests of one part name the same share."""
    return pytest.mark.part(task=task, name=name, share=share)


def expect(got: Any, expected: Any, case: str = "", tolerance: float = 1e-9) -> None:
    """Raise Wrong where `got` is not `expected`: numbers and tensors up to `tolerance`, relative
    to the expected value's largest element; everything else by ==."""
    difference = _difference(got, expected, tolerance)
    if difference is not None:
        shown = f"expected: {_short(expected)}\nyours:    {_short(got)}"
        raise Wrong("\n".join(filter(None, [f"case: {case}" if case else "", shown, difference])))


def _difference(got: Any, expected: Any, tolerance: float) -> str | None:
    """What differs, in words; "" where the values themselves say it; None where nothing does."""
    if type(expected).__module__.partition(".")[0] == "torch":
        return _tensor_difference(got, expected, tolerance)
    if isinstance(expected, (list, tuple)):
        if not isinstance(got, (list, tuple)):
            return f"{kind(expected)} is asked for, yours is {kind(got)}"
        if len(got) != len(expected):
            return f"its length has to be {len(expected)}, and is {len(got)}"
        for place, (mine, right) in enumerate(zip(got, expected, strict=True)):
            found = _difference(mine, right, tolerance)
            if found is not None:
                return f"the first difference is at place {place}" + (f": {found}" if found else "")
        return None
    if isinstance(expected, Number) and not isinstance(expected, bool):
        if isinstance(got, bool) or not isinstance(got, Number):
            return f"a number is asked for, yours is {kind(got)}"
        near = math.isclose(got, expected, rel_tol=tolerance, abs_tol=tolerance * 1e-3)
        return None if near else ""
    try:
        same = type(got) is not type(NotImplemented) and bool(got == expected)
    except Exception as error:
        return f"yours can't be compared: {type(error).__name__}"
    return None if same else ""


def _tensor_difference(got: Any, expected: Any, tolerance: float) -> str | None:
    import torch

    if not isinstance(got, torch.Tensor):
        return f"a tensor is asked for, yours is {kind(got)}"
    if got.shape != expected.shape:
        return f"shape {tuple(expected.shape)} is asked for, yours has {tuple(got.shape)}"
    if not got.numel():
        return None
    left, right = got.detach().to(torch.float64), expected.detach().to(torch.float64)
    far = (left - right).abs().max().item()
    scale = max(right.abs().max().item(), 1e-3)
    if far <= tolerance * scale:  # false for nan too
        return None
    return f"the largest difference is {far:.3g}, the largest element expected {scale:.3g}"


def kind(value: Any) -> str:
    """What a value is, for a message: `a list`, `an int`."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _short(value: Any, most: int = 400) -> str:
    try:
        text = str(value) if isinstance(value, (Schedule, Number)) else repr(value)
    except Exception as error:
        text = f"{kind(value)} whose repr raises {type(error).__name__}"
    return text if len(text) <= most else text[:most] + " …"


def table(rows: Any, case: str, right: Schedule | None = None) -> Schedule:
    """An answer's rows as a legal schedule; Wrong says why they are none, with a picture.

    rows: lists of actions or of their text, text, or a Schedule. right: a right table of the same
    sizes, drawn above the answer's with the first wrong cell marked.
    """
    asked = 'rows are asked for: a list of lists such as [["0F0", "0B0"], …]'
    if not isinstance(rows, (str, list, tuple, Schedule)):
        more = ": return the rows, printing doesn't count" if rows is None else ""
        raise Wrong(f"case: {case}\n{asked}; yours is {kind(rows)}{more}")
    try:
        if isinstance(rows, str):
            schedule = Schedule.parse(rows)
        else:
            schedule = rows if isinstance(rows, Schedule) else Schedule(rows)
    except (ScheduleError, TypeError) as error:
        raise Wrong(f"case: {case}\n{asked}\n{error}") from None
    try:
        check(schedule)
    except ScheduleError as error:
        raise wrong_table(f"not a legal schedule: {error}", case, schedule, right) from None
    return schedule


def wrong_table(reason: str, case: str, schedule: Schedule, right: Schedule | None) -> Wrong:
    """Wrong with a table over a right one, the first wrong cell marked, and the reason."""
    from minipipe.teach.pictures import first_difference, two_tables

    lines = [f"case: {case}", reason]
    if right is not None:
        where = first_difference(schedule, right)
        if where:
            lines.append("the first cell that differs from a right table (yours may differ and "
                         f"still be right): row {where[0]}, place {where[1]}")  # fmt: skip
        lines += ["a right table:", *_indented(right)]
    lines += ["yours:", *_indented(schedule)]
    return Wrong("\n".join(lines), two_tables(schedule, right, f"{case}: {reason}"))


def _indented(schedule: Schedule) -> list[str]:
    lines = [f"  {line[:200]}{' …' if len(line) > 200 else ''}"
             for line in str(schedule).splitlines()]  # fmt: skip
    return lines[:16] + ([f"  … {len(lines) - 16} more rows"] if len(lines) > 16 else [])


def has_all(schedule: Schedule, ranks: int, microbatches: int, kinds: str, case: str,
            right: Schedule | None = None, stages: int | None = None) -> None:  # fmt: skip
    """Wrong where the table has not exactly the actions of `kinds`, such as "FB" or "FIW", of each
    of `stages` stages (as many as ranks) and each micro-batch, or not as many rows as ranks."""
    stages = ranks if stages is None else stages
    if schedule.ranks != ranks:
        raise wrong_table(f"{ranks} rows are asked for, one a rank; yours has {schedule.ranks}",
                          case, schedule, right)  # fmt: skip
    asked = {f"{s}{k}{m}" for s in range(stages) for k in kinds for m in range(microbatches)}
    mine = {str(part) for row in schedule.rows for action in row for part in action.parts}
    missing, extra = sorted(asked - mine), sorted(mine - asked)
    if missing:
        raise wrong_table(f"missing: {', '.join(missing[:8])}", case, schedule, right)
    if extra:
        raise wrong_table(f"not asked for: {', '.join(extra[:8])}", case, schedule, right)


def within(schedule: Schedule, case: str, right: Schedule | None = None, *, makespan=None,
           peaks=None, costs: Costs | None = None, memory_limit=None) -> None:  # fmt: skip
    """Wrong where the simulated table takes longer than `makespan`, keeps more than peaks[rank] on
    a rank, or more than memory_limit on any. In the units of `costs` (F = I = W = 1, latency 0)."""
    t = simulate(schedule, costs or Costs())
    if makespan is not None and t.makespan > makespan:
        raise wrong_table(f"it takes {_short(t.makespan)} units; {_short(makespan)} is possible",
                          case, schedule, right)  # fmt: skip
    for rank, kept in enumerate(t.peak_activations):
        most = memory_limit if peaks is None else peaks[rank]
        if most is not None and kept > most:
            reason = (f"rank {rank} keeps the activations of {_short(kept)} micro-batches at once; "
                      f"{_short(most)} suffice")  # fmt: skip
            raise wrong_table(reason, case, schedule, right)


def not_one_at_a_time(schedule: Schedule, case: str, right: Schedule | None = None) -> None:
    """Wrong where rank 0 of several does its first backward before it begins a second micro-batch:
    that is the naive order, however little it keeps."""
    begun = set()
    for action in schedule.rows[0]:
        if action.kind != "F":
            break
        begun.add(action.microbatch)
    if schedule.ranks > 1 and schedule.microbatches > 1 and len(begun) < 2:
        reason = "rank 0 begins no second micro-batch before the first is back, as in naive"
        raise wrong_table(reason, case, schedule, right)


_launched: dict[tuple, Any] = {}  # an answer is loaded anew for each test; equal code runs once


def run_on_ranks(fn: Callable, answer: Any, ranks: int, timeout: float = 5.0) -> list[Any]:
    """What fn(rank, answer) returned on each rank; Wrong where the ranks wait for ever."""
    from minipipe.ranks.launch import RankError, RankTimeout, launch

    key = fn, ranks, getattr(answer, "__code__", id(answer))
    if key not in _launched:
        try:
            _launched[key] = launch(fn, answer, ranks=ranks, timeout=timeout)
        except RankTimeout as error:
            waits = "the ranks wait for each other, or for what nobody sends:"
            _launched[key] = Wrong(f"{waits}\n{error}")
        except RankError as error:
            _launched[key] = error
    if isinstance(_launched[key], Exception):
        raise _launched[key]
    return _launched[key]


@contextlib.contextmanager
def refusing(*names: str, why: str = "the task is to do it by hand") -> Iterator[None]:
    """In this block "module:name" can't be called by anyone; for use inside ranks too, where a
    task's `forbids` does not reach."""
    import importlib

    def refuse(name: str) -> Callable:
        def refused(*_: Any, **__: Any) -> None:
            raise Wrong(f"{name.replace(':', '.')} may not be used here: {why}")

        return refused

    with contextlib.ExitStack() as stack:
        for name in names:
            module, _, attribute = name.partition(":")
            for owner in (module, *HOMES.get(module, ())):
                if hasattr(found := importlib.import_module(owner), attribute):
                    stack.enter_context(mock.patch.object(found, attribute, refuse(name)))
        yield


# Where else the functions of a module can be had.
HOMES = {"torch.distributed": ("torch.distributed.distributed_c10d",
                               "torch.distributed._functional_collectives")}  # fmt: skip
