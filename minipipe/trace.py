"""A timeline as a Chrome trace, and told in sentences.

`write(timeline, "trace.json")` makes a file for https://ui.perfetto.dev or chrome://tracing;
`for sentence in narrate(timeline)` tells the step action by action.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from minipipe.actions import KINDS, Action
from minipipe.lower import Message, lower
from minipipe.report import ORIGINS, duration, headline
from minipipe.timeline import Span, Timeline

# Names of colours that the trace viewer knows.
_COLOURS = {"F": "thread_state_running", "B": "thread_state_iowait", "I": "terrible",
            "W": "good", "R": "thread_state_unknown", "U": "black"}  # fmt: skip


def chrome(t: Timeline) -> dict:
    """The timeline in the Trace Event Format, times in µs: a thread a rank, an arrow a message,
    a counter for what each rank keeps. A unit of the costs, where there are no seconds, is 1 ms."""
    scale = 1e6 if t.time_unit == "s" else 1e3
    name = f"{headline(t.schedule)}, {ORIGINS[t.origin]}"
    events: list[dict] = [_about("process_name", 0, name=name)]
    for rank in range(t.schedule.ranks):
        stages = t.schedule.stages_of(rank)
        what = "stage" if len(stages) == 1 else "stages"
        title = f"rank {rank} ({what} {', '.join(map(str, stages))})" if stages else f"rank {rank}"
        events += [_about("thread_name", rank, name=title),
                   _about("thread_sort_index", rank, sort_index=rank)]  # fmt: skip
        events += (_slice(span, scale) for span in t.spans_of(rank))
        kept = f"rank {rank} keeps ({t.memory_unit})"
        events += ({"ph": "C", "pid": 0, "name": kept, "ts": float(time) * scale,
                    "args": {"activations": float(level)}}
                   for time, level in dict(t.memory_curve(rank)).items())  # fmt: skip
    events += _arrows(t, scale)
    unit = "s" if t.time_unit == "s" else "units of the costs, 1 ms each"
    return {"traceEvents": events, "displayTimeUnit": "ms",
            "otherData": {"origin": ORIGINS[t.origin], "time": unit,
                          "rows": str(t.schedule)}}  # fmt: skip


def write(t: Timeline, path: str | Path) -> Path:
    """Write the Chrome trace of a timeline as JSON; returns the path."""
    path = Path(path)
    path.write_text(json.dumps(chrome(t)), encoding="utf-8")
    return path


def _about(what: str, rank: int, **arguments) -> dict:
    return {"ph": "M", "pid": 0, "tid": rank, "name": what, "args": arguments}


def _slice(span: Span, scale: float) -> dict:
    action = span.action
    kind = "pair" if action.overlapped else KINDS[action.kind]
    return {"ph": "X", "pid": 0, "tid": span.rank, "name": str(action), "cat": kind,
            "cname": _COLOURS[action.kind], "ts": float(span.start) * scale,
            "dur": float(span.end - span.start) * scale,
            "args": {"does": in_words(action)}}  # fmt: skip


def _arrows(t: Timeline, scale: float) -> Iterator[dict]:
    """From the action that sends each message to the one that waits for it."""
    program = lower(t.schedule)
    begins: dict[Message, Span] = {}
    number = 0
    steps = {rank: program.steps(rank) for rank in range(t.schedule.ranks)}
    for rank, own in steps.items():
        for span, step in zip(t.spans_of(rank), own, strict=True):
            begins.update((message, span) for message in step.sends)
    for rank, own in steps.items():
        for span, step in zip(t.spans_of(rank), own, strict=True):
            for message in step.receives:
                source = begins[message]
                number += 1
                flow = {"pid": 0, "id": number, "cat": "message", "name": str(message)}
                # The viewer ties an arrow to the slice around it, so it starts just inside.
                leaves = float(source.end) - 0.01 * float(source.end - source.start)
                yield {**flow, "ph": "s", "tid": source.rank, "ts": leaves * scale}
                yield {**flow, "ph": "f", "bp": "e", "tid": rank,
                       "ts": float(span.start) * scale}  # fmt: skip


# ---- words -------------------------------------------------------------------------------------

_WORDS = {
    "F": "micro-batch {m} forward through stage {s}",
    "B": "micro-batch {m} backward through stage {s}",
    "I": "gradient of micro-batch {m} for the input of stage {s}",
    "W": "gradient of micro-batch {m} for the weights of stage {s}",
    "R": "activations of micro-batch {m} in stage {s} computed again",
    "U": "stage {s} applies the gradients up to micro-batch {m}",
}


def in_words(action: Action) -> str:
    """What an action does: `micro-batch 2 forward through stage 1`."""
    parts = [_WORDS[p.kind].format(m=p.microbatch, s=p.stage) for p in action.parts]
    return " overlapped with ".join(parts)


def narrate(t: Timeline) -> Iterator[str]:
    """The step told in order of time, a sentence for each moment at which actions start.

    `5.2 ms: rank 1 receives the activation of 0F2 from rank 0 and starts 1F2 (micro-batch 2
    forward through stage 1); rank 0 …`. One moment is what prints as one; a wait is named if it is
    longer than a tenth of the usual action.
    """
    program = lower(t.schedule)
    lengths = sorted(span.end - span.start for span in t.spans)
    least = lengths[len(lengths) // 2] / 10
    told = []
    for rank in range(t.schedule.ranks):
        free = 0
        for span, step in zip(t.spans_of(rank), program.steps(rank), strict=True):
            waited = span.start - free
            told.append((span, _clause(t, span, step.receives, waited if waited > least else 0)))
            free = span.end
    told.sort(key=lambda each: each[0].start)
    for when, clauses in groupby(told, key=lambda each: moment(t, each[0].start)):
        in_order = sorted(clauses, key=lambda each: each[0].rank)
        yield f"{when}: {'; '.join(clause for _, clause in in_order)}."
    ends = [f"rank {rank} has had nothing to do for {_long(t, idle.drain)}"
            for rank, idle in enumerate(t.waiting) if idle.drain > least]  # fmt: skip
    yield "; ".join([f"{moment(t, t.makespan)}: the step is over", *ends]) + "."


def moment(t: Timeline, time) -> str:
    return duration(t, time) if t.time_unit else f"t = {duration(t, time)}"


def _long(t: Timeline, time) -> str:
    if t.time_unit:
        return duration(t, time)
    return f"{duration(t, time)} unit{'' if time == 1 else 's'} of time"


def _clause(t: Timeline, span: Span, receives: tuple[Message, ...], waited) -> str:
    """`rank 3, which has waited 4.1 ms, receives … and starts …`."""
    who = f"rank {span.rank}"
    if waited:
        # Who waits for no message had no core, or was busy with something that is no action.
        verb = "has waited" if receives else "did nothing for"
        who += f", which {verb} {_long(t, waited)},"
    got = " and ".join(f"{message} from rank {message.source}" for message in receives)
    what = f"starts {span.action} ({in_words(span.action)})"
    return f"{who} receives {got} and {what}" if got else f"{who} {what}"
