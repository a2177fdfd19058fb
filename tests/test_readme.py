"""README and docs/engine.md tell the truth: their commands and scripts are run, what those print
is compared. (docs/to-torch.md has its test in test_to_torch.py.)

A comment before a code block says what the block is: `<!-- run -->` (with options added, to be
quick: `<!-- run: --steps 3 -->`), `<!-- file: NAME -->`, and for what the block above prints,
`<!-- prints -->`, `<!-- begins with -->`, or `<!-- shows -->`: each of these lines is among what it
prints, and … stands for anything.
"""

import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from fnmatch import filter as matching
from itertools import product
from pathlib import Path

import pytest
from matplotlib.image import imread
from rich.console import Console

import minipipe as mp
from minipipe import report

ROOT = Path(__file__).parents[1]
README, ENGINE = ((ROOT / page).read_text(encoding="utf-8")
                  for page in ("README.md", "docs/engine.md"))  # fmt: skip


@dataclass
class Block:
    """A code block: its marks by name, its language and its text."""

    marks: dict[str, str] = field(default_factory=dict)
    language: str = ""
    text: str = ""


def read_blocks(page):
    blocks, marks, block = [], {}, None
    for line in page.splitlines():
        mark = re.fullmatch(r"<!-- ([^:]*?)(?:: (.*))? -->", line)
        if line.startswith("```"):
            if block is None:
                block, marks = Block(marks, line[3:]), {}
            else:
                blocks.append(block)
                block = None
        elif block is not None:
            block.text += line + "\n"
        elif mark:
            marks[mark[1]] = mark[2] or ""
    assert block is None, "a code block has no end"
    return blocks


BLOCKS = [*read_blocks(README), *read_blocks(ENGINE)]
RUN = [number for number, block in enumerate(BLOCKS) if "run" in block.marks]


def marked(name):
    return next(block for block in BLOCKS if name in block.marks)


