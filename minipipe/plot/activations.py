"""Memory: what each rank keeps over time."""

from __future__ import annotations

import textwrap

from matplotlib.figure import Figure

from minipipe.plot.style import (
    COLOURS,
    LABEL,
    TICK,
    TITLE,
    WIDTH,
    checked,
    factor_of,
    picture,
    plain,
    time_label,
)
from minipipe.report import ORIGINS, amount, headline
from minipipe.schedule import Schedule
from minipipe.timeline import Timeline


def memory(*timelines: Timeline) -> Figure:
    """What each rank keeps over time, in exact steps: a row a rank, a column a timeline,
    titled by what it has not in common with the others."""
    if len(timelines) == 1 and not isinstance(timelines[0], Timeline):
        timelines = tuple(timelines[0]) if isinstance(timelines[0], list | tuple) else timelines
    checked(timelines)
    ranks, columns = max(t.schedule.ranks for t in timelines), len(timelines)
    one_unit = len({t.memory_unit for t in timelines}) == 1
    width = min(WIDTH, 5.5 + 4 * columns) * max(1, columns / 7)
    room = max(10, int(8 * (width - 1.4) / columns))  # letters
    figure = picture(2 + ranks * min(1.25, max(0.66, 5.4 / ranks)), width)
    panels = figure.subplots(ranks, columns, squeeze=False, sharex="col",
                             sharey=True if one_unit else "col")  # fmt: skip
    figure.get_layout_engine().set(h_pad=0.03, hspace=0.02)
    facts = [(t.schedule.name, headline(Schedule(t.schedule.rows)), ORIGINS[t.origin])
             for t in timelines]  # fmt: skip
    alike = [len(set(each)) == 1 for each in zip(*facts, strict=True)]
    labels = [time_label(t) for t in timelines]
    for column, t in enumerate(timelines):
        title = "\n".join(textwrap.fill(fact.replace("+", " +"), room, break_on_hyphens=False)
                          for fact, same in zip(facts[column], alike, strict=True) if not same)
        panels[0, column].set_title(title.replace(" +", "+"), fontsize=LABEL)
        if len(set(labels)) > 1:
            panels[t.schedule.ranks - 1, column].set_xlabel(labels[column], fontsize=LABEL)
        peak = max(max(o.peak_activations) for o in (timelines if one_unit else [t]))
        for rank, axes in enumerate(panels[:, column]):
            if rank < t.schedule.ranks:
                _draw_memory(axes, t, rank, float(peak) * (1.7 if ranks < 6 else 2) or 1)
            else:
                axes.set_axis_off()
        panels[t.schedule.ranks - 1, column].tick_params(labelbottom=True)
        panels[0, column].locator_params(axis="x", nbins=3 if columns > 3 else 6)
    for rank, axes in enumerate(panels[:, 0]):
        axes.set_ylabel(f"rank {rank}", fontsize=LABEL, rotation=0, labelpad=8, ha="right",
                        va="center")  # fmt: skip
    shared = [fact for fact, same in zip(facts[0], alike, strict=True) if same and fact]
    figure.suptitle(", ".join(shared), fontsize=TITLE, x=0.01, ha="left")
    if len(set(labels)) == 1:
        note = "; each column has its own scale" * (columns > 1)
        figure.supxlabel(labels[0] + note, fontsize=LABEL)
    kept = dict.fromkeys(t.memory_unit.replace("bytes", "MB") for t in timelines)
    figure.supylabel(f"activations kept ({' and '.join(kept)})", fontsize=LABEL)
    return figure


def _draw_memory(axes, t: Timeline, rank: int, top: float) -> None:
    """The steps of one rank; what is kept for no time at all, as between B and F, isn't drawn."""
    scale = 1e-6 if t.memory_unit == "bytes" else 1
    curve = dict(t.memory_curve(rank))
    curve[t.makespan] = t.memory_curve(rank)[-1][1]
    times = [float(time) * factor_of(t) for time in curve]
    kept = [float(value) * scale for value in curve.values()]
    axes.fill_between(times, kept, step="post", color="#A6CEE3", linewidth=0)
    axes.step(times, kept, where="post", color=COLOURS["F"], linewidth=2)
    axes.text(0.99, 0.97, f"peak {amount(t, t.peak_activations[rank])}", ha="right", va="top",
              fontsize=TICK, transform=axes.transAxes)  # fmt: skip
    axes.locator_params(axis="y", nbins=2, integer=t.memory_unit != "bytes")
    plain(axes)
    axes.set_xlim(0, 1.005 * times[-1])
    axes.set_ylim(0, top * scale)
