"""Figures: timelines, memory, losses and comparisons, as matplotlib figures.

`plot.timeline(simulate(build("1f1b", ranks=4, microbatches=8)))`, shown by a notebook as it is,
or written with `plot.save(figure, "1f1b.png")`. No pyplot: nothing is kept open, no display is
needed. Figures have the size of a slide (13.3 inches wide), so that font sizes are a slide's.
"""

from minipipe.plot.activations import memory
from minipipe.plot.entries import bars, bubble_bars, losses
from minipipe.plot.overviews import literature, overview
from minipipe.plot.style import COLOURS, DEFINITION, Picture, save, shade
from minipipe.plot.timelines import compare, timeline

__all__ = [
    "COLOURS", "DEFINITION", "Picture", "bars", "bubble_bars", "compare", "literature", "losses",
    "memory", "overview", "save", "shade", "timeline",
]  # fmt: skip
