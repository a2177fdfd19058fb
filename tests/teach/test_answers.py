"""What an answer may not use refuses the answer, under whatever name, and nobody else."""

import pytest

import minipipe as mp
from minipipe.teach import answers
from minipipe.teach.course import find_course

COURSE = find_course(__file__)


@pytest.mark.parametrize(
    ("task", "code"),
    [
        ("2.3", "import torch; torch.arange(10).tensor_split(4)"),
        ("2.3", "import torch; torch.tensor_split(torch.arange(10), 4)"),
        ("3.1", "import minipipe as mp; mp.build('gpipe', ranks=2, microbatches=2)"),
        ("3.1", "import minipipe as mp; mp.SCHEDULES['gpipe'](2, 2)"),
        ("3.1", "from minipipe.schedules import gpipe; gpipe(2, 2)"),
        ("3.1", "import sys; sys.modules['minipipe.schedules.gpipe'].gpipe(2, 2)"),
        ("6.1", "from minipipe.schedules.rows import looped; looped(2, 2)"),
        ("6.1", "from minipipe.planning.search import search; search(2, 2)"),
        ("3.3", "import minipipe as mp; mp.Pipeline(None, None, None)"),
        ("4.2", "import minipipe as mp; mp.lower(mp.Schedule([['0F0', '0B0']]))"),
        ("4.2", "import minipipe.lower"),
        ("6.1", "import torch.distributed.pipelining"),
        ("6.1", "from torch.distributed import pipelining"),
        ("6.1", "from minipipe.teach import sources"),
    ],
)
def test_refused_to_an_answer_only(task, code):
    rows = mp.build("gpipe", ranks=2, microbatches=3)
    with answers.refused(COURSE.task(task)):
        with pytest.raises(answers.Forbidden, match="may not be used here"):
            exec(code, {"__name__": "answer"})
        assert mp.build("gpipe", ranks=2, microbatches=3) == rows
        mp.lower(rows)
        mp.simulate(rows)
    exec("import minipipe as mp; mp.SCHEDULES['gpipe'](2, 2)", {"__name__": "answer"})


def test_what_is_not_forbidden_works():
    with answers.refused(COURSE.task("6.1")):
        exec("import minipipe as mp; mp.simulate(mp.Schedule([['0F0', '0B0']]))",
             {"__name__": "answer"})  # fmt: skip
