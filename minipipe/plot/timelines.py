"""Timelines: who does what when, one alone or a prediction over a measurement."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minipipe.actions import KINDS
from minipipe.plot.style import (
    COLOURS,
    DEFINITION,
    HATCHES,
    IDLE,
    LABEL,
    TICK,
    TITLE,
    WIDTH,
    checked,
    factor_of,
    picture,
    shade,
    time_label,
)
from minipipe.report import ORIGINS, headline, number, percent
from minipipe.timeline import Timeline

_HALF = 0.42  # half the height of a row of cells
_DIGIT = 0.64  # width of a digit, in font sizes


def _bubble(t: Timeline) -> str:
    return f"bubble {percent(t.bubble.idle_over_total)} = {DEFINITION}, {ORIGINS[t.origin]}"


def timeline(t: Timeline, title: str | None = None) -> Figure:
    """Who does what when: a row a rank, the micro-batch in each cell, idle time hatched."""
    checked([t])
    figure = picture(_height(t) + 1.9)
    axes = figure.add_subplot()
    _draw(axes, t, factor_of(t), float(t.makespan) * factor_of(t), _height(t))
    axes.set_title(f"{title or headline(t.schedule)}\n", fontsize=TITLE, loc="left")
    axes.text(0, 1.02, _bubble(t), fontsize=LABEL, transform=axes.transAxes, va="bottom")
    axes.set_xlabel(time_label(t), fontsize=LABEL)
    legend(figure, [t], _bound(axes, t, factor_of(t)))
    return figure


def compare(predicted: Timeline, measured: Timeline) -> Figure:
    """Two timelines over each other on one time axis.

    Where one is in units of the costs and the other in seconds, and their busiest ranks' work
    differs by more than half, the former is stretched to the same work, and its title says so.
    """
    both = checked([predicted, measured])
    factors = [factor_of(t) for t in both]
    notes = ["", ""]
    seconds = [t for t in both if t.time_unit == "s"]
    if len(seconds) == 1:
        bare = both.index(next(t for t in both if t.time_unit != "s"))
        factors[bare] = 1e3
        relation = float(seconds[0].ideal) / float(both[bare].ideal)
        if not 2 / 3 < relation < 3 / 2:
            factors[bare] *= relation
            notes[bare] = f" (1 unit drawn as {number(1e3 * relation)} ms)"
    height = min(_height(predicted), max(3.2, 0.3 * predicted.schedule.ranks))
    figure = picture(2 * height + 2.3)
    panels = figure.subplots(2, 1, sharex=True)
    end = max(float(t.makespan) * factor for t, factor in zip(both, factors, strict=True))
    bounds = []
    for axes, t, factor, note in zip(panels, both, factors, notes, strict=True):
        _draw(axes, t, factor, end, height)
        bounds += _bound(axes, t, factor)
        axes.set_title(_bubble(t) + note, fontsize=LABEL, loc="left")
    panels[1].set_xlabel(time_label(seconds[-1] if seconds else measured), fontsize=LABEL)
    figure.suptitle(headline(predicted.schedule), fontsize=TITLE, x=0.01, ha="left")
    legend(figure, both, bounds[:1])
    return figure


def _height(t: Timeline) -> float:
    """Inches for the rows of a timeline: a slide's height at 8 ranks."""
    return min(0.68 * t.schedule.ranks + 0.3, max(5.6, 0.35 * t.schedule.ranks))


def _draw(axes, t: Timeline, factor: float, end: float, height: float) -> None:
    """Cells, hatched idle time and numbers of one timeline; end: of the axis, height: inches."""
    boxes, colours, numbers, moments = [], [], [], []
    for part, rank, start, stop, upper, share, colour in cells(t, factor):
        if start == stop:
            moments.append((part.kind, start, rank))
            continue
        top, deep = rank - _HALF + 2 * _HALF * upper, 2 * _HALF * share
        colours.append(colour)
        boxes.append(box(start, stop, top, top + deep))
        numbers.append((part.microbatch, part.kind, start, stop, top, deep, colour))
    for name, gaps in _gaps(t, factor).items():
        axes.add_collection(PolyCollection(gaps, facecolors="#F7F7F7", edgecolors="#B0B0B0",
                            linewidths=0, hatch=HATCHES[name], label=name))  # fmt: skip
    line = 0.8 if len(boxes) < 60 * t.schedule.ranks else 0.4
    axes.add_collection(PolyCollection(boxes, facecolors=colours, edgecolors="white",
                        linewidths=line, label="cells"))  # fmt: skip
    for kind, time, rank in moments:  # what takes no time, as an update may, is a line
        axes.plot([time, time], [rank - _HALF, rank + _HALF], color=COLOURS[kind], linewidth=3)
    axes.set_xlim(0, 1.005 * end)
    axes.set_ylim(t.schedule.ranks - 0.5, -0.5)
    room = height / t.schedule.ranks > 0.5
    axes.set_yticks(range(t.schedule.ranks),
                    [_rank_name(t, r, room) for r in range(t.schedule.ranks)])  # fmt: skip
    axes.tick_params(labelsize=TICK)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    _write_numbers(axes, numbers, 72 * (WIDTH - 1.7) / end, 72 * (height - 0.2) / t.schedule.ranks)


