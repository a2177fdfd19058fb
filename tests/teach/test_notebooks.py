"""Notebooks are what their sources build, and run top to bottom."""

import io
from concurrent.futures import ThreadPoolExecutor

import numpy
import psutil
import pytest
from matplotlib import image

from minipipe.teach import notebooks, sources
from minipipe.teach.course import CourseError, find_course

COURSE = find_course(__file__)


def test_the_committed_notebooks_are_what_the_sources_build():
    for path, text in notebooks.built(COURSE):
        assert path.exists(), f"run `minipipe lessons`: {path.name} is not built"
        assert path.read_text(encoding="utf-8") == text, f"run `minipipe lessons`: {path.name}"


def test_a_students_notebook_has_no_solution_and_no_outputs():
    for path, text in notebooks.built(COURSE):
        assert "BEGIN SOLUTION" not in text
        assert "REBUILD" not in text
        if path.suffix == ".ipynb":
            assert '"output_type"' not in text


@pytest.mark.parametrize("number", COURSE.lessons)
def test_both_editions_run(number):
    """The student's with nothing but "not written yet", the other without any error; pictures are
    those that are committed; no process stays."""
    lesson = COURSE.lessons[number]
    editions = [notebooks.build(COURSE, lesson, solved=solved) for solved in (False, True)]
    with ThreadPoolExecutor(2) as pool:
        student, solved = pool.map(lambda made: notebooks.run(COURSE, made), editions)
    assert notebooks.errors(solved) == []
    assert [e for e in notebooks.errors(student) if not notebooks.is_marked(*e[1:])] == []
    for cell in solved.cells:
        if cell.source.startswith("%%task"):
            shown = "".join(str(output) for output in cell.outputs)
            assert "passed" in shown, shown
    for name, png in notebooks.pictures(solved):
        check_picture(COURSE.root / "lessons" / "figures" / f"{name}.png", png)
    left = [p for p in psutil.Process().children(recursive=True) if "ipykernel" in str(p.cmdline())]
    assert not left


def check_picture(path, png):
    """The same picture, up to what another version of matplotlib may draw differently."""
    assert path.exists(), f"run `minipipe lessons --figures`: {path.name} is missing"
    committed, made = image.imread(path), image.imread(io.BytesIO(png))
    assert abs(numpy.array(committed.shape[:2]) - made.shape[:2]).max() <= 40
    if committed.shape == made.shape:
        assert numpy.abs(committed - made).mean() < 0.05, f"{path.name} shows something else"


def test_a_picture_that_the_prose_shows_is_there():
    for path, text in notebooks.built(COURSE):
        if path.suffix == ".ipynb":
            for name in set(part.split(")")[0] for part in text.split("figures/")[1:]):
                assert (COURSE.root / "lessons" / "figures" / name).exists(), (path.name, name)


SOURCE = '''\
# %% [markdown] name="question"
# Why?
# %% name="one" task="6.1"
import math


def double(value):
    """Twice the value."""
    ### BEGIN SOLUTION
    return 2 * value
    ### END SOLUTION
# %% name="two"
from minipipe.actions import Action
### REBUILD minipipe.schedules.gpipe:gpipe
'''


def test_blanks(tmp_path):
    path = tmp_path / "06_test.py"
    path.write_text(SOURCE)
    question, one, two = sources.read_cells(path)
    assert (question.kind, question.text) == ("markdown", "Why?")
    blank = '"""Twice the value."""\n    raise NotImplementedError("6.1 is not written yet")'
    assert sources.starter(one.text, one.task).endswith(blank)
    assert sources.solution(one.text).endswith("    return 2 * value")
    given = sources.starter(two.text, "")
    assert "def gpipe(ranks: int, microbatches: int" in given
    assert "Idle/total is" in given
    assert "0F0 0F1" not in given
    assert "range(microbatches)" not in given
    scope = {}
    exec(sources.solution(two.text), scope)
    assert str(scope["gpipe"](1, 1)[0][1]) == "0B0"


@pytest.mark.parametrize("text", ["# %% [markdown]\n# no name", SOURCE + '# %% name="two"\n1',
                                  '# %% name="a b"\n1'])  # fmt: skip
def test_a_cell_needs_a_name_of_its_own(tmp_path, text):
    path = tmp_path / "06_test.py"
    path.write_text(text)
    with pytest.raises(CourseError, match="needs name="):
        sources.read_cells(path)


def test_pieces_of_a_page_keep_code_and_give_prose_an_id():
    page = "# Top\n\nOne\nline.\n\n<!-- run -->\n```\ncode\n\nmore\n```\nTwo.\n\n## Next, please\n"
    found = list(notebooks.pieces(page))
    assert "".join(text for _, text in found) == page
    assert [name for name, _ in found if name] == ["top-1", "top-2", "top-3", "next-please-1"]
