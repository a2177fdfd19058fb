"""Tables that fit the terminal: cut where they are too wide, and no cell lost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from textwrap import wrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

Row = dict[str, str]  # heading -> cell


def fitted(rows: Sequence[Row], first: list[str], groups: Sequence[list[str]],
           titles: Sequence[str], width: int | None, *, left: Sequence[str] = (),
           section: str = "") -> list[Table]:  # fmt: skip
    """A table for each group of headings, or several where `width` characters are too few; each
    begins with the `first` columns.

    left: the columns whose cells stand at the left. section: a column; each row that has something
    in it begins a section.
    """
    from rich import box
    from rich.table import Table

    tables = []
    for group, shown in _cut(rows, first, groups, width):
        title = titles[group] if groups[group][0] in shown else None
        table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for heading, size in zip(shown, _sizes(rows, shown, width), strict=True):
            table.add_column(heading, justify="left" if heading in left else "right", width=size)
        for number, row in enumerate(rows):
            if number and section and row[section]:
                table.add_section()
            table.add_row(*(row[heading] for heading in shown))
        tables.append(table)
    return tables


def _least(rows: Sequence[Row], heading: str) -> int:
    """Characters that a column needs: headings are broken at blanks, cells only where long."""
    return max([*map(len, heading.split()), *(min(24, len(row[heading])) for row in rows)])


def _cut(rows: Sequence[Row], first: list[str], groups: Sequence[list[str]],
         width: int | None) -> list[tuple[int, list[str]]]:  # fmt: skip
    """The headings of each table, and the number of the group that they are from."""
    def size(heading: str) -> int:
        return _least(rows, heading) + 2

    tables: list[tuple[int, list[str]]] = []
    for number, group in enumerate(groups):
        room = 0
        for heading in group:
            room -= size(heading)
            if room < 0:
                tables.append((number, [*first]))
                room = (width or 10**6) - 1 - sum(map(size, [*first, heading]))
            tables[-1][1].append(heading)
    return tables


def _sizes(rows: Sequence[Row], shown: list[str], width: int | None) -> list[int]:
    """Characters of each column. Headings have as few lines as there is room for: left to itself,
    rich crops what it can't break evenly."""
    for lines in (1, 2, 3, 9):
        sizes = [next(size for size in itertools.count(_least(rows, heading))
                      if len(wrap(heading, size, break_long_words=False)) <= lines)
                 for heading in shown]  # fmt: skip
        over = sum(sizes) + 2 * len(sizes) + 1 - (width or 10**6)
        if over <= 0:
            return sizes
    return [*sizes[:-1], sizes[-1] - over]  # one column beside the first ones, of many words
