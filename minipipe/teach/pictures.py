"""A student's table over a right one, cell by cell, as a PNG."""

from __future__ import annotations

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.patches import Rectangle

from minipipe.plot.style import LABEL, TICK, picture, shade
from minipipe.schedule import Schedule

MOST_PLACES = 40  # cells a row that are drawn


def first_difference(mine: Schedule, right: Schedule) -> tuple[int, int] | None:
    """Row and place of the first cell, column by column, in which the tables differ."""
    rows = max(mine.ranks, right.ranks)
    places = max(len(row) for row in (*mine.rows, *right.rows))
    for place in range(places):
        for row in range(rows):
            if _cell(mine, row, place) != _cell(right, row, place):
                return row, place
    return None


def _cell(schedule: Schedule, row: int, place: int):
    cells = schedule.rows[row] if row < schedule.ranks else ()
    return cells[place] if place < len(cells) else None


def two_tables(mine: Schedule, right: Schedule | None, title: str) -> bytes:
    """The student's table, below a right one where there is one; the first wrong cell is framed."""
    tables = [("a right table", right)] if right is not None else []
    tables.append(("yours", mine))
    places = min(MOST_PLACES, max(len(row) for _, t in tables for row in t.rows))
    rows = [min(t.ranks, 16) for _, t in tables]
    figure = picture(0.42 * sum(rows) + 1.1 * len(tables) + 0.4, max(8.0, 0.55 * places + 1.6))
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(tables), 1, squeeze=False, height_ratios=rows)[:, 0]
    wrong = first_difference(mine, right) if right is not None else None
    for axes, (name, schedule), count in zip(panels, tables, rows, strict=True):
        _draw(axes, schedule, count, places)
        axes.set_title(name, fontsize=LABEL, loc="left")
        if wrong and schedule is mine:
            axes.add_patch(Rectangle((wrong[1] - 0.5, wrong[0] - 0.5), 1, 1, fill=False,
                                     edgecolor="#D00000", linewidth=4, zorder=5))  # fmt: skip
            axes.set_xlabel("place in the row (the red frame: the first cell that differs)",
                            fontsize=TICK)  # fmt: skip
        elif schedule is mine:
            axes.set_xlabel("place in the row", fontsize=TICK)
    first = title.splitlines()[0]
    figure.suptitle(first if len(first) <= 90 else first[:89] + "…", fontsize=TICK, x=0.01,
                    ha="left")  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80)
    return buffer.getvalue()


def _draw(axes, schedule: Schedule, count: int, places: int) -> None:
    for row, cells in enumerate(schedule.rows[:count]):
        stages = sorted({part.stage for action in cells for part in action.parts})
        for place, action in enumerate(cells[:places]):
            kind = action.parts[0].kind
            colour = shade(kind, stages.index(action.parts[0].stage), len(stages))
            axes.add_patch(Rectangle((place - 0.5, row - 0.45), 1, 0.9, facecolor=colour,
                                     edgecolor="white"))  # fmt: skip
            dark = 0.3 * colour[0] + 0.59 * colour[1] + 0.11 * colour[2] < 0.5
            text = str(action) if len(action.parts) == 1 else "\n".join(map(str, action.parts))
            axes.text(place, row, text, ha="center", va="center", fontsize=9,
                      color="white" if dark else "black")  # fmt: skip
    axes.set_xlim(-0.6, places - 0.4)
    axes.set_ylim(count - 0.45, -0.55)
    axes.set_xticks(range(0, places, 5 if places > 12 else 1))
    axes.set_yticks(range(count), [f"rank {row}" for row in range(count)], fontsize=TICK)
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
