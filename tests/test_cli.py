"""The commands: what they print, what they refuse, and how they end."""

import errno
import json
import os
import shlex
import subprocess
import sys
from collections import Counter

import pytest
from typer.testing import CliRunner

import minipipe as mp
from minipipe import family, report
from minipipe.cli import app
from minipipe.tables import family_tables

STAIRCASE = """\
GPU 0: F0 F1 F2 F3 F4 F5  .  .  .
GPU 1:  . F0 F1 F2 F3 F4 F5  .  .
GPU 2:  .  . F0 F1 F2 F3 F4 F5  .
GPU 3:  .  .  . F0 F1 F2 F3 F4 F5
Idle fraction: 33%
"""
KEYS = ["name", "ranks", "stages", "microbatches", "rows", "makespan", "ideal", "bubble",
        "peak_activations", "parameter_copies", "lower_bound"]  # fmt: skip


def run(*arguments, text=None):
    return CliRunner().invoke(app, list(arguments), input=text)


def shown(*arguments):
    result = run("show", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_staircase_letter_for_letter():
    result = run("show", "gpipe", "--ranks", "4", "--microbatches", "6", "--forward-only")
    assert (result.exit_code, result.stdout) == (0, STAIRCASE)


def test_staircase_of_24_and_of_one():
    result = run("show", "gpipe", "--ranks", "4", "--microbatches", "24", "--forward-only")
    lines = result.stdout.splitlines()
    assert len(lines) == 5 and lines[-1] == "Idle fraction: 11%"
    assert lines[0].split()[2:] == [f"F{m}" for m in range(24)] + ["."] * 3
    assert len({len(line) for line in lines[1:4]} | {len(lines[0])}) == 1
    result = run("show", "gpipe", "--ranks", "1", "--microbatches", "1", "--forward-only")
    assert result.stdout == "GPU 0: F0\nIdle fraction: 0%\n"


def test_show_prints_rows_that_can_be_read_again():
    result = run("show", "1f1b", "--ranks", "4", "--microbatches", "8")
    lines = result.stdout.splitlines()
    assert lines[0] == "# 1f1b, 4 ranks, 8 micro-batches"
    schedule = mp.build("1f1b", ranks=4, microbatches=8)
    assert mp.Schedule.parse("\n".join(lines[:5])) == schedule
    assert lines[7] == (
        "rank 0: F0 F1 F2 F3  .  .  .  .  .  . B0 -- F4 B1 -- F5 B2 -- F6 B3 -- F7 B4 --  . B5 --"
        "  . B6 --  . B7 --")
    for text in ("27.3 %", "37.5 %", "idle / (ranks × makespan)", "(makespan − ideal) / ideal",
                 "own span − busy", "makespan − ideal", "lower bound"):  # fmt: skip
        assert text in result.stdout


def test_show_defaults_to_4_ranks_and_8_microbatches():
    assert run("show", "gpipe").stdout.startswith("# gpipe, 4 ranks, 8 micro-batches\n")
    text = run("show", "gpipe", "--recompute", "--ranks", "1", "--microbatches", "1").stdout
    assert text.startswith("# gpipe+recompute, 1 rank, 1 micro-batch\n0F0 0R0 0B0\n")


def test_show_json_has_the_keys_of_the_contract():
    result = shown("1f1b", "--ranks", "4", "--microbatches", "8")
    assert list(result) == KEYS
    assert list(result["bubble"]) == ["idle_over_total", "idle_over_ideal", "own_span", "time"]
    assert (result["makespan"], result["ideal"], result["lower_bound"]) == (33, 24, 33)
    assert result["bubble"]["time"] == 9
    assert result["bubble"]["idle_over_total"] == pytest.approx(3 / 11)
    assert result["peak_activations"] == [4, 3, 2, 1]
    assert (result["stages"], result["parameter_copies"]) == (4, 1)
    assert result["rows"][3][:3] == ["3F0", "3B0", "3F1"]


def test_show_takes_costs_as_exact_fractions():
    half = shown("1f1b", "--costs", "F=1/2,I=0.5,W=1/2,latency=0")
    assert half["makespan"] == 16.5
    assert shown("1f1b", "--costs", "latency=1")["makespan"] > 33
    assert shown("gpipe", "--recompute", "--costs", "R=0")["makespan"] == 33
    assert shown("gpipe", "--costs", "F=1:3:1:1,I=0,W=1")["ideal"] == 8 * 4
    assert shown("gpipe", "--costs", "message=4,bandwidth=2")["makespan"] > 33
    assert shown("interleaved", "--chunks", "2", "--group", "6")["stages"] == 8
    assert max(shown("zb-auto", "--memory-limit", "4")["peak_activations"]) == 4


def test_show_reads_rows_from_a_file_and_draws_them(tmp_path):
    rows = tmp_path / "own.txt"
    rows.write_text("# mine\n0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n", encoding="utf-8")
    result = run("show", str(rows), "--figure", str(tmp_path / "own.png"), "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["name"] == "own"
    assert (tmp_path / "own.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads(run("show", "-", "--json", text="0F0 0B0").stdout)["makespan"] == 3


def test_show_without_a_text_picture():
    result = run("show", "1f1b", "--costs", "F=1/97,I=1/89,W=1")
    assert result.exit_code == 0 and "Too many columns" in result.stdout


@pytest.mark.parametrize("arguments, words", [
    (["show", "gpip"], ["did you mean 'gpipe'?", "1f1b"]),
    (["show", "gpipe", "--ranks", "0"], ["ranks=0", "at least 1"]),
    (["show", "gpipe", "--ranks", "four"], ["--ranks"]),
    (["show", "gpipe", "--chunks", "2"], ["gpipe takes no argument 'chunks'"]),
    (["show", "interleaved", "--group", "1"], ["group=1"]),
    (["show", "gpipe", "--costs", "F=fast"], ["F=fast is not a number"]),
    (["show", "gpipe", "--costs", "F=-1"], ["not negative"]),
    (["show", "gpipe", "--costs", "F=1/0"], ["F=1/0 is not a number"]),
    (["show", "gpipe", "--costs", "B=2"], ["give I and W"]),
    (["show", "gpipe", "--costs", "G=2"], ["'G=2' is none of F=…"]),
    (["show", "gpipe", "--costs", "F=1:2"], ["2 costs", "4 stages"]),
    (["show", "gpipe", "--costs", "F=1e400"], ["F=1e400 is not a number"]),
    (["show", "gpipe", "--costs", "F=1e999999999"], ["F=1e999999999 is not a number"]),
    (["show", "gpipe", "--costs", f"F={10**100}"], ["is not a number"]),
    (["show", "gpipe", "--costs", "F=1,F=2"], ["F is given twice"]),
    (["show", "interleaved", "--chunks", "0"], ["chunks=0", "at least 1"]),
    (["show", "interleaved", "--group", "0"], ["group=0", "at least 1"]),
    (["show", "--all", "--waves", "0"], ["waves=0", "at least 1"]),
    (["show", "zb-auto", "--costs", "F=1:2:3"], ["costs: forward has 3 costs", "4 stages"]),
    (["show", "zb-auto", "--memory-limit", "1/2"], ["memory_limit=1/2", "value is 1"]),
    (["show", "zb-auto", "--memory-limit", "x"], ["--memory-limit x"]),
    (["show", "1f1b", "--memory-limit", "4"], ["no argument 'memory_limit'"]),
    (["show", "gpipe", "--figure", "figure"], ["ending: .png"]),
    (["show", "--all", "--figure", "."], ["ending: .png"]),
    (["literature", "--figure", "/nowhere/at/all.png"], ["no such file or directory"]),
    (["optimize", "--memory", "1e999999999"], ["--memory 1e999999999 is not a number"]),
    (["optimize", "--out", "/nowhere/at/all.txt"], ["--out /nowhere/at/all.txt"]),
    (["search", "--out", "."], ["--out .: is no file"]),
    (["show", "gpipe", "--figure", "figure.xyz"], ["xyz"]),
    (["show", "gpipe", "--figure", "/nowhere/at/all.png"], ["/nowhere/at/all.png"]),
    (["show", "naive", "--forward-only"], ["one micro-batch at a time"]),
    (["show", "missing.txt"], ["missing.txt: no such file"]),
    (["show"], ["NAME"]),
    (["show", "gpipe", "--bad"], ["--bad"]),
    (["check", "missing.txt"], ["missing.txt can't be read"]),
    (["check", "-", "--memory-limit", "much"], ["--memory-limit much"]),
    (["check", "-", "--memory-limit", "-1"], ["negative"]),
    (["nothing"], ["nothing"]),
])  # fmt: skip
def test_bad_arguments_are_one_line_and_end_with_2(arguments, words):
    for end in ([], ["--json"]):
        result = run(*arguments, *end)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert len(result.stderr.splitlines()) == 1
        assert all(word in result.stderr for word in words), result.stderr


def test_a_file_of_rows_takes_no_sizes(tmp_path):
    rows = tmp_path / "own.txt"
    rows.write_text("0F0 0B0", encoding="utf-8")
    result = run("show", str(rows), "--ranks", "2", "--recompute")
    assert result.exit_code == 2 and "recompute, ranks: the rows in" in result.stderr


def test_check_says_what_follows(tmp_path):
    rows = tmp_path / "own.txt"
    rows.write_text(str(mp.build("1f1b", ranks=2, microbatches=3)), encoding="utf-8")
    result = run("check", str(rows))
    assert (result.exit_code, result.stdout) == (0, (
        f"{rows} is a legal schedule: 2 ranks, 2 stages, 3 micro-batches, 6 messages between "
        "ranks\nrank 0: stage 0; keeps the activations of 2 micro-batches at most\n"
        "rank 1: stage 1; keeps the activations of 1 micro-batch at most\n"))
    result = run("check", "-", "--json", text="0F0 0I0 0W0")
    found = json.loads(result.stdout)
    assert found["legal"] and found["reasons"] == [] and found["splits_backward"]
    assert run("check", "-", text="0F0 1F0").stdout.endswith(
        "forward only: `evaluate` runs it, a training step can't\n")


def test_check_gives_every_reason_and_ends_with_1():
    wrong = "0B0 0F0 0F1\n1F0 1B0 1F1 1B1 1B1\n"
    result = run("check", "-", text=wrong)
    assert result.exit_code == 1 and result.stderr == ""
    lines = result.stdout.splitlines()
    assert lines[0] == "standard input is not a legal schedule:"
    with pytest.raises(mp.ScheduleError) as error:
        mp.check(mp.Schedule.parse(wrong))
    assert lines[1:] == [f"- {reason}" for reason in error.value.reasons]
    result = run("check", "-", "--json", text=wrong)
    assert result.exit_code == 1
    assert json.loads(result.stdout) == {"legal": False, "reasons": list(error.value.reasons)}


def test_check_of_what_is_no_table():
    for text in ("0F0 hello", "", "# nothing\n"):
        result = run("check", "-", text=text)
        assert result.exit_code == 1 and result.stdout.count("\n- ") == 1
        shows = run("show", "-", text=text)
        assert shows.exit_code == 1 and shows.stdout == "" and shows.stderr


def test_check_with_a_memory_limit():
    text = str(mp.build("gpipe", ranks=2, microbatches=3))
    assert run("check", "-", "--memory-limit", "3", text=text).exit_code == 0
    result = run("check", "-", "--memory-limit", "5/2", text=text)
    assert result.exit_code == 1 and "rank 0" in result.stdout


def test_show_of_illegal_rows_ends_with_1():
    result = run("show", "-", "--json", text="0F0 0B0\n1B0 1F0")
    assert result.exit_code == 1 and result.stdout == ""
    assert "1B0" in result.stderr


def test_every_command_has_help():
    assert run("--help").exit_code == 0
    for command in ("show", "check", "doctor", "literature", "optimize", "search", "race", "run",
                    "bench"):  # fmt: skip
        result = run(command, "--help")
        assert result.exit_code == 0 and "--json" in result.stdout


def test_the_two_ways_to_start_are_the_same(tmp_path):
    arguments = ["show", "gpipe", "--ranks", "4", "--microbatches", "6", "--forward-only"]
    code = "from minipipe.cli import main; main()"
    for start in (["-m", "minipipe"], ["-c", code]):
        result = subprocess.run([sys.executable, *start, *arguments], capture_output=True,
                                check=False, encoding="utf-8")  # fmt: skip
        assert (result.returncode, result.stdout, result.stderr) == (0, STAIRCASE, "")
        result = subprocess.run([sys.executable, *start, "show", "gpip"], capture_output=True,
                                check=False, encoding="utf-8")  # fmt: skip
        assert result.returncode == 2 and "Traceback" not in result.stderr
        assert result.stderr.startswith("minipipe show: ")


def test_show_imports_neither_torch_nor_matplotlib():
    code = ("import sys; from minipipe.cli import app\n"
            "try: app(['show', '1f1b'])\n"
            "except SystemExit: pass\n"
            "print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))")
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True,
                            encoding="utf-8")  # fmt: skip
    assert result.stdout.splitlines()[-1] == "[]"


def test_a_console_without_unicode_still_gets_its_table():
    result = subprocess.run([sys.executable, "-m", "minipipe", "show", "1f1b"],
                            capture_output=True, check=False,
                            env={"PYTHONIOENCODING": "ascii", "PATH": ""})  # fmt: skip
    assert result.returncode == 0 and b"Traceback" not in result.stderr


def ended(script):
    """A line of a shell in which `minipipe` starts the command: exit code and standard error."""
    script = script.replace("minipipe", f"{shlex.quote(sys.executable)} -m minipipe")
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {script}"], capture_output=True,
                          check=False, encoding="utf-8")  # fmt: skip
    return done.returncode, done.stderr


@pytest.mark.skipif(os.name != "posix", reason="a shell's pipes and files")
def test_output_that_goes_nowhere_ends_without_a_traceback():
    for command in ("show --all", "literature", "show 1f1b", "show 1f1b --json"):
        for end in ("| head -n 1", "| true"):
            code, error = ended(f"minipipe {command} {end}")
            assert code in (0, 1) and error == ""
        assert ended(f"minipipe {command} >&-") == (0, "")
        if os.path.exists("/dev/full"):
            assert ended(f"minipipe {command} > /dev/full") == (
                1, "minipipe: no space left on device\n")


def test_a_file_that_cannot_be_written_is_named(monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "runs/losses.png")

    monkeypatch.setattr("minipipe.cli_all.show_all", full)
    result = run("show", "--all")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "minipipe: runs/losses.png: no space left on device\n"


def test_ctrl_c_ends_with_130(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("minipipe.cli_all.show_all", interrupted)
    result = run("show", "--all")
    assert (result.exit_code, result.stdout) == (130, "") and "Traceback" not in result.stderr


def test_doctor():
    result = run("doctor", "--json")
    found = json.loads(result.stdout)
    states = {check["name"]: check["state"] for check in found["checks"]}
    assert list(states) == ["Python", "torch", "torchvision", "matplotlib", "jupyter",
                            "processor cores", "memory", "disk", "start of ranks",
                            "ranks over loopback", "CUDA GPUs", "data files",
                            "OR-Tools (optional)", "browser (optional)"]  # fmt: skip
    assert states["ranks over loopback"] == states["data files"] == "ok"
    assert found["ok"] == ("fails" not in states.values())
    assert result.exit_code == (0 if found["ok"] else 1)
    for check in found["checks"]:
        assert check["found"] and (check["state"] == "ok" or check["advice"])


def test_doctor_survives_what_is_broken(monkeypatch):
    from minipipe import datasets, doctor

    def damaged(name):
        raise ValueError(f"{name}.npz is damaged")

    def broken():
        raise ImportError("libtorch.so: cannot open shared object file")

    monkeypatch.setattr(datasets, "load", damaged)
    monkeypatch.setattr(doctor, "_cuda", broken)
    monkeypatch.setattr(doctor, "_loopback", lambda: doctor.Finding("ranks", doctor.OK, "yes"))
    for name in ("ortools", "ortools.sat.python", "ortools.sat.python.cp_model"):
        monkeypatch.setitem(sys.modules, name, None)
    result = run("doctor")
    assert result.exit_code == 1
    assert "fails data files           mnist.npz is damaged" in result.stdout
    assert "fails CUDA GPUs            ImportError: libtorch.so" in result.stdout
    assert "note  OR-Tools (optional)  not installed\n" in result.stdout
    assert result.stdout.endswith("Does not work: CUDA GPUs, data files.\n")


# ---- words and tables --------------------------------------------------------------------------

RACE = [
    {"name": "one-process", "losses": [2.3, 0.5], "accuracy": 0.93, "max_gradient_error": 0.0,
     "step_ms": 30.0, "bubble_predicted": None, "bubble_measured": None,
     "peak_activation_bytes": [8_000_000], "parameter_bytes": [1_200_000], "bytes_sent": [0]},
    {"name": "ddp", "losses": [2.3, 0.5000001], "accuracy": 0.93, "max_gradient_error": 2e-6,
     "step_ms": 50.0, "bubble_predicted": None, "bubble_measured": None,
     "peak_activation_bytes": [2_000_000] * 4, "parameter_bytes": [1_200_000] * 4,
     "bytes_sent": [1_800_000] * 4},
    {"name": "gpipe", "losses": [2.3, 0.5], "accuracy": 0.93, "max_gradient_error": 1e-6,
     "step_ms": 60.0, "bubble_predicted": 0.273, "bubble_measured": 0.281,
     "peak_activation_bytes": [8_000_000] * 4, "parameter_bytes": [300_000] * 4,
     "bytes_sent": [500_000] * 4},
    {"name": "1f1b", "losses": [2.3, 0.5], "accuracy": 0.935, "max_gradient_error": 1e-6,
     "step_ms": 58.0, "bubble_predicted": 0.273, "bubble_measured": 0.275,
     "peak_activation_bytes": [4_000_000, 3_000_000, 2_000_000, 1_000_000],
     "parameter_bytes": [300_000] * 4, "bytes_sent": [500_000] * 4},
]  # fmt: skip


def printed(tables, width):
    import io

    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    console.print(*tables)
    return console.file.getvalue()


def test_race_table_prints_units_and_whole_names():
    for width, count in ((80, 2), (130, 1)):
        tables = report.race_tables(RACE, width)
        text = printed(tables, width)
        assert len(tables) == count and "…" not in text
        assert all(word in text for word in ("(MB)", "(ms)", "(%)", "one-process", "0.5000",
                                             "27.3", "4.00", "2.0e-06"))  # fmt: skip


@pytest.mark.parametrize("width", [40, 60, 80, 100, 124, 160, 220])
def test_tables_fit_the_terminal_and_lose_nothing(width):
    timelines, _ = family.everything(8, 16)
    entries = [*RACE, RACE[-1] | {"name": "gpipe+recompute"}]
    costs = mp.Costs(18522, 18086, 9337, latency=601)
    uneven = mp.simulate(mp.build("zb-1p", ranks=8, microbatches=16, chunks=3), costs)
    for tables, rows, words in (
        (report.race_tables(entries, width), entries, ["step (ms)", "bubble predicted (%)",
         "bubble measured (%)", "peak activations (MB)", "sent a step (MB)"]),
        (family_tables(timelines, False, width), timelines, ["makespan", "own span", "most kept",
         "kept on each rank", "messages", "bytes sent"]),
        (report.ranks_tables(uneven, width), range(8), ["stages", "busy", "fill", "drain"]),
    ):  # fmt: skip
        headings = [str(column.header) for table in tables for column in table.columns]
        assert [headings.count(word) for word in words] == [1] * len(words)
        assert {table.row_count for table in tables} == {len(rows)}
        text = printed(tables, width).replace("message=…", "")
        assert "…" not in text and max(map(len, text.splitlines())) <= width
        given = [part for table in tables for column in table.columns
                 for cell in (str(column.header), *column.cells) for part in cell.split()]
        lost = Counter(given) - Counter(text.split())
        assert not lost, lost


def test_words_are_computed_from_the_numbers():
    words = report.in_words(RACE, cores=2)
    assert "After 2 steps the loss of one process is 0.5000" in words
    assert "at most 2e-06 of its largest value (ddp): rounding" in words
    assert "93.0 % are right in the weakest entry and 93.5 % in the strongest" in words
    assert "1f1b (measured 27.5 %, predicted 27.3 %) idles least" in words
    assert "farthest apart for gpipe, by 0.8 percentage points" in words
    assert "gpipe keeps 8.00 MB of activations, 1f1b 4.00 MB (0.50 of it)" in words
    assert "a DDP rank sends 1.80 MB, more than any pipeline" in words
    assert "4 ranks share 2 cores" in words and "4 ranks share" not in report.in_words(RACE, 8)


def test_words_do_not_hide_what_is_wrong():
    wrong = [RACE[0], {**RACE[1], "bytes_sent": [100]}, {**RACE[2], "max_gradient_error": 0.3}]
    words = report.in_words(wrong)
    assert "more than rounding explains: they do not all compute the same" in words
    assert "less than any pipeline" in words
    assert report.in_words(RACE[:1]) == "On the test images 93.0 % are right."
    assert report.in_words([]) == ""


def test_numbers_in_words():
    assert [report.number(n) for n in (33, 28.5, mp.Costs().exchange, 1e-5, 1 / 3)] == [
        "33", "28.5", "0", "1e-05", "0.333"]  # fmt: skip
    assert report.megabytes(3_210_000) == "3.21 MB" and report.megabytes(5000) == "0.005 MB"
    assert report.percent(0.2727) == "27.3 %" and report.milliseconds(0.0052) == "5.2 ms"
