"""Published numbers beside the simulator's: `minipipe literature` prints them.

papers.json has what the papers say, as numbers and formulas, and why we differ where we do. Every
number on our side is simulated here; times are in units of the costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from minipipe.costs import Costs, Number, exact
from minipipe.schedules import build
from minipipe.simulate import simulate
from minipipe.timeline import Timeline, ratio

EQUAL, UNEQUAL = (1, 1, 1), (10, 12, 8)  # times of F, I and W


class Comparison(NamedTuple):
    """One published number and ours; `tolerance` is half of the last printed digit, 0 for formulas;
    `reason` says why they differ, where they do."""

    source: str
    evidence: str
    what: str
    published: Number
    ours: Number
    tolerance: Number = 0
    reason: str = ""

    @property
    def difference(self) -> Number:
        """ours - published."""
        return self.ours - self.published

    @property
    def equal(self) -> bool:
        """Whether the difference is within the tolerance."""
        return abs(self.difference) <= self.tolerance


def read() -> dict:
    """What the package knows of the papers."""
    return json.loads(Path(__file__).with_name("papers.json").read_text(encoding="utf-8"))


def left_out() -> dict[str, str]:
    """Published numbers that no schedule can be held against, and why."""
    return read()["left_out"]


def compare() -> list[Comparison]:
    """All numbers that a simulation can be held against, paper by paper."""
    papers, rows = read(), []
    for name, make in PAPERS.items():
        paper = papers[name]
        for what, published, ours, *more in make(paper):
            why, tolerance = more if len(more) == 2 else (*more, "", 0)[:2]
            row = Comparison(paper["source"], paper["evidence"], what, exact(published),
                             exact(ours), tolerance)  # fmt: skip
            why = "" if row.equal else paper.get("why", {}).get(why, "")
            rows.append(row._replace(reason=why))
    return rows


# Each paper: (what, published, ours), then the key of the reason and the tolerance.
Rows = Iterator[tuple]


def _run(name: str, ranks: int, microbatches: int, times: tuple = EQUAL,
         arguments: dict | None = None, **costs) -> Timeline:  # fmt: skip
    """A named schedule simulated; times: of F, I and W."""
    names = ("forward", "backward_input", "backward_weight")
    schedule = build(name, ranks=ranks, microbatches=microbatches, **arguments or {})
    return simulate(schedule, Costs(**dict(zip(names, times, strict=True)), **costs))


def _value(formula: str | Number, **names: Number) -> Number:
    """A formula of papers.json, which is the package's own, with exact numbers."""
    names = {name: Fraction(value) for name, value in names.items()}
    return eval(str(formula), {"__builtins__": {}, "min": min}, names)


def _own_idle(t: Timeline) -> Number:
    """The longest idle time within a rank's own span."""
    return max(waiting.inside for waiting in t.waiting)


def _gpipe(paper: dict) -> Rows:
    kept = {k: sum(_run("gpipe", k, 4, arguments={"recompute": True}).peak_activations)
            for k in (1, 8, 32, 128)}  # fmt: skip
    table = paper["table1_activations_GB"]
    for k in (8, 32, 128):
        published = table[str(k)] / table["1"]
        digits = published * (0.05 / table[str(k)] + 0.05 / table["1"])
        yield (f"Table 1, Transformer: activations of {k} accelerators / of one", published,
               ratio(kept[k], kept[1]), "table1", digits)  # fmt: skip

    def speed(ranks: int, microbatches: int) -> Number:
        """Batches a unit of time: a whole model's pass over a batch takes three on one rank."""
        share = Fraction(1, ranks * microbatches)
        return 1 / Fraction(_run("gpipe", ranks, microbatches, (share, share, share)).makespan)

    for number, first in ((2, (2, 1)), (3, (2, 32))):
        for model, table in paper[f"table{number}_M32"].items():
            why = "no NVLink" if number == 3 else model.split("-")[0]
            for k, published in table.items():
                digits = 0.005 if round(published, 1) != published else 0.05
                yield (f"Table {number}, {model}, M = 32: speed of {k} parts / of 2"
                       f"{' with M = 1' if number == 2 else ''}", published,
                       speed(int(k), 32) / speed(*first), why, digits)  # fmt: skip


