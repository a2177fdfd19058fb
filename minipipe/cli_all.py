"""The commands about all schedules at once: `show --all` and `literature`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from minipipe.cli import Json, app, draw, print_json, refuse, summary, width

if TYPE_CHECKING:
    from minipipe import Costs


def show_all(ranks: int | None, microbatches: int | None, costs: Costs, own: dict,
             figure: Path | None, as_json: bool) -> None:  # fmt: skip
    """Every schedule in one table, and in one figure; those that the sizes rule out with why."""
    from minipipe import family, tables

    timelines, refused = family.everything(
        4 if ranks is None else ranks, 8 if microbatches is None else microbatches, costs, **own)
    if not timelines:
        refuse(refused[0][1])
    if figure is not None:
        draw("overview", timelines, figure)
    if as_json:
        print_json({
            "schedules": [summary(t) | {"messages": t.messages, "bytes_sent": list(t.bytes_sent),
                                        "distance": family.distance(t)} for t in timelines],
            "refused": [{"name": name, "reason": reason} for name, reason in refused],
        })  # fmt: skip
        return
    bytes_too = any(any(t.bytes_sent) for t in timelines)
    _print(*tables.family_tables(timelines, bytes_too, width()))
    for name, reason in refused:
        typer.echo(f"{name} is not among them: {reason}")


def _print(*parts) -> None:
    """Tables and lines, as wide as the terminal; elsewhere as wide as they need."""
    from rich.console import Console

    console = Console(width=width() or 220, highlight=False)
    for part in parts:
        console.print(part, markup=False)


@app.command()
def literature(
    figure: Annotated[Path | None, typer.Option(
        metavar="FILE", help="Draw the differences as PNG, SVG or PDF.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Set the papers' numbers beside those of the simulator, with the reason where they differ."""
    from minipipe import literature as papers
    from minipipe import tables

    rows, left_out = papers.compare(), papers.left_out()
    if figure is not None:
        draw("literature", rows, figure)
    if as_json:
        print_json({
            "comparisons": [row._asdict() | {"difference": row.difference} for row in rows],
            "left_out": [{"name": name, "reason": why} for name, why in left_out.items()],
        })  # fmt: skip
        return
    _print(*tables.literature_tables(rows), "What no schedule can be held against:",
           *(f"- {name}: {why}" for name, why in left_out.items()))  # fmt: skip
    equal = sum(row.equal for row in rows)
    typer.echo(f"\n{len(rows)} numbers: {equal} equal, {len(rows) - equal} differ, each with its "
               "reason.")  # fmt: skip
