"""What the plan half promises as a whole: no torch, little code, no time lost."""

import ast
import subprocess
import sys
import time

import plan_common as common
import pytest

from minipipe.schedules import SCHEDULES

MODULES = ["actions", "schedule", "costs", "lower", "check", "bounds", "simulate", "timeline"]
FILES = [common.PLAN / f"{m}.py" for m in MODULES] + sorted(
    (common.PLAN / "schedules").glob("*.py")
)


def test_no_module_of_the_plan_half_imports_torch():
    names = [
        "minipipe",
        *(".".join(f.relative_to(common.PLAN.parent).with_suffix("").parts) for f in FILES),
    ]
    code = (
        f"import sys\nfor name in {names}: __import__(name)\n"
        "import minipipe as mp\nmp.simulate(mp.build('1f1b', ranks=2, microbatches=2))\n"
        "print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=common.PLAN.parent,
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def docstring_lines(node):
    """Lines of the docstring of a module, class or function: a schedule's has its rows."""
    first = node.body[0] if getattr(node, "body", None) and isinstance(node.body, list) else None
    text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return first.end_lineno - first.lineno + 1 if text else 0


def test_the_plan_half_is_small():
    """1,800 lines, docstrings not counted, as for a single schedule."""
    lines = {}
    for file in FILES:
        text = file.read_text(encoding="utf-8")
        nodes = [node for node in ast.walk(ast.parse(text))
                 if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]  # fmt: skip
        lines[file.name] = len(text.splitlines()) - sum(map(docstring_lines, nodes))
    assert sum(lines.values()) <= 1800, lines
    assert max(lines.values()) <= 400, lines


def functions(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_functions_are_short(file):
    for function in functions(file):
        lines = function.end_lineno - function.lineno + 1 - docstring_lines(function)
        limit = 40 if file.parent.name == "schedules" else 60
        assert lines <= limit, f"{function.name} has {lines} lines"


def lines_of_code(text, function):
    """How many lines have code: neither blank nor docstring."""
    tree = list(ast.walk(function))
    docs = [node.body[0] for node in tree if docstring_lines(node)]
    documented = {line for doc in docs for line in range(doc.lineno, doc.end_lineno + 1)}
    lines = range(function.lineno, function.end_lineno + 1)
    return sum(bool(text.splitlines()[n - 1].strip()) for n in lines if n not in documented)


def schedule_lines(name, code, seen):
    """Lines of a schedule's function and of all that it calls in schedules/ but `require`, which
    refuses what is no schedule."""
    text, function = code[name]
    seen.add(name)
    called = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    others = called & code.keys() - seen - {"require"}
    return lines_of_code(text, function) + sum(schedule_lines(o, code, seen) for o in others)


def test_a_schedule_has_40_lines():
    texts = [f.read_text(encoding="utf-8") for f in FILES if f.parent.name == "schedules"]
    code = {node.name: (text, node) for text in texts for node in ast.parse(text).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)}  # fmt: skip
    lines = {name: schedule_lines(make.__name__, code, set()) for name, make in SCHEDULES.items()}
    assert max(lines.values()) <= 40, lines
    assert lines["naive"] == 3 and lines["1f1b"] > 20  # the helper is counted


def test_numbers_with_gaps_take_no_memory():
    """In a process with 600 MB of address space: each gives one clear error."""
    pytest.importorskip("resource")  # not on Windows
    code = """
import resource, time
resource.setrlimit(resource.RLIMIT_AS, (600 << 20, 600 << 20))
import minipipe as mp
texts = [
    "0F999999999", "999999999F0", "999999999F999999999 999999999B999999999", "0F0 0B0 0U999999999",
    "0F0 999999999F1 0B0 999999999B1", "(0F999999999;0B0)",
    " ".join(f"{n}F{n}" for n in range(4000)),
]
for text in texts:
    for use in (mp.check, mp.simulate, mp.lower, lambda s: mp.check(s, memory_limit=1)):
        try:
            use(mp.Schedule.parse(text))
        except mp.ScheduleError as error:
            assert len(str(error)) < 6000, len(str(error))
        else:
            raise SystemExit(f"accepted: {text[:40]}")
"""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=common.PLAN.parent,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert time.monotonic() - began < 20
