"""`minipipe show --all`: every schedule in one table and one figure, and none left out silently."""

import json
import subprocess
import sys
from fractions import Fraction

import pytest
from matplotlib.collections import PolyCollection
from typer.testing import CliRunner

import minipipe as mp
from minipipe import family, plot
from minipipe.cli import app


def run(*arguments):
    return CliRunner().invoke(app, ["show", "--all", *arguments])


def shown(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_json_is_that_of_show_and_more():
    found = shown("--ranks", "4", "--microbatches", "8")
    assert list(found) == ["schedules", "refused"]
    names = [each["name"] for each in found["schedules"]]
    assert len(names) == len(set(names))
    assert sorted(names + [each["name"] for each in found["refused"]]) == sorted(mp.SCHEDULES)
    for each in found["schedules"]:
        alone = json.loads(CliRunner().invoke(app, ["show", each["name"], "--json"]).stdout)
        assert {key: each[key] for key in alone} == alone
        assert list(each)[len(alone) :] == ["messages", "bytes_sent", "distance"]
        assert each["bytes_sent"] == [0] * 4
    named = {each["name"]: each for each in found["schedules"]}
    assert named["1f1b"]["messages"] == 2 * 3 * 8 and named["interleaved"]["messages"] == 2 * 7 * 8
    assert named["1f1b"]["distance"] == {"time": 0, "share": 0}
    assert named["dualpipe"]["distance"] == {"time": 1, "share": pytest.approx(1 / 25)}
    assert named["zb-v"]["makespan"] == 25.5 and named["zb-v"]["bubble"]["own_span"] == 0


def test_every_schedule_is_shown_or_refused_with_its_reason():
    for ranks, microbatches in ((1, 1), (2, 3), (3, 4), (5, 2), (8, 20)):
        found = shown("--ranks", str(ranks), "--microbatches", str(microbatches))
        names = {each["name"] for each in found["schedules"]}
        refused = {each["name"]: each["reason"] for each in found["refused"]}
        assert names | refused.keys() == mp.SCHEDULES.keys() and not names & refused.keys()
        for name, reason in refused.items():
            with pytest.raises(mp.ScheduleError) as error:
                mp.build(name, ranks=ranks, microbatches=microbatches)
            assert reason == error.value.reasons[0] and "\n" not in reason


def test_table_has_a_row_a_schedule_and_a_line_a_refusal():
    result = run("--ranks", "3", "--microbatches", "4")
    assert result.exit_code == 0, result.stderr
    timelines, refused = family.everything(3, 4)
    cells = [line.split() for line in result.stdout.splitlines()]
    for t in timelines:
        assert sum(t.schedule.name in line for line in cells) >= 1, t.schedule.name
    assert ("dualpipe is not among them: ranks=3 must be even; the nearest legal value is 4"
            in result.stdout.splitlines())  # fmt: skip
    assert len(refused) == sum("is not among them" in line for line in result.stdout.splitlines())
    for heading in ("idle / (ranks × makespan)", "(makespan − ideal) / ideal", "own span",
                    "makespan − ideal", "above the bound", "most kept", "kept on each rank",
                    "parameters (×)", "messages", "bytes sent"):  # fmt: skip
        assert heading in result.stdout, heading
    row = next(line for line in result.stdout.splitlines() if " 1f1b " in line)
    assert row.split()[1:] == ["18", "0", "(0.0", "%)", "33.3", "%", "50.0", "%", "33.3", "%", "6",
                               "3", "3", "2", "1", "1", "16", "–"]  # fmt: skip


def test_costs_sizes_and_arguments_reach_the_schedules():
    found = shown("--costs", "message=2,latency=1/2", "--chunks", "3", "--recompute")
    named = {each["name"]: each for each in found["schedules"]}
    assert named["interleaved"]["stages"] == 12 and named["zb-v"]["stages"] == 8
    assert named["1f1b+recompute"]["bytes_sent"] == [16, 32, 32, 16]
    assert "0R0" in named["1f1b+recompute"]["rows"][0]
    assert named["gpipe+recompute"]["makespan"] > 41
    assert " 96 " in run("--costs", "message=2").stdout
    assert named["hanayo"]["stages"] == 8 and {
        each["name"]: each for each in shown("--waves", "2")["schedules"]
    }["hanayo"]["stages"] == 16  # fmt: skip
    found = shown("--costs", "F=1:1:1:1")
    assert {each["name"] for each in found["refused"]} > {"interleaved", "zb-v"}
    assert all("the schedule has" in each["reason"] for each in found["refused"])


@pytest.mark.parametrize("arguments, words", [
    (["show"], "NAME is missing"),
    (["show", "gpipe", "--all"], "give --all alone"),
    (["show", "--all", "--forward-only"], "give --all alone"),
    (["show", "--all", "--ranks", "0"], "ranks=0"),
    (["show", "--all", "--figure", "x.xyz"], "x.xyz"),
])  # fmt: skip
def test_bad_arguments_end_with_2_and_a_reason(arguments, words):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2 and words in result.output + str(result.exception)


@pytest.mark.parametrize("arguments", [["show", "--all"], ["literature"]])
def test_neither_torch_nor_matplotlib_is_needed(arguments):
    code = (f"import sys; from minipipe.cli import app\n"
            f"try: app({arguments})\n"
            "except SystemExit: pass\n"
            "print(sorted({'torch', 'matplotlib', 'numpy'} & set(sys.modules)))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True,
                          encoding="utf-8")  # fmt: skip
    assert done.stdout.splitlines()[-1] == "[]"


def test_two_tables_where_one_is_too_wide():
    from minipipe.tables import family_tables

    timelines, _ = family.everything(4, 8)
    assert [len(family_tables(timelines, True, width)) for width in (None, 200, 100)] == [1, 1, 2]


def test_families_name_every_schedule():
    timelines, _ = family.everything(4, 8)
    families = [family.family(t.schedule) for t in timelines]
    assert family.OWN not in families
    assert families == sorted(families, key=[*family.FAMILIES].index)
    assert family.family(mp.Schedule.parse("0F0 0B0", "mine")) == family.OWN
    assert family.family(mp.build("gpipe", ranks=2, microbatches=2, recompute=True)) == \
        "one stage a rank"  # fmt: skip


@pytest.mark.parametrize("ranks, microbatches", [(4, 8), (8, 20), (1, 1)])
def test_figure_has_every_timeline_on_one_axis(ranks, microbatches):
    timelines, _ = family.everything(ranks, microbatches)
    figure = mp.plot.overview(timelines)
    time, bubble, peak = figure.axes
    cells = {c.get_label(): c for c in time.collections if isinstance(c, PolyCollection)}
    names = [label.get_text() for label in time.get_yticklabels()]
    assert names == [t.schedule.name for t in timelines] and set(names) <= cells.keys()
    longest = time.get_xlim()[1]
    for t in timelines:
        drawn = len(cells[t.schedule.name].get_paths())
        parts = sum(map(len, t.schedule.parts))
        assert drawn == parts if t.makespan <= longest else 0 < drawn < parts
    cut = [text.get_text() for text in time.texts]
    assert [bool(float(t.makespan) > longest) for t in timelines].count(True) == len(cut)
    assert all("goes on to" in text for text in cut)
    assert [text.get_text() for text in bubble.texts][1].endswith("%")
    assert [float(text.get_text()) for text in peak.texts] == [
        float(Fraction(max(t.peak_activations))) for t in timelines]  # fmt: skip
    assert figure.get_suptitle().startswith("Every schedule: ")
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[-2:] == ["idle", "lower bound"]
    figure.draw_without_rendering()
    width, height = figure.get_size_inches() * figure.dpi
    for axes in figure.axes:
        for text in [*axes.texts, *axes.get_yticklabels(), axes.title]:
            if text.get_text() and text.get_visible():
                box = text.get_window_extent()
                assert box.x0 >= 0 and box.x1 <= width and text.get_fontsize() >= 12, text


def test_overview_takes_own_tables_and_measured_times():
    t = mp.simulate(mp.Schedule.parse("0F0 0B0\n1F0 1B0"))
    assert plot.overview([t]).axes[0].get_yticklabels()[0].get_text() == "own"
    seconds = mp.Timeline(t.schedule, [0, 3, 1, 2], [1, 4, 2, 3], t.levels, origin="measured",
                          time_unit="s", memory_unit="bytes")  # fmt: skip
    figure = plot.overview([seconds])
    assert figure.axes[0].get_xlabel() == "time (ms)" and figure.axes[0].get_xlim()[1] > 4000
    assert figure.axes[2].texts[0].get_text().endswith("MB")
