"""Figures: timelines, memory, losses and comparisons, as matplotlib figures.

`plot.timeline(simulate(build("1f1b", ranks=4, microbatches=8)))`, shown by a notebook as it is,
or written with `plot.save(figure, "1f1b.png")`. No pyplot: nothing is kept open, no display is
needed. Figures have the size of a slide (13.3 inches wide), so that font sizes are a slide's.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minipipe.actions import KINDS
from minipipe.report import ORIGINS, amount, headline, number, percent
from minipipe.schedule import Schedule
from minipipe.timeline import Timeline

# From the palettes of Okabe and Ito and of Paul Tol: F, B, I and W in both shades can be told apart
# with normal sight and with each of the three kinds of colour blindness.
COLOURS = {"F": "#0072B2", "B": "#E69F00", "I": "#D55E00", "W": "#44AA99", "R": "#882255",
           "U": "#000000"}  # fmt: skip
LINES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#8C8C00"]
HATCHES = {"fill": "///", "inside": "xxx", "drain": "\\\\\\"}
WIDTH = 13.3
TITLE, LABEL, TICK = 17, 14, 13
DEFINITION = "idle / (ranks × makespan)"
_HALF = 0.42  # half the height of a row of cells
_DIGIT = 0.64  # width of a digit, in font sizes


class Picture(Figure):
    """A figure that a notebook displays, whether or not pyplot was ever imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def _picture(height: float, width: float = WIDTH) -> Picture:
    return Picture(figsize=(width, height), dpi=100, layout="constrained")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, as the name of the file says; returns the path."""
    figure.savefig(path, dpi=150)
    return Path(path)


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of an action of a rank's `chunk`-th stage of `chunks`: later ones are lighter."""
    mix = 0.5 * chunk / (chunks - 1) if chunks > 1 else 0
    return tuple(channel + (1 - channel) * mix for channel in to_rgb(COLOURS[kind]))


def _factor(t: Timeline) -> float:
    """What times are multiplied by for the axis: seconds are shown in ms."""
    return 1e3 if t.time_unit == "s" else 1


def _time_label(t: Timeline) -> str:
    unit = "ms" if t.time_unit == "s" else t.time_unit or "units of the costs"
    return f"time ({unit}{', emulated devices' if t.origin == 'emulated' else ''})"


def _bubble(t: Timeline) -> str:
    return f"bubble {percent(t.bubble.idle_over_total)} = {DEFINITION}, {ORIGINS[t.origin]}"


def timeline(t: Timeline, title: str | None = None) -> Figure:
    """Who does what when: a row a rank, the micro-batch in each cell, idle time hatched."""
    figure = _picture(_height(t) + 1.9)
    axes = figure.add_subplot()
    _draw(axes, t, _factor(t), float(t.makespan) * _factor(t), _height(t))
    axes.set_title(f"{title or headline(t.schedule)}\n", fontsize=TITLE, loc="left")
    axes.text(0, 1.02, _bubble(t), fontsize=LABEL, transform=axes.transAxes, va="bottom")
    axes.set_xlabel(_time_label(t), fontsize=LABEL)
    _legend(figure, [t], _bound(axes, t, _factor(t)))
    return figure


def compare(predicted: Timeline, measured: Timeline) -> Figure:
    """Two timelines over each other on one time axis.

    Where one is in units of the costs and the other in seconds, and their busiest ranks' work
    differs by more than half, the former is stretched to the same work, and its title says so.
    """
    both = [predicted, measured]
    factors = [_factor(t) for t in both]
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
    figure = _picture(2 * height + 2.3)
    panels = figure.subplots(2, 1, sharex=True)
    end = max(float(t.makespan) * factor for t, factor in zip(both, factors, strict=True))
    bounds = []
    for axes, t, factor, note in zip(panels, both, factors, notes, strict=True):
        _draw(axes, t, factor, end, height)
        bounds += _bound(axes, t, factor)
        axes.set_title(_bubble(t) + note, fontsize=LABEL, loc="left")
    panels[1].set_xlabel(_time_label(seconds[-1] if seconds else measured), fontsize=LABEL)
    figure.suptitle(headline(predicted.schedule), fontsize=TITLE, x=0.01, ha="left")
    _legend(figure, both, bounds[:1])
    return figure


def _height(t: Timeline) -> float:
    """Inches for the rows of a timeline: a slide's height at 8 ranks."""
    return min(0.68 * t.schedule.ranks + 0.3, max(5.6, 0.35 * t.schedule.ranks))