def _megatron(paper: dict) -> Rows:
    for p, m, v in ((4, 8, 1), (8, 32, 1), (4, 8, 2), (8, 32, 2), (8, 32, 4)):
        name, more = ("1f1b", {}) if v == 1 else ("interleaved", {"chunks": v})
        t = _run(name, p, m, arguments=more)
        yield (f"section 2.2, {name}: bubble / ideal, p={p} m={m} v={v}",
               _value(paper["bubble_over_ideal"], p=p, m=m, v=v), t.bubble.idle_over_ideal)
        if v == 1:
            yield (f"section 2.2, {name}: step time, p={p} m={m}",
                   _value(paper["step"], p=p, m=m, F=1, B=2), t.makespan)
        else:
            plain, sent = (each.bytes_sent[1] for each in (
                _run("1f1b", p, m, message_size=1),
                _run(name, p, m, arguments=more, message_size=1)))  # fmt: skip
            yield (f"section 2.2, {name}: an inner rank's messages / 1f1b's, p={p} m={m} v={v}",
                   _value(paper["messages_of_an_inner_rank"], v=v), ratio(sent, plain))


def _llama3(paper: dict) -> Rows:
    for p, m, v, group in ((4, 10, 2, 4), (4, 10, 2, 5), (4, 10, 2, 10), (16, 32, 4, 16)):
        t = _run("interleaved", p, m, arguments={"chunks": v, "group": group})
        yield (f"section 3.3.2: bubble / ideal, PP={p} M={m} V={v}, {group} in a row",
               _value(paper["bubble_over_ideal"], p=p, m=m, v=v), t.bubble.idle_over_ideal)


def _pipedream_2bw(paper: dict) -> Rows:
    x = Fraction(1, 10)
    for name in ("1f1b", "gpipe"):
        t = _run(name, 4, 8, arguments={"recompute": True}, input_size=x)
        yield (f"activations kept by {name} with recompute, an input being a tenth, p=4 m=8",
               _value(paper[f"kept_{name}_recompute"], p=4, m=8, x=x), max(t.peak_activations),
               "recompute", 0)  # fmt: skip


def _zero_bubble(paper: dict) -> Rows:
    for p, m, times in ((4, 8, EQUAL), (8, 24, (10, 10, 5))):
        names = {"p": p, **dict(zip("FIW", times, strict=True))}
        sizes = f"p={p} m={m} F={times[0]} I={times[1]} W={times[2]}"
        for name, formula in paper["table2_bubble"].items():
            t = _run(name, p, m, times)
            yield (f"Table 2, {name}: bubble in a rank's own span, {sizes}",
                   _value(formula, **names), _own_idle(t))
            yield (f"Table 2, {name}: peak in micro-batches, {sizes}",
                   _value(paper["table2_peak"][name], p=p), max(t.peak_activations))
        yield (f"Table 2, zb-h2: bubble of the whole step, {sizes}",
               _value(paper["table2_bubble"]["zb-h2"], **names), t.bubble.time, "makespan", 0)
    for row in paper["table5"]:
        p, m = row["p"], row["m"]
        for name in ("1f1b", "zb-h1", "zb-h2", "zb-1p"):
            t = _published_order(name, p, m, row)
            yield (f"Tables 5 and 9, {name}: bubble / own span, p={p} m={m}", row[name],
                   t.bubble.own_span, "", 0.00005)


def _published_order(name: str, p: int, m: int, row: dict) -> Timeline:
    """The schedule of a column of Table 5 with its measured times; what the paper calls ZB-1p is
    its heuristic in 1F1B's memory, here zb-auto (our zb-1p is torch's, with chunks)."""
    times = (row["T_F"], row["T_B"], row["T_W"])
    if name != "zb-1p":
        return _run(name, p, m, times, latency=row["T_comm"])
    costs = Costs(*times, latency=row["T_comm"])
    return _run("zb-auto", p, m, times, {"costs": costs, "memory_limit": p}, latency=row["T_comm"])


