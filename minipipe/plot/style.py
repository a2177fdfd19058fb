"""What all figures share: size of a slide, colours, units."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from minipipe.schedule import Schedule
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
    """Write a figure as PNG, SVG or PDF, as the name of the file says (PNG where it says nothing);
    returns the path."""
    path = Path(path)
    path = path if path.suffix else path.with_name(path.name + ".png")
    figure.savefig(path, dpi=150)
    return path


def checked(timelines: Sequence[Timeline]) -> Sequence[Timeline]:
    """Refuse with TypeError what is no timeline, and with ValueError none at all or one that takes
    no time, which can't be drawn."""
    if not timelines:
        raise ValueError("there is no timeline to draw")
    for t in timelines:
        if not isinstance(t, Timeline):
            hint = ": simulate it first" if isinstance(t, Schedule) else ""
            raise TypeError(f"a Timeline is drawn, not a {type(t).__name__}{hint}")
        if not t.makespan:
            raise ValueError("the timeline takes no time: all its costs are 0")
    return timelines


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
