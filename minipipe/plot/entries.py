"""Comparisons of a race's entries: losses, bubbles, bytes."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minipipe.plot.style import COLOURS, DEFINITION, LABEL, LINES, TICK, TITLE, picture, plain
from minipipe.report import ORIGINS, number


def losses(entries: Sequence[dict]) -> Figure:
    """The loss of each entry over the steps, and below it how far each is from one process's."""
    entries = [entry for entry in entries if entry.get("losses")]
    one = next((entry for entry in entries if entry["name"] == "one-process"), None)
    figure = picture(7)
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
        plain(axes)
    figure.legend(*above.get_legend_handles_labels(), loc="outside right upper", fontsize=TICK,
                  frameon=False)  # fmt: skip
    return figure


def bars(entries: Sequence[dict]) -> Figure:
    """DDP against pipelines: bytes sent a step, parameters and peak activations, in MB; the
    largest of the ranks."""
    names = [entry["name"] for entry in entries]
    figure = picture(1.9 + 0.5 * len(names))
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
    figure = picture(2.1 + 0.7 * len(entries))
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
    plain(axes)
    axes.grid(False, axis="y")
