"""Tables and words: what `minipipe show` and `minipipe race` print, each number with its unit.

Times of predictions are in the units of the costs, of measurements in ms. rich is imported where
a table is made, so that words and text pictures do without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

from minipipe.actions import ScheduleError
from minipipe.columns import fitted
from minipipe.costs import Number, common_scale
from minipipe.schedule import Schedule
from minipipe.timeline import Timeline

if TYPE_CHECKING:
    from rich.table import Table

MOST_COLUMNS = 400

# The four bubbles: attribute of `Timeline.bubble`, its definition, and who uses it.
BUBBLES = [
    ("idle_over_total", "idle / (ranks × makespan)", "GPipe, Chimera"),
    ("idle_over_ideal", "(makespan − ideal) / ideal", "Megatron-LM, Llama 3"),
    ("own_span", "(own span − busy) / own span, largest of the ranks", "Zero Bubble"),
    ("time", "makespan − ideal", "absolute idle time"),
]
ORIGINS = {"predicted": "predicted", "measured": "measured",
           "emulated": "measured on emulated devices"}  # fmt: skip


def number(value: Number) -> str:
    """A number with at most three places behind the point: 33, 28.5, 0.333."""
    if isinstance(value, int):
        return str(value)
    text = f"{float(value):.3f}".rstrip("0").rstrip(".")
    return text if text not in ("0", "-0") or not value else f"{float(value):.2g}"


def percent(share: Number) -> str:
    """A share (0 … 1) as in `27.3 %`."""
    return f"{100 * float(share):.1f} %"


def megabytes(size: Number) -> str:
    """A size in bytes as MB (10⁶ bytes), two significant places or more: `3.21 MB`."""
    value = size / 1e6
    return f"{value:.2f} MB" if value >= 0.1 or not size else f"{value:.2g} MB"


def milliseconds(seconds: Number) -> str:
    """A time in seconds as in `5.2 ms`."""
    return f"{1e3 * float(seconds):.1f} ms"


def duration(t: Timeline, value: Number) -> str:
    """A time of a timeline in words: ms where it is in seconds, else in units of the costs."""
    return milliseconds(value) if t.time_unit == "s" else number(value)


def amount(t: Timeline, value: Number) -> str:
    """What a rank keeps, in words: MB, or whole-share micro-batches as a bare number."""
    return megabytes(value) if t.memory_unit == "bytes" else number(value)


def count(how_many: int, what: str) -> str:
    """`1 rank`, `4 ranks`."""
    return f"{how_many} {what}" if how_many == 1 else f"{how_many} {what}s"


def headline(schedule: Schedule) -> str:
    """`1f1b, 4 ranks, 8 micro-batches`."""
    sizes = f"{count(schedule.ranks, 'rank')}, {count(schedule.microbatches, 'micro-batch')}"
    sizes = sizes.replace("batchs", "batches")
    return f"{schedule.name}, {sizes}" if schedule.name else sizes


def forward_part(schedule: Schedule) -> Schedule:
    """The forward actions of a schedule alone, in their order; ScheduleError for `naive`."""
    if schedule.name == "naive" and schedule.microbatches > 1 and not schedule.forward_only:
        raise ScheduleError(
            "naive runs one micro-batch at a time, which forward actions alone can't say: "
            "take microbatches=1, or gpipe"
        )
    rows = [[part for action in row for part in action.parts if part.kind == "F"]
            for row in schedule.rows]  # fmt: skip
    return Schedule(rows, schedule.name)


def slot(t: Timeline) -> Number | None:
    """The largest time of which all starts and ends are multiples; None where there is none
    (floats), or where the picture would take more than MOST_COLUMNS columns."""
    times = [time for span in t.spans for time in (span.start, span.end)]
    if t.time_unit or any(isinstance(time, float) for time in times):
        return None
    scale = common_scale(times)
    whole = math.gcd(*(int(time * scale) for time in times))
    if not whole or t.makespan * scale / whole > MOST_COLUMNS:
        return None
    return Fraction(whole, scale)


def text_picture(t: Timeline, width: int | None = None, device: str = "rank") -> list[str]:
    """The timeline as lines `rank 0: F0 F1  .`, one a rank and one column a slot of time.

    A longer action goes on with `-`, a dot is idle time. Actions are named `F3` where every rank
    holds one stage, else `4F3`. Where `width` characters are too few, blocks follow each other.
    Empty where the times are not small multiples of one slot.
    """
    one = slot(t)
    if one is None:
        return []
    schedule = t.schedule
    bare = not schedule.copies and schedule.stages == schedule.ranks and not schedule.has_pairs
    placed = [
        (span.rank, int(span.start / one), int((span.end - span.start) / one),
         str(span.action).lstrip("0123456789") if bare else str(span.action))
        for span in t.spans if span.end > span.start
    ]  # fmt: skip
    # A slot has one character more than `cell`: a blank, or `-` inside a longer action.
    cell = max([2, *(-(-(len(name) + 1) // slots) - 1 for _, _, slots, name in placed)])
    columns = int(t.makespan / one)
    rows = [[f"{'.':>{cell}} "] * columns for _ in range(schedule.ranks)]
    for rank, begin, slots, name in placed:
        text = f"{name:>{cell}}" if slots == 1 else f"{name} ".ljust(slots * (cell + 1) - 1, "-")
        rows[rank][begin] = f"{text} "
        rows[rank][begin + 1 : begin + slots] = [""] * (slots - 1)
    names = [f"{device} {rank}:" for rank in range(schedule.ranks)]
    indent = max(map(len, names))
    room = columns
    if width:
        room = max(1, min(columns, (width - indent - 1) // (cell + 1)))
    lines = []
    for begin in range(0, columns, room):
        if begin:
            lines += ["", f"from {number(begin * one)} on:"]
        for name, row in zip(names, rows, strict=True):
            part = "".join(row)[begin * (cell + 1) : (begin + room) * (cell + 1)]
            lines.append(f"{name:<{indent}} {part}".rstrip())
    return lines


def staircase(t: Timeline) -> list[str]:
    """A forward pass as the lesson draws it, `GPU 0: F0 F1  .` a device, then the idle fraction."""
    share = 100 * Fraction(t.bubble.idle_over_total)
    return [*text_picture(t, device="GPU"), f"Idle fraction: {math.floor(share + Fraction(1, 2))}%"]


def figures_table(t: Timeline) -> Table:
    """Makespan, ideal time and the four bubbles, each with its definition."""
    from rich import box
    from rich.table import Table

    unit = "" if t.time_unit else " (units of the costs)"
    table = Table(box=box.SIMPLE_HEAD, title=f"Figures, {ORIGINS[t.origin]}", title_justify="left")
    for column, align in (("figure", "left"), ("", "right"), ("what it is", "left")):
        table.add_column(column, justify=align)
    table.add_row("makespan", duration(t, t.makespan), f"first start to last end{unit}")
    table.add_row("ideal", duration(t, t.ideal), "busy time of the busiest rank")
    if t.lower_bound is not None:
        table.add_row("lower bound", duration(t, t.lower_bound),
                      "no order of these actions on these ranks is faster")  # fmt: skip
    for name, definition, users in BUBBLES:
        value = getattr(t.bubble, name)
        shown = duration(t, value) if name == "time" else percent(value)
        table.add_row("bubble", shown, f"{definition}: {users}")
    copies = t.schedule.parameter_copies
    table.add_row("parameters", f"{number(copies)} ×", "a rank's share of the model, at most")
    return table


def ranks_tables(t: Timeline, width: int | None = None) -> list[Table]:
    """For each rank its stages, busy and waiting time, and the most that it keeps; more than one
    table where `width` characters are too few."""
    kept = "peak activations" + ("" if t.memory_unit == "bytes" else " (micro-batches)")
    rows = []
    for rank, (busy, idle) in enumerate(zip(t.busy, t.waiting, strict=True)):
        times = {"busy": busy, "fill": idle.fill, "inside": idle.inside, "drain": idle.drain}
        stages = " ".join(map(str, t.schedule.stages_of(rank)))
        rows.append({"rank": str(rank), "stages": stages,
                     **{name: duration(t, value) for name, value in times.items()},
                     kept: amount(t, t.peak_activations[rank])})  # fmt: skip
    return fitted(rows, ["rank"], [[*rows[0]][1:]], ["Ranks"], width)


def _largest(values) -> Number | None:
    """The largest of a per-rank list; None where nothing was measured."""
    return max(values) if values else None


def _race_columns(entry: dict) -> dict[str, str]:
    """An entry's numbers as text, under their headings with units."""
    losses = entry.get("losses") or [None]
    figures = {
        "loss, last step": (losses[-1], "{:.4f}".format),
        "gradient differs by": (entry.get("max_gradient_error"), "{:.1e}".format),
        "test right (%)": (entry.get("accuracy"), lambda share: f"{100 * share:.1f}"),
        "step (ms)": (entry.get("step_ms"), "{:.1f}".format),
        "bubble predicted (%)": (entry.get("bubble_predicted"), lambda share: f"{100 * share:.1f}"),
        "bubble measured (%)": (entry.get("bubble_measured"), lambda share: f"{100 * share:.1f}"),
    }
    for heading, key in (("peak activations (MB)", "peak_activation_bytes"),
                         ("parameters (MB)", "parameter_bytes"),
                         ("sent a step (MB)", "bytes_sent")):  # fmt: skip
        figures[heading] = _largest(entry.get(key)), lambda size: megabytes(size).split()[0]
    return {name: "–" if value is None else how(value) for name, (value, how) in figures.items()}


