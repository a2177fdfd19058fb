"""In a notebook: `%%task 6.1`, guesses before results, and figures side by side."""

from __future__ import annotations

import html
import os
from collections.abc import Callable
from numbers import Real
from typing import Any

from minipipe.teach.course import CourseError, find_course


def register(shell) -> None:
    """Give the shell the cell magic %%task, and begin to load what ranks and judged tasks need: a
    launch in an earlier cell would else start processes that load it each time."""
    from minipipe.teach import judge

    judge.warm(*judge.PRELOADED)
    shell.register_magic_function(task_cell, "cell", "task")


def task_cell(line: str, cell: str) -> None:
    """%%task 6.1: run the cell, save it as the answer, and run the task's tests on it.

    A starter never replaces an answer; an answer that has passed is kept beside the one that
    replaces it, as task_06_1.passed.py.
    """
    from IPython import get_ipython
    from IPython.core.error import UsageError
    from IPython.display import display

    from minipipe.teach import progress

    course = find_course()
    try:
        task = course.task(line.split("#")[0].strip())
    except CourseError as error:
        raise UsageError(f"%%task: {error}") from None
    ran = get_ipython().run_cell(cell)
    path, text = course.answer_file(task), cell if cell.endswith("\n") else cell + "\n"
    if path.is_file() and progress.is_starter(course, task, text):
        print(f"This is the starter; your answer in {path.name} stays. It is judged:")
    else:
        course.answers.mkdir(exist_ok=True)
        if progress.passed(course, task) and path.read_text(encoding="utf-8-sig") != text:
            path.replace(path.with_suffix(".passed.py"))
        path.write_text(text, encoding="utf-8")
    if ran.success:
        display(Report(progress.judge_and_note(course, task)))


class Report:
    """A task's result as a notebook and a terminal show it."""

    def __init__(self, result):
        self.result = result

    def _repr_html_(self) -> str:
        import base64

        text = f"<pre>{html.escape(repr(self))}</pre>"
        for test in self.result.tests:
            if test["picture"]:
                data = base64.b64encode(test["picture"]).decode()
                text += f'<img style="max-width:100%" alt="" src="data:image/png;base64,{data}"/>'
        return text

    def __repr__(self) -> str:
        from minipipe.teach.progress import describe

        return describe(self.result)


def reveal(guess: Any, right: float, unit: str = "", within: float = 0.0) -> None:
    """Print a guess beside the right value; where no guess is typed (`...`) only ask for one."""
    if guess is ... or guess is None:
        print("Type your guess in place of the three dots first, then run both cells again.")
        return
    if isinstance(guess, bool) or not isinstance(guess, Real):
        print(f"A guess is a number, not {guess!r}.")
        return
    guess = float(guess)
    unit = f" {unit}" if unit else ""
    verdict = "Right." if abs(guess - right) <= within + 1e-9 else "Look why before you go on."
    print(f"your guess: {guess:g}{unit}\nit is:      {float(right):.4g}{unit}\n{verdict}")


def sliders(function: Callable, **numbers: tuple[int, int, int]) -> None:
    """Sliders that draw a figure anew: sliders(show, ranks=(1, 8, 4)), each (least, most, first).
    Where a notebook has none, or nobody looks ($MINIPIPE_SLIDERS is 0), a line says so."""
    try:
        from ipywidgets import IntSlider, interact
    except ImportError:
        interact = None
    if interact is None or os.environ.get("MINIPIPE_SLIDERS") == "0":
        print("No sliders here: the figures above show the same.")
        return
    interact(function, **{name: IntSlider(first, least, most, continuous_update=False)
                          for name, (least, most, first) in numbers.items()})  # fmt: skip


class side_by_side:  # noqa: N801  used like a function
    """Two or more figures beside each other in a notebook: side_by_side(figure, figure)."""

    def __init__(self, *figures):
        self.figures = figures

    def _repr_html_(self) -> str:
        import base64
        import io

        images = []
        for figure in self.figures:
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png", dpi=70)
            data = base64.b64encode(buffer.getvalue()).decode()
            images.append(f'<img style="width:{98 // len(self.figures)}%" alt="figure" '
                          f'src="data:image/png;base64,{data}"/>')  # fmt: skip
        return "".join(images)
