"""Published numbers beside ours: none differs without a reason, and ours are all simulated."""

import json

import pytest
from typer.testing import CliRunner

from minipipe import literature, plot
from minipipe.cli import app

ROWS = literature.compare()


def test_no_difference_is_without_a_reason():
    for row in ROWS:
        assert row.equal or len(row.reason) > 40, row
        assert row.tolerance <= 0.006 * abs(row.published) or row.source.startswith("GPipe"), row
        assert (row.reason == "") == row.equal


def test_what_has_to_be_equal_is_equal():
    """Exactly, or in all printed digits: everything but what the papers measured or approximate."""
    differ = {row.what.split(",")[0].split(":")[0] for row in ROWS if not row.equal}
    assert differ == {"Table 1", "Table 2", "Table 3", "activations kept by 1f1b with recompute",
                      "activations kept by gpipe with recompute", "table",
                      "idle / total"}  # fmt: skip
    equal = [row.what for row in ROWS if row.equal]
    for words, how_many in (("section 2.2", 10), ("section 3.3.2", 4), ("Tables 5 and 9", 12),
                            ("figure, ", 4), ("own span, p=4", 3), ("chunk times of a step", 6),
                            ("peak in micro-batches, p=", 18), ("steady idle", 3)):  # fmt: skip
        assert sum(words in what for what in equal) == how_many, words


def value(words):
    return next((row.published, row.ours) for row in ROWS if words in row.what)


def test_numbers_by_hand():
    assert value("1f1b: bubble / ideal, p=4 m=8") == (3 / 8, 3 / 8)
    assert value("figure, dualpipe: length") == (66, 66)
    assert value("figure, dualpipev: idle") == (6, 6)
    assert value("zb-h2: bubble of the whole step, p=4") == (0, 3)
    assert value("dualpipe: bubble, 8 stages, F=10 I=12 W=8") == (3 * 26, 3 * 24)
    assert value("chimera: idle / total, D=4 N=4 B=2F") == (pytest.approx(0.2), 0.25)
    assert value("W=1, B=2F") == (pytest.approx(0.4), pytest.approx(1 / 3))
    for k, ideal in ((2, 1.939), (4, 3.657), (8, 6.564)):
        published, ours = value(f"Transformer-48, M = 32: speed of {k} parts")
        assert ours == pytest.approx(ideal, abs=5e-4) and 0.9 < published / ours < 1
    assert value("Transformer-24L, M = 32: speed of 8 parts")[1] == pytest.approx(3.385, abs=5e-4)


def test_ours_are_simulated(monkeypatch):
    """With a simulator that is off by a tenth everything that is made of times is off as well."""
    from minipipe.timeline import Timeline

    makespan = Timeline.makespan.fget
    monkeypatch.setattr(Timeline, "makespan", property(lambda t: makespan(t) * 11 / 10))
    changed = {row.what: row.ours for row in literature.compare()}
    for row in ROWS:
        if any(words in row.what for words in ("step time", "length", "chunk times", "steady")):
            assert float(changed[row.what]) != float(row.ours) or not row.ours, row.what


def test_command_prints_every_row_and_reason(tmp_path):
    result = CliRunner().invoke(app, ["literature"])
    assert result.exit_code == 0, result.output
    for row in ROWS:
        assert row.what in result.stdout and row.source in result.stdout
    text = " ".join(result.stdout.split())
    assert all(" ".join(row.reason.split()) in text for row in ROWS)
    assert all(name in text for name in literature.left_out())
    differ = sum(not row.equal for row in ROWS)
    assert f"{len(ROWS)} numbers: {len(ROWS) - differ} equal, {differ} differ" in text
    figure = tmp_path / "papers.png"
    found = json.loads(CliRunner().invoke(
        app, ["literature", "--json", "--figure", str(figure)]).stdout)  # fmt: skip
    assert figure.stat().st_size > 1000
    assert len(found["comparisons"]) == len(ROWS)
    assert list(found["comparisons"][0]) == ["source", "evidence", "what", "published", "ours",
                                             "tolerance", "reason", "difference"]  # fmt: skip
    assert {each["evidence"] for each in found["comparisons"]} == {"read", "secondary"}
    assert {each["name"] for each in found["left_out"]} == set(literature.left_out())
    bad = CliRunner().invoke(app, ["literature", "--figure", "x.xyz"])
    assert bad.exit_code == 2


def test_figure_has_a_point_a_number():
    axes = plot.literature(ROWS).axes[0]
    assert sum(len(points.get_offsets()) for points in axes.collections) == len(ROWS)
    assert all(abs(x) <= 100 for points in axes.collections for x, _ in points.get_offsets())