def race_tables(entries: Sequence[dict], width: int = 124) -> list[Table]:
    """The comparison of a race: `entries` as in `minipipe race --json`; one table, or two where
    it is to be read in fewer than 124 characters, and more on a narrow terminal."""
    rows = [{"entry": entry["name"], **_race_columns(entry)} for entry in entries]
    headings = list(_race_columns({}))
    titles = ["Bubble = idle / (ranks × makespan).",
              "Activations, parameters and bytes sent: the largest of the ranks."]  # fmt: skip
    groups = [headings[:6], headings[6:]]
    if width >= 124:
        titles, groups = [" ".join(titles)], [headings]
    return fitted(rows, ["entry"], groups, titles, width, left=["entry"])


def in_words(entries: Sequence[dict], cores: int | None = None) -> str:
    """One paragraph about what a race showed, computed from its entries (as in `race --json`).

    cores: of the machine, so that the paragraph says where step times don't compare pipelines.
    """
    named = {entry["name"]: entry for entry in entries}
    sentences = [
        *_same_training(entries, named.get("one-process")),
        *_bubbles(entries),
        *_memory(named),
        *_traffic(entries, named.get("ddp")),
        *_step_times(entries, cores),
    ]
    return " ".join(sentences)


def _same_training(entries, one) -> list[str]:
    """Do all entries compute the same?"""
    said = []
    if one and one.get("losses"):
        others = [e for e in entries if e is not one and e.get("losses")]
        far = [(abs(e["losses"][-1] - one["losses"][-1]), e["name"]) for e in others]
        if far:
            most, name = max(far)
            said.append(f"After {count(len(one['losses']), 'step')} the loss of one process is "
                        f"{one['losses'][-1]:.4f}, and that of {name}, the farthest from it, "
                        f"differs by {most:.1g}.")  # fmt: skip
    errors = [(e["max_gradient_error"], e["name"]) for e in entries
              if e is not one and e.get("max_gradient_error") is not None]  # fmt: skip
    if errors:
        most, name = max(errors)
        verdict = ("rounding, so all of them train the same model" if most < 1e-4 else
                   "more than rounding explains: they do not all compute the same")  # fmt: skip
        said.append(f"In the first step a parameter's gradient differs from one process's by "
                    f"at most {most:.1g} of its largest value ({name}): {verdict}.")  # fmt: skip
    right = [e["accuracy"] for e in entries if e.get("accuracy") is not None]
    if right:
        low, high = percent(min(right)), percent(max(right))
        said.append(f"On the test images {low} are right" + ("." if low == high else
                    f" in the weakest entry and {high} in the strongest."))  # fmt: skip
    return said


