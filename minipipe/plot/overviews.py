"""Slides about all at once: every schedule on one time axis, and papers beside simulations."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minipipe.family import by_family, family
from minipipe.plot.style import (
    COLOURS,
    DEFINITION,
    IDLE,
    LABEL,
    TICK,
    TITLE,
    checked,
    factor_of,
    picture,
    plain,
    time_label,
)
from minipipe.plot.timelines import box, cells, legend
from minipipe.report import amount, headline, number, percent
from minipipe.schedule import Schedule
from minipipe.timeline import Timeline

_DEEP = 0.84  # what the rows of one timeline take of its height


def overview(timelines: Sequence[Timeline], title: str | None = None) -> Figure:
    """A small timeline a schedule, all on one time axis and by family; the lower bound of each as
    a line; bubble and peak memory of the fullest rank at the side.

    One that is more than twice as long as the others' median is cut at the edge, and says so.
    """
    timelines = by_family(checked(timelines))
    ranks = max((t.schedule.ranks for t in timelines), default=1)
    figure = picture(1.7 + len(timelines) * min(max(0.34, 0.085 * ranks), 0.44))
    time, bubble, peak = figure.subplots(1, 3, sharey=True, width_ratios=[8, 1.5, 1.5])
    ends = sorted(float(t.makespan) * factor_of(t) for t in timelines)
    shown = max(end for end in ends if end <= 2 * ends[len(ends) // 2])
    for place, t in enumerate(timelines):
        _small(time, t, place, shown)
    time.set_xlim(0, 1.01 * shown)
    time.set_xlabel(time_label(timelines[0]), fontsize=LABEL)
    time.set_yticks(range(len(timelines)), [t.schedule.name or "own" for t in timelines])
    time.set_ylim(len(timelines) - 0.5, -0.5)
    _side(bubble, [float(t.bubble.idle_over_total) for t in timelines],
          [percent(t.bubble.idle_over_total) for t in timelines], "bubble")  # fmt: skip
    _side(peak, [float(max(t.peak_activations)) for t in timelines],
          [amount(t, max(t.peak_activations)) for t in timelines],
          "peak kept")  # fmt: skip
    families = [family(t.schedule) for t in timelines]
    for axes in (time, bubble, peak):
        plain(axes)
        axes.tick_params(axis="y", length=0)
        axes.grid(False, axis="y")
        axes.spines["left"].set_visible(axes is not time)
        for place in range(1, len(families)):
            if families[place] != families[place - 1]:
                axes.axhline(place - 0.5, color="#606060", linewidth=0.8)
    sizes = " and ".join(sorted({headline(Schedule(t.schedule.rows)) for t in timelines}))
    memory = " and ".join(sorted({t.memory_unit.replace("bytes", "MB") for t in timelines}))
    figure.suptitle(title or f"Every schedule: {sizes}", fontsize=TITLE, x=0.01, ha="left")
    time.set_title(f"bubble: {DEFINITION}, {timelines[0].origin}; peak kept: {memory}, fullest "
                   "rank", fontsize=TICK, loc="left")  # fmt: skip
    bound = Line2D([], [], color="black", linewidth=2.5, label="lower bound")
    legend(figure, timelines, [bound], where=False)
    return figure


def _small(axes, t: Timeline, place: int, shown: float) -> None:
    """One timeline at a place of the axis, cut at `shown`."""
    factor, deep, top = factor_of(t), _DEEP / t.schedule.ranks, place - _DEEP / 2
    end = min(float(t.makespan) * factor, shown)
    axes.fill_between([0, end], top, top + _DEEP, color=IDLE, linewidth=0)
    boxes, colours = [], []
    for _, rank, start, stop, upper, share, colour in cells(t, factor):
        if start < shown:
            high = top + deep * (rank + upper)
            boxes.append(box(start, min(stop, shown), high, high + deep * share))
            colours.append(colour)
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white",
                        linewidths=0.5 if len(boxes) < 250 else 0.2,
                        label=t.schedule.name))  # fmt: skip
    if t.lower_bound is not None and float(t.lower_bound) * factor <= shown:
        axes.plot([float(t.lower_bound) * factor] * 2, [place - 0.5, place + 0.5], color="black",
                  linewidth=2.5, solid_capstyle="butt")  # fmt: skip
    if float(t.makespan) * factor > shown:
        axes.text(shown, place, f"goes on to {number(float(t.makespan) * factor)} → ", ha="right",
                  va="center", fontsize=TICK,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5})  # fmt: skip


def _side(axes, values: list[float], texts: list[str], title: str) -> None:
    """Bars beside the timelines, each with its number."""
    axes.barh(range(len(values)), values, height=_DEEP, color="#C8C8C8")
    for place, text in enumerate(texts):
        axes.text(0, place, f" {text}", fontsize=TICK, va="center")
    axes.set_xlim(0, 1.02 * max(values) or 1)
    axes.set_xticks([])
    axes.set_title(title, fontsize=LABEL, loc="left")


def literature(rows: Sequence) -> Figure:
    """Papers beside simulations (the rows of `minipipe.literature.compare`): a line a source, a
    point a number, by the difference in percent of the larger of both."""
    sources = list(dict.fromkeys(row.source for row in rows))
    figure = picture(1.7 + 0.42 * len(sources))
    axes = figure.add_subplot()
    for same, colour, label in ((True, COLOURS["F"], "as published, within its printed digits"),
                                (False, COLOURS["I"], "differs; the table gives the reason")):
        points = [(_apart(row), sources.index(row.source)) for row in rows if row.equal == same]
        axes.scatter(*zip(*points, strict=True) if points else ([], []), s=110, color=colour,
                     alpha=0.75, label=label, zorder=3, linewidth=0)  # fmt: skip
    equal = [[row.equal for row in rows if row.source == source] for source in sources]
    axes.set_yticks(range(len(sources)), [
        f"{source.split(', arXiv')[0]}: {sum(each)} of {len(each)}"
        for source, each in zip(sources, equal, strict=True)])  # fmt: skip
    axes.set_ylim(len(sources) - 0.5, -0.5)
    axes.axvline(0, color="black", linewidth=1)
    plain(axes)
    axes.set_xlabel("(ours − published) / larger of both (%)", fontsize=LABEL)
    figure.suptitle("Published numbers beside the simulator's: how many are equal, and how far "
                    "apart are the others", fontsize=TITLE, x=0.01, ha="left")  # fmt: skip
    figure.legend(loc="outside lower left", ncols=2, fontsize=TICK, frameon=False)
    return figure


def _apart(row) -> float:
    """The difference in percent of the larger number; 0 where both are 0."""
    largest = max(abs(row.ours), abs(row.published))
    return 100 * float(row.ours - row.published) / float(largest) if largest else 0.0
