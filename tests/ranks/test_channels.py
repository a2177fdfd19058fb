"""Connections between ranks: exchanging vectors, comparing clocks, breaking off."""

import os
import time
from pathlib import Path

import pytest
import torch

from minipipe.ranks.channels import Channels
from minipipe.ranks.launch import RankError, launch

pytestmark = pytest.mark.timeout(90)


def exchanges(rank):
    own = torch.tensor([rank, 10.0 * rank])
    return [Channels().exchange(own).tolist() for _ in range(3)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_rank_hears_every_vector(ranks):
    table = [[rank, 10.0 * rank] for rank in range(ranks)]
    assert launch(exchanges, ranks=ranks, timeout=60) == [[table] * 3] * ranks


def offsets(rank, shift):
    """Clocks that started `shift` seconds apart, as on several machines."""
    real = time.perf_counter
    time.perf_counter = lambda: real() + rank * shift
    try:
        return Channels().clock_offset()
    finally:
        time.perf_counter = real


@pytest.mark.parametrize("shift", [0.0, 1000.0])
def test_clocks_of_several_machines_are_compared(shift):
    found = launch(offsets, shift, ranks=3, timeout=60)
    assert found == pytest.approx([-rank * shift for rank in range(3)], abs=0.1)


def severs(rank, directory):
    channels = Channels()
    channels.connect([(0, 1), (1, 0), (1, 2), (2, 1)], torch.device("cpu"))
    if rank == 1:
        channels.sever()
    else:
        with pytest.raises(RuntimeError):
            channels.receive(1, torch.zeros(1)).wait()
    (Path(directory) / str(rank)).touch()
    deadline = time.monotonic() + 20
    while len(os.listdir(directory)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    raise RuntimeError("all heard it" if len(os.listdir(directory)) == 3 else "somebody waits")


def test_who_waits_for_a_rank_that_breaks_off_hears_it(tmp_path):
    with pytest.raises(RankError, match="all heard it"):
        launch(severs, str(tmp_path), ranks=3, timeout=60)
