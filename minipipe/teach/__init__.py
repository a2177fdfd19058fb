"""The classroom: lessons from one source, graded tasks, releases for students, the grader.

In a notebook `%load_ext minipipe.teach` gives the cell magic `%%task 6.1`. Lessons use `reveal`
(a guess is typed before a result is shown) and `Stepper` (a run's record, action by action).
"""

from __future__ import annotations

import importlib

_LATER = {"Stepper": "minipipe.teach.stepper",
          **dict.fromkeys(("reveal", "side_by_side", "sliders"), "minipipe.teach.notebook")}

__all__ = [*_LATER]


def __getattr__(name: str):
    if name not in _LATER:
        raise AttributeError(f"module 'minipipe.teach' has no attribute '{name}'")
    return getattr(importlib.import_module(_LATER[name]), name)


def load_ipython_extension(shell) -> None:
    """What `%load_ext minipipe.teach` does."""
    from minipipe.teach.notebook import register

    register(shell)