def cells(t: Timeline, factor: float) -> Iterator[tuple]:
    """Each single action with its rank, start, stop, what of the rank's height is above it and what
    it takes (half of it in a pair), and its colour."""
    chunk = [{s: i for i, s in enumerate(t.schedule.stages_of(r))}
             for r in range(t.schedule.ranks)]  # fmt: skip
    for span in t.spans:
        start, stop = float(span.start) * factor, float(span.end) * factor
        parts, mine = span.action.parts, chunk[span.rank]
        for place, part in enumerate(parts):
            yield (part, span.rank, start, stop, place / len(parts), 1 / len(parts),
                   shade(part.kind, mine[part.stage], len(mine)))  # fmt: skip


def box(left: float, right: float, top: float, bottom: float) -> list[tuple[float, float]]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _rank_name(t: Timeline, rank: int, room: bool) -> str:
    """The rank, and its stages where they aren't the rank's number and there is room for them."""
    stages = t.schedule.stages_of(rank)
    if not room or stages == (rank,):
        return f"rank {rank}"
    what = "stage" if len(stages) == 1 else "stages"
    return f"rank {rank}\n{what} {', '.join(map(str, stages))}" if stages else f"rank {rank}\nidle"


def _gaps(t: Timeline, factor: float) -> dict[str, list]:
    """Idle time before a rank's first action, between its actions, and after its last."""
    gaps: dict[str, list] = {"fill": [], "inside": [], "drain": []}
    end = float(t.makespan) * factor
    for rank in range(t.schedule.ranks):
        spans = t.spans_of(rank)
        edges = [0.0, *(float(time) * factor for s in spans for time in (s.start, s.end)), end]
        for place in range(0, len(edges), 2):
            left, right = edges[place : place + 2]
            if right > left:
                name = "fill" if not place else "drain" if place == 2 * len(spans) else "inside"
                gaps[name].append(box(left, right, rank - _HALF, rank + _HALF))
    return {name: boxes for name, boxes in gaps.items() if boxes}


def _write_numbers(axes, numbers: Sequence[tuple], across: float, row: float) -> None:
    """The micro-batch in each cell, as large as the cells of its kind hold, turned where that lets
    it be larger; left out below 5.5 points. across, row: points a unit of time, and a rank's row.
    """
    digits = max(len(str(each[0])) for each in numbers)
    widths: dict[tuple[str, float], list[float]] = {}
    for _, kind, start, stop, _, deep, _ in numbers:
        widths.setdefault((kind, deep), []).append(across * (stop - start))
    style = {}
    for (kind, deep), wide in widths.items():
        typical = sorted(wide)[len(wide) // 2] - 1
        flat = min(typical / (_DIGIT * digits), 0.7 * deep * row)
        turned = min(typical / 0.8, deep * row / (_DIGIT * digits + 0.3)) if digits > 1 else 0
        style[kind, deep] = (min(flat, 15), 0) if flat >= 9 else (min(max(flat, turned), 12),
                            90 * (turned > flat))  # fmt: skip
    for microbatch, kind, start, stop, top, deep, colour in numbers:
        size, turn = style[kind, deep]
        if size < 5.5 or across * (stop - start) < size * (0.7 if turn else 0.55 * digits):
            continue
        dark = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 0.5
        axes.text((start + stop) / 2, top + deep / 2, str(microbatch), fontsize=size, ha="center",
                  va="center_baseline", rotation=turn, rotation_mode="anchor",
                  color="white" if dark else "black", clip_on=True)  # fmt: skip


def _bound(axes, t: Timeline, factor: float) -> list:
    """The lower bound as a line, where it is known."""
    if t.lower_bound is None:
        return []
    at = float(t.lower_bound) * factor
    text = f"{at:.1f} ms" if factor != 1 else number(t.lower_bound)
    return [axes.axvline(at, color="black", linestyle=(0, (4, 2)), linewidth=2,
                         label=f"lower bound {text}")]  # fmt: skip


def legend(figure, timelines: Sequence[Timeline], lines: list, where: bool = True) -> None:
    """Below the figure, outside of all cells: kinds of actions, shades, idle time (and `where` it
    lies)."""
    schedules = [t.schedule for t in timelines]
    kinds = {part.kind for s in schedules for row in s.rows for a in row for part in a.parts}
    handles = [Patch(facecolor=COLOURS[k], label=f"{k} {KINDS[k]}") for k in COLOURS if k in kinds]
    if any(len(s.stages_of(rank)) > 1 for s in schedules for rank in range(s.ranks)):
        handles.append(Patch(facecolor=shade("F", 1, 2), label="lighter: a rank's later stages"))
    if any(s.has_pairs for s in schedules):
        handles.append(Patch(facecolor="none", edgecolor="black", label="split cell: F over B"))
    seen = {name for t in timelines for name in _gaps(t, 1)} if where else set()
    handles += [Patch(facecolor="#F7F7F7", edgecolor="#808080", linewidth=0, hatch=HATCHES[name],
                      label=f"idle: {name}") for name in HATCHES if name in seen]  # fmt: skip
    if not where:
        handles.append(Patch(facecolor=IDLE, label="idle"))
    handles += lines
    columns = len(handles) if len(handles) <= 6 else -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside lower left", fontsize=TICK, frameon=False,
                  ncols=columns, handlelength=1.6, columnspacing=1.3)  # fmt: skip
