"""Weights that depend on the seed alone: the same on every rank, whatever was drawn before."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, modules are made on the CPU and initialised from `seed`; the global generators stay.

    Modules made one after another inside differ, as one generator serves them all.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.random.default_generator.manual_seed(seed)  # torch.manual_seed would touch the GPUs'
        yield