def _bubbles(entries) -> list[str]:
    """Who waits least and most, and did the prediction hold?"""
    both = [e for e in entries
            if e.get("bubble_measured") is not None and e.get("bubble_predicted") is not None]
    if not both:
        return []
    least = min(both, key=lambda e: e["bubble_measured"])
    most = max(both, key=lambda e: e["bubble_measured"])
    off = max(both, key=lambda e: abs(e["bubble_measured"] - e["bubble_predicted"]))
    points = 100 * abs(off["bubble_measured"] - off["bubble_predicted"])

    def of(entry) -> str:
        return (f"{entry['name']} (measured {percent(entry['bubble_measured'])}, "
                f"predicted {percent(entry['bubble_predicted'])})")  # fmt: skip

    who = (f"{of(least)} idles least and {of(most)} most" if least is not most else
           f"{of(least)} has the only pipeline's bubble")  # fmt: skip
    return [f"By idle / (ranks × makespan), {who}; prediction and measurement are farthest apart "
            f"for {off['name']}, by {points:.1f} percentage points."]  # fmt: skip


def _memory(named: dict) -> list[str]:
    """What the order of actions does to the activations that are kept."""
    peaks = {name: _largest(e.get("peak_activation_bytes")) for name, e in named.items()}
    gpipe = peaks.get("gpipe")
    others = [(name, peaks[name]) for name in ("gpipe+recompute", "1f1b", "interleaved")
              if peaks.get(name) is not None]  # fmt: skip
    if not gpipe or not others:
        return []
    parts = [f"{name} {megabytes(peak)} ({peak / gpipe:.2f} of it)" for name, peak in others]
    return [f"On its fullest rank gpipe keeps {megabytes(gpipe)} of activations, "
            f"{_and(parts)}."]  # fmt: skip


