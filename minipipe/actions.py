"""An action and its text form: `3F5` is the forward pass of micro-batch 5 through stage 3."""

import re
from typing import NamedTuple

KINDS = {
    "F": "forward",
    "B": "backward",
    "I": "gradient for the input",
    "W": "gradient for the weights",
    "R": "recompute",
    "U": "weight update",
}
MOST = 999_999_999  # for stages and micro-batches
_ACTION = re.compile(r"([0-9]{1,9})([FBIWRU])([0-9]{1,9})")
# torch writes a pair with the name of its computation type behind the bracket.
_PAIR = re.compile(r"\(([^;()]+);([^;()]+)\)(?:OVERLAP_F_B)?")


class ScheduleError(ValueError):
    """A table that is not a legal schedule, or sizes that a schedule can't have.

    `reasons` is the tuple of independent reasons, the earliest in the table first.
    """

    def __init__(self, *reasons: str):
        more = len(reasons) - 20
        super().__init__("\n".join(reasons[:20]) + (f"\n… and {more} more" if more > 0 else ""))
        self.reasons = reasons


class Action(NamedTuple):
    """One thing that a rank does: `kind` is one of F, B, I, W, R, U.

    An overlapped pair `(0F4;7B3)` is the forward action with `overlapped` set to the backward one.
    """

    stage: int
    kind: str
    microbatch: int
    overlapped: "Action | None" = None

    @property
    def parts(self) -> tuple["Action", ...]:
        """The single actions: one, or forward and backward of an overlapped pair."""
        if self.overlapped is None:
            return (self,)
        return (Action(self.stage, self.kind, self.microbatch), self.overlapped)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.microbatch}"
        return text if self.overlapped is None else f"({text};{self.overlapped})"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Read `3F5` or `(0F4;7B3)`, also in torch's spelling; ScheduleError for anything else."""
        if not isinstance(text, str):
            raise ScheduleError(f"{text!r} is not an action, nor its text, such as '3F5'")
        text = text.strip()
        pair = _PAIR.fullmatch(text)
        if pair:
            forward, backward = (cls.parse(part) for part in pair.groups())
            if (forward.kind, backward.kind) != ("F", "B"):
                raise ScheduleError(f"'{text}' is not a pair: a pair is (F;B), as in (0F4;7B3)")
            return forward._replace(overlapped=backward)
        match = _ACTION.fullmatch(text)
        if match is None:
            hint = "torch's sends and receives are not read: dump with format='compute_only'" if (
                re.search("SEND|RECV|SHARD|REDUCE", text)) else "as in 3F5"  # fmt: skip
            short = text if len(text) <= 40 else text[:40] + "…"
            raise ScheduleError(
                f"'{short}' is not an action: write stage, one of {' '.join(KINDS)}, micro-batch, "
                f"the numbers with at most nine digits; {hint}"
            )
        return cls(int(match[1]), match[2], int(match[3]))