def installed(name):
    """The install command called so, and the PowerShell line after it, without the line's end."""
    place = next(n for n, block in enumerate(BLOCKS) if block.marks.get("install") == name)
    assert [BLOCKS[place].language, BLOCKS[place + 1].language] == ["bash", "powershell"]
    return BLOCKS[place].text.strip(), BLOCKS[place + 1].text.strip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files that the page has its reader save."""
    path = tmp_path_factory.mktemp("readme")
    for block in BLOCKS:
        if "file" in block.marks:
            (path / block.marks["file"]).write_text(block.text, encoding="utf-8")
    return path


def call(line, options, folder):
    """Run one line of a shell as the page has it; what it prints."""
    words = shlex.split(line)
    programs = {"minipipe": ["-m", "minipipe"], "torchrun": ["-m", "torch.distributed.run"],
                "python": []}  # fmt: skip
    command = [sys.executable, *programs[words[0]], *words[1:]]
    if words[:2] in (["minipipe", "run"], ["minipipe", "race"]):
        command += shlex.split(options)
    environment = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    for _ in range(3):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True,
                              encoding="utf-8", check=False)  # fmt: skip
        if "took longer than their slot" not in done.stderr:
            break
    else:
        pytest.skip("three times too busy to measure")
    assert done.returncode == ("broken" in line), done.stderr
    return done.stdout


@pytest.mark.parametrize("number", RUN)
def test_what_the_page_has_its_reader_run(number, folder):
    block = BLOCKS[number]
    lines = block.text.splitlines()
    if block.language == "python":
        name = block.marks.get("file", "example.py")
        (folder / name).write_text(block.text, encoding="utf-8")
        lines = [f"python {name}"]
    printed = "".join(call(line, block.marks["run"], folder) for line in lines)
    printed = [line.rstrip() for line in printed.splitlines()]
    after = BLOCKS[number + 1] if number + 1 < len(BLOCKS) else Block()
    if "prints" in after.marks:
        assert printed == after.text.splitlines()
    elif "begins with" in after.marks:
        assert printed[: after.text.count("\n")] == after.text.splitlines()
    elif "shows" in after.marks:
        for line in after.text.splitlines():
            assert matching(printed, line.replace("[", "[[]").replace("…", "*")), line


def test_every_output_on_the_page_follows_what_prints_it():
    for number, block in enumerate(BLOCKS):
        if {"prints", "begins with", "shows"} & block.marks.keys():
            assert number - 1 in RUN


def test_the_two_commands_do_all_their_own_set_up():
    for name, install, last in (("race", "install -e .", "minipipe race"),
                                ("test", "install -e '.[test]'", "python -m pytest")):  # fmt: skip
        unix, windows = installed(name)
        assert unix.split(" && ") == ["python3 -m venv .venv", f".venv/bin/python -m pip {install}",
                                      f".venv/bin/{last}"]  # fmt: skip
        same = windows.replace("\\Scripts\\", "/bin/").replace("py -m venv", "python3 -m venv")
        assert same.split("; ") == unix.split(" && ")


def test_continuous_integration_runs_the_readmes_test_command():
    script = ROOT / ".ci" / "run"
    lines = script.read_text(encoding="utf-8").splitlines()
    steps = [step.replace(".venv/bin/python", '"$python"')
             for step in installed("test")[0].split(" && ")[1:]]  # fmt: skip
    steps.append('"$python" -m ruff check')
    places = [lines.index(step) for step in steps]
    assert places == sorted(places)
    assert "set -euo pipefail" in lines
    if os.name == "posix":
        assert os.access(script, os.X_OK)
        assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


def test_the_races_table_is_that_of_a_real_run():
    """Of docs/race.json, which `minipipe race` wrote, as it is printed today."""
    summary = json.loads((ROOT / "docs" / "race.json").read_text(encoding="utf-8"))
    names = [entry["name"] for entry in summary["entries"]]
    assert names == ["one-process", "ddp", "naive", "gpipe", "gpipe+recompute", "1f1b",
                     "interleaved"]  # fmt: skip
    console = Console(file=io.StringIO(), width=100)
    console.print(*report.race_tables(summary["entries"], 100))
    shown = [line.rstrip() for line in console.file.getvalue().strip().splitlines()]
    assert marked("race table").text.rstrip("\n").splitlines() == shown


LEGAL = {"1 or more each": lambda p, m: True,
         "p even, m even and ≥ 2p": lambda p, m: p % 2 == m % 2 == 0 and m >= 2 * p,
         "m ≥ 2p": lambda p, m: m >= 2 * p,
         "p even, m ≥ 2": lambda p, m: p % 2 == 0 and m >= 2}  # fmt: skip


def shares(p, m, v, k):
    """By text in the table: idle / total. k: what the next column has."""
    x = 6 * p - 1 - 6 * k
    return {"(p − 1)/p": (p - 1) / p, "(p − 1)/(m + p − 1)": (p - 1) / (m + p - 1),
            "(p − 1)/(vm + p − 1)": (p - 1) / (v * m + p - 1),
            "(p − 1)/(3m + p − 1)": (p - 1) / (3 * m + p - 1),
            "(p − 1)/(3vm + p − 1)": (p - 1) / (3 * v * m + p - 1),
            "(p − 1)/(6m + p − 1)": (p - 1) / (6 * m + p - 1),
            "(p − 2)/(3m + p − 2)": (p - 2) / (3 * m + p - 2),
            "x/(6m + x), x = 6p − 1 − 6k": x / (6 * m + x),
            "20.0 % for p = 4, m = 8": 0.2, "26.2 % for p = 4, m = 8": 17 / 65}  # fmt: skip


def peaks(p, m, v):
    """By text in the table: what each rank keeps at most, or the fullest."""
    n = min(p, m)
    return {"forward only": [0] * p, "1": [1] * p, "m": [m] * p,
            "m; with recompute 1 and m inputs": [m] * p,
            "min(m, p − rank)": [min(m, p - rank) for rank in range(p)],
            "min(mv, (v − 1)·group + 2(p − 1 − rank) + 1)/v":
            [min(m * v, (v - 1) * n + 2 * (p - 1 - rank) + 1) / v for rank in range(p)],
            "min(m, p)": [min(m, p)] * p, "min(m, 2p − 1)": [min(m, 2 * p - 1)] * p,
            "min(mv, (v − 1)·group + p)/v": [min(m * v, (v - 1) * n + p) / v] * p,
            "k = ⌊(p + 2)/2⌋": [(p + 2) // 2] * p, "k = ⌊(p + 4)/3⌋": [(p + 4) // 3] * p,
            "p + 1": [p + 1] * p, "p + 1/2": [p + 0.5] * p, "p": p, "the limit": m}  # fmt: skip


def test_the_table_of_sizes_names_every_schedule_and_its_arguments():
    lines = README.split("<!-- sizes -->")[1].strip().split("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0].strip("`") for row in rows] == list(mp.SCHEDULES)
    for name, sizes, arguments, share, kept in rows:
        name = name.strip("`")
        takes = [*inspect.signature(mp.SCHEDULES[name]).parameters][2:]
        assert re.findall(r"`(\w+)`", arguments) == takes
        for ranks, microbatches in product(range(1, 7), range(1, 14)):
            if LEGAL[sizes](ranks, microbatches):
                mp.check(mp.build(name, ranks=ranks, microbatches=microbatches))
                continue
            with pytest.raises(mp.ScheduleError):
                mp.build(name, ranks=ranks, microbatches=microbatches)
        for p, m, v in ((4, 8, 2), (4, 8, 3), (2, 4, 1), (3, 9, 2)):
            only_one = "p = 4, m = 8" in share and (p, m) != (4, 8)
            if not LEGAL[sizes](p, m) or only_one or ("⌊" in kept and p < 3):
                continue
            more = {"chunks": v} if "chunks" in takes else {}
            t = mp.simulate(mp.build(name, ranks=p, microbatches=m, **more))
            found, says = list(map(float, t.peak_activations)), peaks(p, m, v)[kept]
            assert found == says if isinstance(says, list) else max(found) <= says
            idle = shares(p, m, v, found[0])[share]
            assert float(t.bubble.idle_over_total) == pytest.approx(idle), (name, p, m, v)


def test_what_the_page_points_to_is_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", README)
    assert {"docs/figures/timeline-1f1b.png", "docs/figures/bubbles.png",
            "docs/figures/overview.png"} <= set(links)  # fmt: skip
    inside = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", ENGINE)
    for link in [*links, *(f"docs/{link}" for link in inside)]:
        assert (ROOT / link).exists(), link
        if link.endswith(".png"):
            assert imread(ROOT / link).shape[1] >= 1000
    for line in marked("tree").text.splitlines():
        inside = "minipipe" if line.startswith("  ") else ""
        for name in re.split(r" {3,}", line.strip())[0].split():
            assert (ROOT / inside / name).exists(), name


def test_pages_are_for_any_machine():
    pages = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "environment.yml", ".ci/run",
             "lessons/README.md", "docs/engine.md", "docs/to-torch.md"]  # fmt: skip
    for page in pages:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert not re.search(r"(?<![\w.])/(work|root|home|tmp|Users)/", text), page
