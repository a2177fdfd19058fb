"""The two long tables: `minipipe show --all` and `minipipe literature`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

from minipipe.columns import fitted
from minipipe.family import distance, family
from minipipe.report import number, percent
from minipipe.timeline import Timeline

if TYPE_CHECKING:
    from rich.table import Table

    from minipipe.literature import Comparison


def _family_columns(t: Timeline, bytes_too: bool) -> dict[str, str]:
    """A schedule's figures as text, under their headings with units."""
    above, peaks, b = distance(t), list(map(number, t.peak_activations)), t.bubble
    return {
        "family": family(t.schedule),
        "schedule": t.schedule.name,
        "makespan": number(t.makespan),
        "above the bound": "–" if above is None else
                           f"{number(above['time'])} ({percent(above['share'])})",
        "idle / (ranks × makespan)": percent(b.idle_over_total),
        "(makespan − ideal) / ideal": percent(b.idle_over_ideal),
        "own span": percent(b.own_span),
        "makespan − ideal": number(b.time),
        "most kept": number(max(t.peak_activations)),
        "kept on each rank": " ".join(peaks) if len({*peaks}) > 1 else f"{peaks[0]} each",
        "parameters (×)": number(t.schedule.parameter_copies),
        "messages": str(t.messages),
        "bytes sent": number(sum(t.bytes_sent)) if bytes_too else "–",
    }  # fmt: skip


def family_tables(timelines: Sequence[Timeline], bytes_too: bool,
                  width: int | None = None) -> list[Table]:  # fmt: skip
    """Every schedule, by family: one table, or two where it is read in fewer than 160 characters,
    and more on a narrow terminal, which has no room for the families' names.

    bytes_too: whether messages have a size.
    """
    rows = [_family_columns(t, bytes_too) for t in timelines]
    headings = list(rows[0])
    titles = ["Times in units of the costs. Four bubbles: idle / (ranks × makespan) is GPipe's, "
              "(makespan − ideal) / ideal Megatron-LM's, own span Zero Bubble's, the last a time.",
              "The bound is that of the placement, with memory for all. Kept: activations in "
              "whole-share micro-batches. Bytes: of all ranks, in units of --costs message=…"]
    groups = [headings[2:8], headings[8:]]
    if width is None or width >= 160:
        titles, groups = [" ".join(titles)], [headings[2:]]
    first = headings[:2] if width is None or width >= 100 else ["schedule"]
    for before, row in reversed([*pairwise(rows)]):  # each family's name once
        if before["family"] == row["family"]:
            row["family"] = ""
    return fitted(rows, first, groups, titles, width, left=first, section="family")


def literature_tables(rows: Sequence[Comparison]) -> list[Table | str]:
    """A table a source, and below it the reasons of what differs (≈: equal in its digits)."""
    from rich import box
    from rich.table import Table

    parts: list[Table | str] = []
    for source, group in groupby(rows, key=lambda row: row.source):
        mine, reasons = list(group), []
        note = "" if mine[0].evidence == "read" else " (from a transcription of the paper)"
        table = Table(title=source + note, title_justify="left", box=box.SIMPLE_HEAD,
                      padding=(0, 1, 0, 0))  # fmt: skip
        for heading in ("what", "published", "ours", "difference", "why"):
            table.add_column(heading, justify="left" if heading == "what" else "right")
        for row in mine:
            if not row.equal and row.reason not in reasons:
                reasons.append(row.reason)
            why = "" if row.equal else f"[{reasons.index(row.reason) + 1}]"
            off = "=" if not row.difference else "≈" if row.equal else _short(row.difference)
            table.add_row(row.what, _short(row.published), _short(row.ours), off, why)
        parts += [table, *(f"[{place}] {text}" for place, text in enumerate(reasons, 1)), ""]
    return parts


def _short(value) -> str:
    """Four places for a share, three for the rest."""
    return f"{float(value):.4f}" if 0 < abs(value) < 1 else number(value)
