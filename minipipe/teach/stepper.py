"""A run's record, action by action: what each rank does, holds, sends and waits for.

`Stepper(step.timeline)` as the last line of a cell shows buttons that need no kernel; without
scripts, as on a repository's page, the first frame stands there as text.
"""

from __future__ import annotations

import html
import json
from typing import NamedTuple

from minipipe.lower import lower
from minipipe.report import ORIGINS, headline
from minipipe.timeline import Span, Timeline
from minipipe.trace import in_words, moment

_PAGE = """<div id="{id}" style="font-family:sans-serif">
<button>|&lt;</button> <button>&lt; back</button> <button>forward &gt;</button>
<button>&gt;|</button> <span></span>
<pre style="line-height:1.35;overflow-x:auto">{first}</pre></div>
<script>(() => {{
const frames = {frames}, root = document.getElementById("{id}");
const [first, back, next, last] = root.querySelectorAll("button");
let now = 0;
const show = place => {{
  now = Math.max(0, Math.min(frames.length - 1, place));
  root.querySelector("span").textContent = (now + 1) + " of " + frames.length;
  root.querySelector("pre").textContent = frames[now];
}};
first.onclick = () => show(0); back.onclick = () => show(now - 1);
next.onclick = () => show(now + 1); last.onclick = () => show(frames.length - 1);
show(0);
}})()</script>"""


class Frame(NamedTuple):
    """One moment: the action that starts then; for each rank what it does ("" if nothing), what it
    waits for ("" if nothing), and the (stage, micro-batch) whose activations it holds; the
    messages under way."""

    time: object
    starts: Span
    does: tuple[str, ...]
    waits: tuple[str, ...]
    holds: tuple[tuple[tuple[int, int], ...], ...]
    under_way: tuple[str, ...]


class Stepper:
    """Frames of a timeline, measured or predicted, in order of time."""

    def __init__(self, timeline: Timeline):
        if not isinstance(timeline, Timeline):
            raise TypeError("Stepper takes a Timeline, such as step.timeline, not a "
                            f"{type(timeline).__name__}")  # fmt: skip
        self.timeline = timeline
        program = lower(timeline.schedule)
        self._steps = [[*zip(timeline.spans_of(rank), program.steps(rank), strict=True)]
                       for rank in range(timeline.schedule.ranks)]  # fmt: skip
        self._sent = {message: span for row in self._steps for span, step in row
                      for message in step.sends}  # fmt: skip
        self._taken = {message: span for row in self._steps for span, step in row
                       for message in step.receives}  # fmt: skip
        starts = sorted(timeline.spans, key=lambda span: (span.start, span.rank))
        self.frames = [self._frame(span) for span in starts]

    def _frame(self, span: Span) -> Frame:
        now, does, waits, holds = span.start, [], [], []
        for row in self._steps:
            busy = [s for s, _ in row if s.start <= now < s.end]
            done = [s for s, _ in row if s.end <= now]
            does.append(str(busy[0].action) if busy else "")
            waits.append("" if busy else self._waits(row, now))
            holds.append(_held([*done, *busy], done))
        under_way = tuple(
            f"{message} to rank {message.target}" for message, sent in self._sent.items()
            if sent.end <= now < self._taken[message].start)  # fmt: skip
        return Frame(now, span, tuple(does), tuple(waits), tuple(holds), under_way)

    def _waits(self, row: list, now) -> str:
        later = [(s, step) for s, step in row if s.start > now]
        if not later:
            return "is done"
        _, step = later[0]
        late = [m for m in step.receives if self._sent[m].end > now]
        if not late:
            return f"is about to start {step.action}"
        return f"waits for {late[0]} from rank {late[0].source} to start {step.action}"

    def text(self, place: int) -> str:
        """A frame in words."""
        frame = self.frames[place]
        t = self.timeline
        lines = [f"{headline(t.schedule)}, {ORIGINS[t.origin]}",
                 f"{moment(t, frame.time)}: rank {frame.starts.rank} starts {frame.starts.action} "
                 f"({in_words(frame.starts.action)})", ""]  # fmt: skip
        for rank, (does, waits, held) in enumerate(
            zip(frame.does, frame.waits, frame.holds, strict=True)
        ):
            kept = " ".join(f"{s}F{m}" for s, m in held) or "nothing"
            lines.append(f"rank {rank}: {'runs ' + does if does else waits:58} holds {kept}")
        return "\n".join([*lines, "", "under way: " + ("; ".join(frame.under_way) or "nothing")])

    def __repr__(self) -> str:
        return self.text(0)

    def _repr_html_(self) -> str:
        texts = [self.text(place) for place in range(len(self.frames))]
        frames = json.dumps(texts).replace("</", "<\\/")
        return _PAGE.format(id=f"stepper{id(self)}", first=html.escape(texts[0]), frames=frames)


def _held(begun: list[Span], done: list[Span]) -> tuple[tuple[int, int], ...]:
    """Forwards that have begun and whose B or W is not done yet."""
    ended = {(p.stage, p.microbatch) for s in done for p in s.action.parts if p.kind in "BW"}
    held = {(p.stage, p.microbatch): 0 for s in begun for p in s.action.parts if p.kind == "F"}
    return tuple(each for each in held if each not in ended)
