"""How one rank's failure becomes every rank's error, so that nobody waits for ever."""

from __future__ import annotations

import contextlib

import torch.distributed as dist

from minipipe.ranks.channels import Channels


class PipelineError(RuntimeError):
    """What stopped a step: raised on every rank, with the reason of the rank that failed first."""

    secondary = False  # whether another rank's failure is the cause; launch reports that one


class InputError(PipelineError, ValueError):
    """An argument that a step can't use: raised on every rank, before anything is computed."""


def _store():
    """Where the ranks leave what all have to know."""
    return dist.PrefixStore("minipipe", dist.distributed_c10d._get_default_store())


def failed() -> str:
    """Why a step failed that broke all connections, as the rank that failed first has said it."""
    store = _store()
    try:
        return store.get("failed").decode() if store.check(["failed"]) else ""
    except RuntimeError:  # the store went with the rank that held it
        return ""


def broken(error: Exception) -> PipelineError:
    """Why a connection broke."""
    found = PipelineError(failed() or f"the connection to another rank broke: {error}")
    found.secondary = True
    return found


def fail(channels: Channels, reason: str) -> None:
    """Tell the other ranks why this one can't go on, and break all connections, so that nobody
    waits; the process group can't be used any more."""
    store = _store()
    with contextlib.suppress(RuntimeError):
        if not store.check(["failed"]):
            store.set("failed", reason)
    channels.sever()