def _traffic(entries, ddp) -> list[str]:
    """Data parallelism against pipelines: what a rank sends and holds."""
    pipelines = [e for e in entries if e["name"] not in ("one-process", "ddp")
                 and e.get("bytes_sent") and e.get("parameter_bytes")]  # fmt: skip
    if not ddp or not pipelines or not ddp.get("bytes_sent") or not ddp.get("parameter_bytes"):
        return []
    sent = max(ddp["bytes_sent"])
    low, high = (how(max(e["bytes_sent"]) for e in pipelines) for how in (min, max))
    held = max(max(e["parameter_bytes"]) for e in pipelines)
    compared = ("more than any pipeline" if sent > high else
                "less than any pipeline" if sent < low else
                "between the pipelines")  # fmt: skip
    spread = megabytes(low) if low == high else f"{megabytes(low)} to {megabytes(high)}"
    return [f"In a step a DDP rank sends {megabytes(sent)}, {compared} (the busiest rank sends "
            f"{spread}), and holds {megabytes(max(ddp['parameter_bytes']))} of parameters, a "
            f"pipeline's rank {megabytes(held)} at most."]  # fmt: skip


def _step_times(entries, cores) -> list[str]:
    timed = [e for e in entries if e.get("step_ms") is not None]
    if len(timed) < 2:
        return []
    quick, slow = (how(timed, key=lambda e: e["step_ms"]) for how in (min, max))
    said = (f"At full speed {quick['name']} has the shortest step ({quick['step_ms']:.1f} ms), "
            f"{slow['name']} the longest ({slow['step_ms']:.1f} ms)")  # fmt: skip
    ranks = max(len(e.get("parameter_bytes") or ()) for e in entries)
    if cores is not None and cores < ranks:
        said += (f"; {ranks} ranks share {count(cores, 'core')} here, so these times say little "
                 "about devices of their own")  # fmt: skip
    return [f"{said}."]


def _and(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
