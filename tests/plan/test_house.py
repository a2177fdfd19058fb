"""What the plan half promises as a whole: no torch, little code, no time lost."""

import ast
import subprocess
import sys
import time

import plan_common as common
import pytest

from minipipe import Schedule, build, simulate

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


def test_the_plan_half_is_small():
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in FILES}
    assert sum(lines.values()) <= 1800, lines
    assert max(lines.values()) <= 400, lines


def functions(file):
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_functions_are_short(file):
    for function in functions(file):
        first = function.body[0]
        doc = 0
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
            doc = first.end_lineno - first.lineno + 1
        lines = function.end_lineno - function.lineno + 1 - doc
        limit = 40 if file.parent.name == "schedules" else 60
        assert lines <= limit, f"{function.name} has {lines} lines"


def test_a_large_schedule_is_simulated_faster_than_torch_does_it():
    """`minipipe bench` has the exact ratio, which must be 10; here only that nothing is lost."""
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    schedule = build("interleaved", ranks=16, microbatches=128)
    order = {
        r: [torch._Action.from_str(str(a)) for a in row] for r, row in enumerate(schedule.rows)
    }
    begin = time.process_time()
    lowered = torch._add_send_recv(order, lambda stage: stage % 16, 32)
    torch._simulate_comms_compute(lowered, lambda stage: stage % 16, 32)
    theirs = time.process_time() - begin

    def ours() -> float:
        fresh = Schedule(schedule.rows)
        begin = time.process_time()
        t = simulate(fresh)
        _ = (
            t.makespan,
            t.bubble,
            t.waiting,
            t.peak_activations,
            t.bytes_sent,
            t.lower_bound,
            t.busy,
        )
        return time.process_time() - begin

    assert min(ours() for _ in range(3)) * 6 < theirs


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
