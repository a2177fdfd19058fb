"""A small real race and a run of one's own rows, through the command line; no test times anything.

The main job trains on real processes, so each test here that starts ranks is kept tiny.
"""

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

import minipipe as mp
from minipipe import race
from minipipe.cli import app
from minipipe.training import Paced

# Slots that are long beside the work, so that a busy machine overruns none of them.
SMALL = ["--steps", "5", "--paced-steps", "2", "--pace-ms", "50", "--model", "mlp",
         "--dataset", "digits"]  # fmt: skip
BUSY = "took longer than their slot"
KEYS = {"ranks", "microbatches", "batch", "model", "dataset", "steps", "pace_ms", "entries"}
ENTRY = {"name", "losses", "accuracy", "max_gradient_error", "step_ms", "bubble_predicted",
         "bubble_measured", "peak_activation_bytes", "parameter_bytes", "bytes_sent"}  # fmt: skip
OWN = "0F0 0F1 0F2 0B2 0B1 0B0\n1F0 1F1 1F2 1B2 1B1 1B0\n"


def patient(run):
    """The first outcome that the machine's load did not spoil; run() gives (code, stderr, …)."""
    for _ in range(3):
        outcome = run()
        if outcome[0] == 0 or BUSY not in outcome[1]:
            return outcome
    pytest.skip(f"three times too busy to measure: {outcome[1].splitlines()[-1]}")


def invoke(*arguments):
    result = CliRunner().invoke(app, list(arguments))
    return result.exit_code, result.stderr, result.stdout


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    """(what `race --json` wrote to standard output, the folder with its files)."""
    out = tmp_path_factory.mktemp("race")
    command = [sys.executable, "-m", "minipipe", "race", "--schedules", "1f1b,gpipe+recompute",
               "--json", "--out", str(out), *SMALL]  # fmt: skip

    def run():
        done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
        return done.returncode, done.stderr, done.stdout

    code, stderr, stdout = patient(run)
    assert code == 0, stderr
    return stdout, sorted(out.iterdir())[-1]


@pytest.fixture(scope="module")
def entries(raced):
    return {entry["name"]: entry for entry in json.loads(raced[0])["entries"]}


def test_json_is_all_of_standard_output_and_has_the_keys_of_the_contract(raced):
    assert raced[0].startswith("{") and raced[0].count("\n") == 1
    summary = json.loads(raced[0])
    assert summary.keys() >= KEYS
    given = {"ranks": 4, "microbatches": 8, "batch": 64, "model": "mlp", "dataset": "digits",
             "steps": 5, "pace_ms": 50}  # fmt: skip
    assert {key: summary[key] for key in given} == given
    names = [entry["name"] for entry in summary["entries"]]
    assert names == ["one-process", "ddp", "1f1b", "gpipe+recompute"]
    for entry in summary["entries"]:
        assert entry.keys() >= ENTRY
        ranks = 1 if entry["name"] == "one-process" else 4
        assert len(entry["losses"]) == 5
        for key in ("peak_activation_bytes", "parameter_bytes", "bytes_sent"):
            assert len(entry[key]) == ranks
        assert entry["step_ms"] > 0 and 0 <= entry["accuracy"] <= 1


def test_every_entry_trains_the_same_model(entries):
    one = entries["one-process"]
    assert one["max_gradient_error"] == 0
    for entry in entries.values():
        assert entry["max_gradient_error"] <= 1e-5
        assert entry["losses"] == pytest.approx(one["losses"], abs=1e-4)
        assert entry["accuracy"] == pytest.approx(one["accuracy"], abs=0.01)
    assert sum(entries["1f1b"]["parameter_bytes"]) == one["parameter_bytes"][0]


def test_bubbles_are_those_of_pipelines_alone(entries):
    for name in ("one-process", "ddp"):
        assert entries[name]["bubble_predicted"] is None
        assert entries[name]["bubble_measured"] is None
    # With latency 0 they would be 3/11, and 9/41 as the first R starts before its gradient comes.
    assert 3 / 11 < entries["1f1b"]["bubble_predicted"] < 0.35
    assert 9 / 41 < entries["gpipe+recompute"]["bubble_predicted"] < 0.3
    for name in ("1f1b", "gpipe+recompute"):
        assert 0 < entries[name]["bubble_measured"] < 1


