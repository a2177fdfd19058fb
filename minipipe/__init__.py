"""minipipe: pipeline-parallel training as one readable table of actions.

One table has four uses: `check` it, `simulate` it, run it with `Pipeline` on real processes, and
draw it with `plot`. Importing minipipe, and all of the planning half, does without torch.
"""

from __future__ import annotations

import importlib

from minipipe.actions import Action, ScheduleError
from minipipe.bounds import lower_bound
from minipipe.check import check
from minipipe.costs import Costs
from minipipe.lower import lower
from minipipe.schedule import Schedule
from minipipe.schedules import SCHEDULES, build
from minipipe.simulate import simulate
from minipipe.timeline import Timeline

__version__ = "0.1.0"

# What needs torch or matplotlib is imported when it is first used.
_LATER = {
    "Pipeline": "minipipe.pipeline",
    "StepResult": "minipipe.results",
    "PipelineError": "minipipe.ranks.failure",
    "Pace": "minipipe.emulation",
    "launch": "minipipe.ranks.launch",
    "RankError": "minipipe.ranks.launch",
    "plot": "minipipe.plot",
    "datasets": "minipipe.datasets",
    "models": "minipipe.models",
    "partition": "minipipe.partition",
}

__all__ = [
    "SCHEDULES", "Action", "Costs", "Schedule", "ScheduleError", "Timeline", "build", "check",
    "lower", "lower_bound", "simulate", *_LATER,
]  # fmt: skip


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'minipipe' has no attribute '{name}'")
    module = importlib.import_module(_LATER[name])
    return module if module.__name__ == f"minipipe.{name}" else getattr(module, name)


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_LATER))
