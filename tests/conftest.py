"""What all tests share: ranks that start at once, and none that stay."""

import os

import pytest
from hypothesis import settings

from minipipe.ranks import launch

# One thread for torch in the process of pytest; ranks are given their own number.
os.environ.setdefault("OMP_NUM_THREADS", "1")
settings.register_profile("minipipe", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("minipipe")


def pytest_collection_modifyitems(items):
    """Start the fork server while the first tests run, with all that a rank of a test imports."""
    if not any("engine" in item.path.parts for item in items):
        return
    launch.warm("minipipe.pipeline", "minipipe", "pytest", "hypothesis")


@pytest.fixture
def failures(tmp_path):
    """A function like `launch` that returns what each rank raised, or None where it returned."""
    from ranks import failures

    def run(fn, *args, ranks):
        return failures(fn, *args, ranks=ranks, directory=str(tmp_path))

    return run