def _draw(axes, t: Timeline, factor: float, end: float, height: float) -> None:
    """Cells, hatched idle time and numbers of one timeline; end: of the axis, height: inches."""
    chunk = [{s: i for i, s in enumerate(t.schedule.stages_of(r))}
             for r in range(t.schedule.ranks)]  # fmt: skip
    boxes, colours, numbers, moments = [], [], [], []
    for span in t.spans:
        start, stop = float(span.start) * factor, float(span.end) * factor
        parts = span.action.parts
        for place, part in enumerate(parts):
            if start == stop:
                moments.append((part.kind, start, span.rank))
                continue
            deep = 2 * _HALF / len(parts)
            top = span.rank - _HALF + place * deep
            colours.append(shade(part.kind, chunk[span.rank][part.stage], len(chunk[span.rank])))
            boxes.append(_box(start, stop, top, top + deep))
            numbers.append((part.microbatch, part.kind, start, stop, top, deep, colours[-1]))
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


def _box(left: float, right: float, top: float, bottom: float) -> list[tuple[float, float]]:
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
                gaps[name].append(_box(left, right, rank - _HALF, rank + _HALF))
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


def _legend(figure, timelines: Sequence[Timeline], lines: list) -> None:
    """Below the figure, outside of all cells: kinds of actions, shades, idle time."""
    schedule = timelines[0].schedule
    kinds = {part.kind for row in schedule.rows for a in row for part in a.parts}
    handles = [Patch(facecolor=COLOURS[k], label=f"{k} {KINDS[k]}") for k in COLOURS if k in kinds]
    if any(len(schedule.stages_of(rank)) > 1 for rank in range(schedule.ranks)):
        handles.append(Patch(facecolor=shade("F", 1, 2), label="lighter: a rank's later stages"))
    if schedule.has_pairs:
        handles.append(Patch(facecolor="none", edgecolor="black", label="split cell: F over B"))
    seen = {name for t in timelines for name in _gaps(t, 1)}
    handles += [Patch(facecolor="#F7F7F7", edgecolor="#808080", linewidth=0, hatch=HATCHES[name],
                      label=f"idle: {name}") for name in HATCHES if name in seen]  # fmt: skip
    handles += lines
    columns = len(handles) if len(handles) <= 6 else -(-len(handles) // 2)
    figure.legend(handles=handles, loc="outside lower left", fontsize=TICK, frameon=False,
                  ncols=columns, handlelength=1.6, columnspacing=1.3)  # fmt: skip


def memory(*timelines: Timeline) -> Figure:
    """What each rank keeps over time, in exact steps: a row a rank, a column a timeline,
    titled by what it has not in common with the others."""
    if len(timelines) == 1 and not isinstance(timelines[0], Timeline):
        timelines = tuple(timelines[0])
    ranks, columns = max(t.schedule.ranks for t in timelines), len(timelines)
    one_unit = len({t.memory_unit for t in timelines}) == 1
    width = min(WIDTH, 5.5 + 4 * columns) * max(1, columns / 7)
    room = max(10, int(8 * (width - 1.4) / columns))  # letters
    figure = _picture(2 + ranks * min(1.25, max(0.66, 5.4 / ranks)), width)
    panels = figure.subplots(ranks, columns, squeeze=False, sharex="col",
                             sharey=True if one_unit else "col")  # fmt: skip
    figure.get_layout_engine().set(h_pad=0.03, hspace=0.02)
    facts = [(t.schedule.name, headline(Schedule(t.schedule.rows)), ORIGINS[t.origin])
             for t in timelines]  # fmt: skip
    alike = [len(set(each)) == 1 for each in zip(*facts, strict=True)]
    labels = [_time_label(t) for t in timelines]
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
    times = [float(time) * _factor(t) for time in curve]
    kept = [float(value) * scale for value in curve.values()]
    axes.fill_between(times, kept, step="post", color="#A6CEE3", linewidth=0)
    axes.step(times, kept, where="post", color=COLOURS["F"], linewidth=2)
    axes.text(0.99, 0.97, f"peak {amount(t, t.peak_activations[rank])}", ha="right", va="top",
              fontsize=TICK, transform=axes.transAxes)  # fmt: skip
    axes.locator_params(axis="y", nbins=2, integer=t.memory_unit != "bytes")
    _plain(axes)
    axes.set_xlim(0, 1.005 * times[-1])
    axes.set_ylim(0, top * scale)


def _plain(axes) -> None:
    axes.tick_params(labelsize=TICK)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def losses(entries: Sequence[dict]) -> Figure:
    """The loss of each entry over the steps, and below it how far each is from one process's."""
    entries = [entry for entry in entries if entry.get("losses")]
    one = next((entry for entry in entries if entry["name"] == "one-process"), None)
    figure = _picture(7)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    for place, entry in enumerate(entries):
        style = {"color": LINES[place % len(LINES)], "linestyle": "-" if place < 8 else "--"}
        steps = range(1, len(entry["losses"]) + 1)
        wide = 5 - 3.5 * place / max(1, len(entries) - 1)  # so that those below still show
        above.plot(steps, entry["losses"], linewidth=wide,
                   label=f"{entry['name']}: {entry['losses'][-1]:.4f}", **style)  # fmt: skip
        if one and entry is not one:
            off = [abs(a - b) for a, b in zip(entry["losses"], one["losses"], strict=False)]
            below.plot(steps[: len(off)], off, linewidth=2, **style)
    above.set_title("Loss of the whole batch, per entry; in the legend after the last step",
                    fontsize=TITLE, loc="left")  # fmt: skip
    above.set_ylabel("loss", fontsize=LABEL)
    below.set_ylabel("|loss − one\nprocess's|", fontsize=LABEL)
    below.set_xlabel("training step", fontsize=LABEL)
    if any(value > 0 for line in below.lines for value in line.get_ydata()):
        below.set_yscale("log")
    for axes in (above, below):
        _plain(axes)
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", fontsize=TICK,
                  frameon=False)  # fmt: skip
    return figure


