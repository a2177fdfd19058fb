"""What all figures share: size of a slide, colours, units."""

from __future__ import annotations

import io
from pathlib import Path

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from minipipe.timeline import Timeline

# From the palettes of Okabe and Ito and of Paul Tol: F, B, I and W in both shades can be told apart
# with normal sight and with each of the three kinds of colour blindness.
COLOURS = {"F": "#0072B2", "B": "#E69F00", "I": "#D55E00", "W": "#44AA99", "R": "#882255",
           "U": "#000000"}  # fmt: skip
LINES = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#000000", "#8C8C00"]
HATCHES = {"fill": "///", "inside": "xxx", "drain": "\\\\\\"}
IDLE = "#E4E4E4"
WIDTH = 13.3
TITLE, LABEL, TICK = 17, 14, 13
DEFINITION = "idle / (ranks × makespan)"


class Picture(Figure):
    """A figure that a notebook displays, whether or not pyplot was ever imported."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def picture(height: float, width: float = WIDTH) -> Picture:
    return Picture(figsize=(width, height), dpi=100, layout="constrained")


def save(figure: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, SVG or PDF, as the name of the file says; returns the path."""
    figure.savefig(path, dpi=150)
    return Path(path)


def shade(kind: str, chunk: int, chunks: int) -> tuple[float, float, float]:
    """The colour of an action of a rank's `chunk`-th stage of `chunks`: later ones are lighter."""
    mix = 0.5 * chunk / (chunks - 1) if chunks > 1 else 0
    return tuple(channel + (1 - channel) * mix for channel in to_rgb(COLOURS[kind]))


def factor_of(t: Timeline) -> float:
    """What times are multiplied by for the axis: seconds are shown in ms."""
    return 1e3 if t.time_unit == "s" else 1


def time_label(t: Timeline) -> str:
    unit = "ms" if t.time_unit == "s" else t.time_unit or "units of the costs"
    return f"time ({unit}{', emulated devices' if t.origin == 'emulated' else ''})"


def plain(axes) -> None:
    axes.tick_params(labelsize=TICK)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