def _controllable_memory(paper: dict) -> Rows:
    for name, formula in paper["peak"].items():
        for p in (3, 4, 8):
            t = _run(name, p, 2 * p + 2)
            yield (f"{name}: peak in micro-batches, p={p}", _value(formula.replace("p", str(p))),
                   max(t.peak_activations))  # fmt: skip
        later = _run(name, 4, 17).makespan - _run(name, 4, 16).makespan
        yield f"Table 1, {name}: chunk times a micro-batch, p=4", paper["interval"], 2 * later
    for name in ("v-half", "v-min"):
        for p, m in ((3, 8), (4, 8), (8, 20)):
            t = _run(name, p, m)
            yield (f"{name}: chunk times of a step, the least for its memory, p={p} m={m}",
                   _value(paper["makespan"], p=p, m=m, k=2 * max(t.peak_activations)),
                   2 * t.makespan)  # fmt: skip


def _dualpipe(paper: dict) -> Rows:
    for name, figure in paper["figures"].items():
        t = _run(name, figure["p"], figure["m"])
        units = ratio(t.schedule.stages, t.schedule.ranks)  # a share's time in a stage's
        sizes = f"p={figure['p']} m={figure['m']}"
        yield f"figure, {name}: length, {sizes}", figure["time"], units * t.makespan
        yield f"figure, {name}: idle, {sizes}", figure["idle"], units * t.bubble.time
    for name, formula in paper["bubble"].items():
        p, m = (4, 10) if name == "dualpipev" else (8, 20)
        for F, I, W in (EQUAL, (10, 10, 5), UNEQUAL):
            t = _run(name, p, m, (F, I, W))
            share = Fraction(t.schedule.ranks, t.schedule.stages)
            published = share * _value(formula, PP=t.schedule.stages, F=F, B=I + W, W=W,
                                       F_and_B=F + I + W)  # fmt: skip
            yield (f"table, {name}: bubble, {t.schedule.stages} stages, F={F} I={I} W={W}",
                   published, t.bubble.time, "bubble", 0)  # fmt: skip
        yield (f"table, {name}: peak in stages",
               _value(paper["kept_stages"][name], PP=t.schedule.stages),
               max(t.peak_activations) / share)
        yield (f"table, {name}: parameters", paper["parameters"][name],
               t.schedule.parameter_copies, "parameters", 0)  # fmt: skip


def _chimera(paper: dict) -> Rows:
    same = (2, 1, 1)  # B = F
    for name, formula in paper["bubble"].items():
        for d, n, times in ((4, 4, same), (8, 16, same), (4, 4, EQUAL)):
            t = _run(name, d, n, times)
            note = "B=F" if times == same else "B=2F"
            yield (f"table, {name}: idle / total, D={d} N={n} {note}",
                   _value(formula, D=d, N=n), t.bubble.idle_over_total, note, 0)  # fmt: skip
        for which, value, ours in zip(("least", "largest"), paper["kept"][name],
                                      (min, max), strict=True):  # fmt: skip
            yield (f"table, {name}: {which} peak of a rank, D=4 N=4", _value(value, D=4, N=4),
                   ours(t.peak_activations))  # fmt: skip
        yield f"table, {name}: weights", paper["weights"][name], t.schedule.parameter_copies


def _hanayo(paper: dict) -> Rows:
    for waves in (1, 2, 4):
        t = _run("hanayo", 4, 4, arguments={"waves": waves})
        yield (f"idle / total, P=4, 4 micro-batches, W={waves}, B=2F",
               _value(paper["bubble"], P=4, W=waves), t.bubble.idle_over_total, "bubble", 0)


def _vllm(paper: dict) -> Rows:
    one = _run("inference", 4, 1)
    yield ("time until the last rank is busy, p=4", _value(paper["fill"], p=4, t=1),
           one.waiting[-1].fill)  # fmt: skip
    for k in (1, 2, 4):
        # A batch is back for its next token after the time of one batch alone.
        busy = max(_run("inference", 4, k).busy)
        yield (f"steady idle / total, p=4, {k} in flight", _value(paper["steady_idle"], k=k, p=4),
               1 - ratio(busy, one.makespan))  # fmt: skip


PAPERS = {
    "gpipe": _gpipe, "megatron": _megatron, "llama3": _llama3, "pipedream_2bw": _pipedream_2bw,
    "zero_bubble": _zero_bubble, "controllable_memory": _controllable_memory,
    "dualpipe": _dualpipe, "chimera": _chimera, "hanayo": _hanayo, "vllm": _vllm,
}  # fmt: skip
