"""In a notebook: `%%task 6.1`, guesses before results, and figures side by side."""

from __future__ import annotations

import html
from typing import Any

from minipipe.teach.course import CourseError, find_course


def register(shell) -> None:
    """Give the shell the cell magic %%task, and begin to load what ranks and judged tasks need: a
    launch in an earlier cell would else start processes that load it each time."""
    from minipipe.teach import judge

    judge.warm(*judge.PRELOADED)
    shell.register_magic_function(task_cell, "cell", "task")


def task_cell(line: str, cell: str) -> None:
    """%%task 6.1: run the cell, save it as the answer, and run the task's tests on it."""
    from IPython import get_ipython
    from IPython.display import display

    from minipipe.teach import progress

    course = find_course()
    task = course.task(line.split("#")[0].strip())
    shell = get_ipython()
    course.answers.mkdir(exist_ok=True)
    course.answer_file(task).write_text(cell if cell.endswith("\n") else cell + "\n",
                                        encoding="utf-8")  # fmt: skip
    ran = shell.run_cell(cell)
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
    if isinstance(guess, bool) or not isinstance(guess, (int, float)):
        raise CourseError(f"a guess is a number, not {guess!r}")
    unit = f" {unit}" if unit else ""
    verdict = "Right." if abs(guess - right) <= within + 1e-9 else "Look why before you go on."
    print(f"your guess: {guess:g}{unit}\nit is:      {float(right):.4g}{unit}\n{verdict}")


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
