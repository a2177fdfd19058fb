"""How one rank's failure becomes every rank's error, so that nobody waits for ever."""

from __future__ import annotations

import contextlib

from minipipe.ranks.channels import Channels


class PipelineError(RuntimeError):
    """What stopped a step: raised on every rank, with the reason of the rank that failed first."""

    secondary = False  # whether another rank's failure is the cause; launch reports that one


class InputError(PipelineError, ValueError):
    """An argument that a step can't use: raised on every rank, before anything is computed."""


def broken(store, error: Exception) -> PipelineError:
    """Why a connection broke: what the rank that failed first has left in the store."""
    try:
        text = store.get("failed").decode() if store.check(["failed"]) else ""
    except RuntimeError:  # the store went with the rank that held it
        text = ""
    found = PipelineError(text or f"the connection to another rank broke: {error}")
    found.secondary = True
    return found


def fail(store, channels: Channels, reason: str) -> None:
    """Tell the other ranks why this one can't go on, and break all connections, so that nobody
    waits; the process group can't be used any more."""
    with contextlib.suppress(RuntimeError):
        if not store.check(["failed"]):
            store.set("failed", reason)
    channels.sever()