def test_peak_activations_are_the_predicted_ones(entries):
    for name in ("1f1b", "gpipe+recompute"):
        entry = entries[name]
        predicted = entry["peak_activation_bytes_predicted"]
        assert entry["peak_activation_bytes"] == pytest.approx(predicted, rel=0.02)
    assert max(entries["ddp"]["peak_activation_bytes"]) < \
        entries["one-process"]["peak_activation_bytes"][0]  # fmt: skip


def test_bytes_sent_are_the_messages_and_what_an_all_reduce_takes(entries):
    assert entries["one-process"]["bytes_sent"] == [0]
    # mlp: 64 float32 a row cross each border, forward and back.
    border = 64 * 64 * 4
    for name in ("1f1b", "gpipe+recompute"):
        assert entries[name]["bytes_sent"] == [border, 2 * border, 2 * border, border]
    if None not in entries["ddp"]["bytes_sent"]:  # the kernel counts them on Linux alone
        ring = 2 * 3 / 4 * entries["ddp"]["parameter_bytes"][0]
        assert sum(entries["ddp"]["bytes_sent"]) / 4 == pytest.approx(ring, rel=0.2)


def test_files_beside_the_table(raced):
    stdout, folder = raced
    files = {path.name for path in folder.iterdir()}
    figures = {"losses", "memory-and-traffic", "bubbles", "activations", "timeline-1f1b",
               "timeline-gpipe+recompute"}  # fmt: skip
    assert files == {f"{name}.png" for name in figures} | {
        "race.json", "race.csv", "trace-1f1b.json", "trace-gpipe+recompute.json"}  # fmt: skip
    for name in figures:
        height, width, _ = imread(folder / f"{name}.png").shape
        assert height >= 300 and width >= 1000
    assert json.loads((folder / "race.json").read_text("utf-8")) == json.loads(stdout)
    with (folder / "race.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == ["one-process", "ddp", "1f1b", "gpipe+recompute"]
    trace = json.loads((folder / "trace-1f1b.json").read_text("utf-8"))
    schedule = mp.build("1f1b", ranks=4, microbatches=8)
    actions = [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(actions) == sorted(str(action) for row in schedule.rows for action in row)


def test_a_schedule_from_a_file_is_run_told_and_compared(tmp_path):
    (tmp_path / "mine.txt").write_text(OWN)
    code, stderr, stdout = patient(lambda: invoke(
        "run", str(tmp_path / "mine.txt"), "--narrate", "mine", "--out", str(tmp_path), *SMALL,
    ))  # fmt: skip
    assert code == 0, stderr
    told = [line for line in stdout.splitlines() if " ms: " in line]
    assert told[0] == "0.0 ms: rank 0 starts 0F0 (micro-batch 0 forward through stage 0)."
    for action in OWN.split():
        assert sum(f"starts {action} (" in line for line in told) == 1
    assert "receives the activation of 0F0 from rank 0 and starts 1F0" in stdout
    assert ": the step is over" in told[-1]
    for text in (" one-process ", " mine ", "measured on emulated devices", "rounding",
                 "mine (measured ", "latency of a message measured beforehand"):  # fmt: skip
        assert text in " ".join(stdout.split())
    folder = next(path for path in tmp_path.iterdir() if path.name.startswith("run-"))
    assert (folder / "timeline-mine.png").exists()
    assert str(folder) in stdout.replace("\n", "")


@pytest.mark.parametrize("rows, words", [
    ("0F0 0B0\n1B0 1F0\n", "stands before its 1F0"),
    ("0F0 0F1\n1F0 1F1\n", "no backward passes"),
    ("0F0 0X0\n", "is not a legal schedule"),
    ("0F0 0B0\n1F0 1B0 1F1\n", "0F1"),
])  # fmt: skip
def test_run_refuses_what_cannot_be_trained(tmp_path, rows, words):
    (tmp_path / "bad.txt").write_text(rows)
    code, stderr, stdout = invoke("run", str(tmp_path / "bad.txt"), *SMALL)
    assert (code, stdout) == (1, "")
    assert words in stderr and "Traceback" not in stderr


@pytest.mark.parametrize("arguments, words", [
    (["race", "--schedules", "1f2b"], "no schedule"),
    (["race", "--schedules", "naive+recompute"], "takes no argument 'recompute'"),
    (["race", "--ranks", "0"], "at least 1"),
    (["race", "--microbatches", "100"], "100 micro-batches need at least 100 rows"),
    (["race", "--batch", "62"], "take a multiple of 4, or --no-ddp"),
    (["race", "--batch", "100000", "--no-ddp"], "training images"),
    (["race", "--steps", "0"], "--steps 0"),
    (["race", "--steps", "many"], "--steps"),
    (["race", "--learning-rate", "nan"], "--learning-rate"),
    (["race", "--pace-ms", "-1"], "--pace-ms"),
    (["race", "--paced-steps", "0"], "--paced-steps"),
    (["race", "--model", "resnet50"], "legal are resnet, vit, mlp, resnet18"),
    (["race", "--model", "resnet18"], "3 channels"),
    (["race", "--dataset", "imagenet"], "legal are mnist"),
    (["race", "--narrate", "chimera"], "--narrate chimera: legal are naive, gpipe"),
    (["run", "no-such-file.txt"], "no such file"),
    (["run"], "FILE"),
    (["bench", "everything"], "no benchmark"),
])  # fmt: skip
def test_bad_arguments_end_with_2_and_one_line(arguments, words):
    code, stderr, stdout = invoke(*arguments)
    assert (code, stdout) == (2, "")
    headline, line = "…\n" in stderr, stderr.splitlines()[-1]
    assert words in line and len(stderr.splitlines()) == 1 + headline


def test_a_busy_machine_is_not_shown_as_a_measurement():
    schedule = mp.build("gpipe", ranks=2, microbatches=2)
    result = race.Result({"entries": []})
    ranks = [Paced(0.001, [], 0, 50), Paced(0.001, [], 2, 50)]
    with pytest.raises(race.OverrunError, match="gpipe: 2 of 100 paced actions took longer"):
        race._compare(result, {}, schedule, None, ranks, 0.03)
    assert not result.measured and not result.predicted


def test_one_overrun_in_a_hundred_is_borne():
    class Found:  # a probe whose stages keep what the counts say
        def costs(self, costs):
            return costs

    schedule = mp.build("gpipe", ranks=2, microbatches=2)
    measured = mp.simulate(schedule, mp.Costs(0.03, 0.03, 0.03, latency=0.002))
    result, entry = race.Result({"entries": []}), {}
    ranks = [Paced(0.001, [measured], 1, 50), Paced(0.001, [measured], 0, 50)]
    race._compare(result, entry, schedule, Found(), ranks, 0.03)
    assert result.measured["gpipe"] is measured
    assert entry["bubble_measured"] > entry["bubble_predicted"] > 1 / 3
    assert entry["latency_ms"] == pytest.approx(1)


def test_a_busy_machine_ends_the_command_with_1(tmp_path, monkeypatch):
    def too_busy(*arguments, **options):
        raise race.OverrunError(f"1f1b: 9 of 64 paced actions {BUSY}. Close other programs")

    monkeypatch.setattr(race, "race", too_busy)
    code, stderr, stdout = invoke("race", "--out", str(tmp_path), *SMALL)
    assert (code, stdout) == (1, "") and BUSY in stderr.splitlines()[-1]
    assert not list(tmp_path.iterdir())


def test_each_run_gets_a_folder_of_its_own(tmp_path):
    folders = [race.folder(tmp_path / "runs", "race") for _ in range(3)]
    assert len(set(folders)) == 3 and all(path.is_dir() for path in folders)


def test_importing_minipipe_does_not_import_torch():
    code = "import minipipe, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