def bars(entries: Sequence[dict]) -> Figure:
    """DDP against pipelines: bytes sent a step, parameters and peak activations, in MB; the
    largest of the ranks."""
    names = [entry["name"] for entry in entries]
    figure = _picture(1.9 + 0.5 * len(names))
    panels = figure.subplots(1, 3, sharey=True)
    for axes, (key, title) in zip(panels, (
        ("bytes_sent", "bytes sent a step"),
        ("parameter_bytes", "parameters held"),
        ("peak_activation_bytes", "peak activations")), strict=True):  # fmt: skip
        values = [max(entry[key]) / 1e6 if entry.get(key) else None for entry in entries]
        colours = ["#8C8C8C" if name == "one-process" else COLOURS["B"] if name == "ddp" else
                   COLOURS["F"] for name in names]  # fmt: skip
        axes.barh(names, [value or 0 for value in values], color=colours, height=0.7)
        for place, value in enumerate(values):
            text = "not measured" if value is None else number(round(value, 2) or value)
            axes.text(value or 0, place, f" {text}", fontsize=TICK, va="center")
        largest = max((value or 0 for value in values), default=0)
        _bar_axes(axes, largest, "MB, largest of the ranks")
        axes.set_title(title, fontsize=LABEL + 1, loc="left")
    panels[0].invert_yaxis()
    kinds = {"one process": "#8C8C8C", "data parallel": COLOURS["B"], "pipeline": COLOURS["F"]}
    figure.legend(handles=[Patch(facecolor=kinds[kind], label=kind) for kind in kinds], ncols=3,
                  loc="outside lower left", frameon=False, fontsize=TICK)  # fmt: skip
    return figure


def bubble_bars(entries: Sequence[dict]) -> Figure:
    """The bubble of each pipeline, predicted beside measured, in percent."""
    entries = [entry for entry in entries if entry.get("bubble_predicted") is not None]
    figure = _picture(2.1 + 0.7 * len(entries))
    axes = figure.add_subplot()
    largest, paced = 0.0, any("paced_step_ms" in entry for entry in entries)
    for offset, key, origin, colour, hatch in (
        (-0.2, "bubble_predicted", "predicted", "#BDD7E7", "///"),
        (0.2, "bubble_measured", "emulated" if paced else "measured", COLOURS["F"], None),
    ):
        shares = [100 * float(entry.get(key) or 0) for entry in entries]
        largest = max([largest, *shares])
        places = [place + offset for place in range(len(entries))]
        axes.barh(places, shares, height=0.38, color=colour, hatch=hatch, edgecolor="white",
                  label=ORIGINS[origin])  # fmt: skip
        for place, share, entry in zip(places, shares, entries, strict=True):
            text = "not measured" if entry.get(key) is None else f"{share:.1f} %"
            axes.text(share, place, f" {text}", fontsize=TICK, va="center")
    axes.set_yticks(range(len(entries)), [entry["name"] for entry in entries])
    axes.invert_yaxis()
    _bar_axes(axes, largest, "bubble (%)")
    axes.set_title(f"bubble = {DEFINITION}", fontsize=TITLE, loc="left")
    figure.legend(loc="outside lower left", ncols=2, fontsize=TICK, frameon=False)
    return figure


def _bar_axes(axes, largest: float, label: str) -> None:
    axes.set_xlim(0, 1.25 * largest or 1)
    axes.set_xlabel(label, fontsize=LABEL)
    _plain(axes)
    axes.grid(False, axis="y")
