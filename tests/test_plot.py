"""Figures hold what they promise: cells, numbers, hatched idle time, titles with definitions."""

import subprocess
import sys

import pytest
from matplotlib.collections import PolyCollection

import minipipe as mp
from minipipe import plot
from minipipe.timeline import Timeline

DUALPIPE = """
0F0 0F1 0F2 3F4 3I4 3W4 3F5 (0F3;3B5) (3F6;0B0) 3B6 (3F7;0B1) 3B7 0I2 0W2 0I3 0W3
1F0 2F4 1F1 2F5 1F2 2B4 (2F6;1B0) (1F3;2B5) (2F7;1B1) 2B6 1B2 2I7 1I3 2W7 1W3
1F4 2F0 1F5 2F1 1F6 2B0 (2F2;1B4) (1F7;2B1) (2F3;1B5) 2B2 1B6 2I3 1I7 2W3 1W7
0F4 0F5 0F6 3F0 3I0 3W0 3F1 (0F7;3B1) (3F2;0B4) 3B2 (3F3;0B5) 3B3 0I6 0W6 0I7 0W7
"""


def predicted(name, ranks, microbatches, **arguments):
    return mp.simulate(mp.build(name, ranks=ranks, microbatches=microbatches, **arguments))


def emulated(t, unit=0.004):
    """A timeline in seconds with every action 5 % longer than predicted, memory in bytes."""
    spans = [(float(s.start) * unit * 1.05, float(s.end) * unit * 1.05) for s in t.spans]
    levels = [[(float(a) * 2e6, float(b) * 2e6) for a, b in row] for row in t.levels]
    return Timeline(t.schedule, [s for s, _ in spans], [e for _, e in spans], levels,
                    origin="emulated", time_unit="s", memory_unit="bytes")  # fmt: skip


def collections(axes):
    return {c.get_label(): c for c in axes.collections if isinstance(c, PolyCollection)}


def texts(axes):
    return [text.get_text() for text in axes.texts]


def legend(figure):
    return [text.get_text() for text in figure.legends[0].get_texts()]


def entries():
    names = ["one-process", "ddp", "gpipe", "gpipe+recompute", "1f1b"]
    return [
        {"name": name, "losses": [2.0, 1.0, 0.5 + 1e-7 * i], "accuracy": 0.9 + 0.01 * i,
         "max_gradient_error": None if i == 0 else 1e-6, "step_ms": 40.0 + i,
         "bubble_predicted": None if i < 2 else 0.25, "bubble_measured": None if i < 2 else 0.26,
         "peak_activation_bytes": [4_000_000 // (i + 1), 1_000_000],
         "parameter_bytes": [1_200_000] if i < 2 else [300_000, 310_000],
         "bytes_sent": [0] if i == 0 else [1_800_000 if i == 1 else 500_000]}
        for i, name in enumerate(names)
    ]  # fmt: skip


def test_timeline_has_a_cell_and_a_number_for_each_action():
    figure = plot.timeline(predicted("1f1b", 4, 8))
    axes = figure.axes[0]
    assert len(collections(axes)["cells"].get_paths()) == 64
    assert len(collections(axes)["cells"].get_facecolors()) == 64
    numbers = [text for text in texts(axes) if text.isdigit()]
    assert sorted(numbers) == sorted(str(m) for m in range(8) for _ in range(8))
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "rank 0", "rank 1", "rank 2", "rank 3"]  # fmt: skip
    assert axes.get_xlabel() == "time (units of the costs)"


def test_timeline_names_bubble_definition_and_bound():
    figure = plot.timeline(predicted("1f1b", 4, 8))
    axes = figure.axes[0]
    assert axes.get_title(loc="left").strip() == "1f1b, 4 ranks, 8 micro-batches"
    assert "bubble 27.3 % = idle / (ranks × makespan), predicted" in texts(axes)
    assert legend(figure)[:2] == ["F forward", "B backward"]
    assert legend(figure)[-1] == "lower bound 33"
    assert [line.get_xdata()[0] for line in axes.lines] == [33]
    assert plot.timeline(predicted("1f1b", 1, 1), title="mine").axes[0].get_title(loc="left")[:4] \
        == "mine"  # fmt: skip


def test_idle_time_is_hatched_by_where_it_lies():
    axes = plot.timeline(predicted("1f1b", 4, 8)).axes[0]
    found = collections(axes)
    hatches = {name: found[name].get_hatch() for name in ("fill", "inside", "drain")}
    assert all(hatches.values()) and len(set(hatches.values())) == 3
    assert len(found["fill"].get_paths()) == 3
    assert len(found["drain"].get_paths()) == 3
    idle = sum(
        box.get_extents().width for name in hatches for box in found[name].get_paths()
    )  # fmt: skip
    assert idle == pytest.approx(4 * 33 - 4 * 24)


def test_pairs_are_split_and_copies_are_shaded():
    t = mp.simulate(mp.Schedule.parse(DUALPIPE, "dualpipe"))
    figure = plot.timeline(t)
    cells = collections(figure.axes[0])["cells"]
    single = sum(len(action.parts) for row in t.schedule.rows for action in row)
    assert len(cells.get_paths()) == single
    assert len({path.get_extents().height.round(3) for path in cells.get_paths()}) == 2
    assert len({tuple(colour) for colour in cells.get_facecolors()}) == 8  # F B I W, two shades
    assert {"split cell: F over B", "lighter: a rank's later stages"} <= set(legend(figure))
    assert figure.axes[0].get_yticklabels()[0].get_text() == "rank 0\nstages 0, 3"


def test_recompute_and_updates_are_drawn():
    assert "R recompute" in legend(plot.timeline(predicted("gpipe", 4, 8, recompute=True)))
    rows = "0F0 0F1 0B0 0U0 0B1 0U1\n1F0 1B0 1U0 1F1 1B1 1U1"
    figure = plot.timeline(mp.simulate(mp.Schedule.parse(rows)))
    assert "U weight update" in legend(figure)
    assert len(figure.axes[0].lines) == 5  # four updates that take no time, and the bound


def test_many_cells_stay_legible():
    t = predicted("1f1b", 8, 32)
    numbers = [text for text in plot.timeline(t).axes[0].texts if text.get_text().isdigit()]
    assert len(numbers) == 2 * 8 * 32
    assert min(text.get_fontsize() for text in numbers) >= 6.5
    t = predicted("interleaved", 8, 64)
    numbers = [text for text in plot.timeline(t).axes[0].texts if text.get_text().isdigit()]
    assert all(text.get_fontsize() >= 5.5 for text in numbers)
    assert len(numbers) < 4 * 8 * 64  # cells that are too narrow have none


def test_numbers_stay_inside_their_cells():
    for t in (predicted("1f1b", 4, 8), predicted("1f1b", 8, 32), predicted("interleaved", 8, 32)):
        figure = plot.timeline(t)
        figure.draw_without_rendering()
        axes = figure.axes[0]
        cells = [path.get_extents().transformed(axes.transData)
                 for path in collections(axes)["cells"].get_paths()]  # fmt: skip
        for text in axes.texts:
            if text.get_text().isdigit():
                x, y = axes.transData.transform(text.get_position())
                cell = next(box for box in cells if box.contains(x, y))
                ink = text.get_fontsize() * figure.dpi / 72 * 0.73  # height of a digit
                wide = ink if text.get_rotation() else text.get_window_extent().width
                assert wide <= cell.width and 2 * abs(x - (cell.x0 + cell.x1) / 2) < 1


def test_compare_has_one_time_axis_and_says_what_is_emulated():
    t = predicted("1f1b", 4, 8)
    figure = plot.compare(t, emulated(t))
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim()
    assert above.get_title(loc="left") == (
        "bubble 27.3 % = idle / (ranks × makespan), predicted (1 unit drawn as 4.2 ms)")
    assert below.get_title(loc="left") == (
        "bubble 27.3 % = idle / (ranks × makespan), measured on emulated devices")
    assert below.get_xlabel() == "time (ms, emulated devices)"
    assert collections(below)["cells"].get_paths()[0].get_extents().x1 == pytest.approx(4.2)


def test_compare_fits_numbers_to_the_common_axis():
    t = predicted("1f1b", 4, 8)
    spans = [(float(s.start) / 100, float(s.start) / 100 + 0.001) for s in t.spans]
    sparse = Timeline(t.schedule, [s for s, _ in spans], [e for _, e in spans], t.levels,
                      origin="measured", time_unit="s")  # fmt: skip
    figure = plot.compare(t, sparse)  # of which the upper one is far shorter
    figure.draw_without_rendering()
    above = figure.axes[0]
    sizes = [text.get_fontsize() for text in above.texts]
    unit = above.transData.transform((0.067, 0))[0] - above.transData.transform((0, 0))[0]
    assert all(size <= 2 * unit / 0.64 * 72 / figure.dpi for size in sizes)


def test_compare_leaves_predictions_in_seconds_as_they_are():
    t = mp.simulate(mp.build("gpipe", ranks=2, microbatches=2),
                    mp.Costs(forward=0.004, backward_input=0.004, backward_weight=0.004))
    figure = plot.compare(t, emulated(t, unit=1))
    assert "drawn as" not in figure.axes[0].get_title(loc="left")
    assert collections(figure.axes[0])["cells"].get_paths()[0].get_extents().x1 == \
        pytest.approx(4)  # fmt: skip


def test_memory_has_exact_steps():
    figure = plot.memory(predicted("1f1b", 2, 3))
    assert len(figure.axes) == 2
    line = figure.axes[0].lines[0]
    assert line.get_drawstyle() == "steps-post"
    assert list(zip(*line.get_data(), strict=True)) == [
        (0, 1), (1, 2), (2, 2), (4, 2), (6, 2), (7, 2), (9, 1), (10, 1), (12, 0)]
    assert [texts(axes) for axes in figure.axes] == [["peak 2"], ["peak 1"]]
    assert [axes.get_ylabel() for axes in figure.axes] == ["rank 0", "rank 1"]
    assert figure.get_suptitle() == "1f1b, 2 ranks, 3 micro-batches, predicted"
    assert figure.get_supxlabel() == "time (units of the costs)"


def test_memory_of_several_is_on_one_scale():
    both = [predicted("gpipe", 4, 8), predicted("1f1b", 4, 8)]
    for figure in (plot.memory(*both), plot.memory(both)):
        assert len(figure.axes) == 8
        assert len({axes.get_ylim() for axes in figure.axes}) == 1
    measured = plot.memory(emulated(both[0]))
    assert texts(measured.axes[0]) == ["peak 16.00 MB"]
    assert measured.get_supxlabel() == "time (ms, emulated devices)"
    mixed = plot.memory(both[0], emulated(both[0]))
    assert mixed.axes[0].get_ylim() != mixed.axes[1].get_ylim()
    assert [axes.get_title() for axes in mixed.axes[:2]] == ["predicted",
                                                             "measured on emulated devices"]
    assert mixed.axes[-1].get_xlabel() == "time (ms, emulated devices)"
    assert mixed.get_supylabel() == "activations kept (micro-batches and MB)"


def boxes(figure):
    """Where each visible text and each panel lies, in pixels."""
    figure.draw_without_rendering()
    found = []
    for axes in figure.axes:
        if axes.axison:
            found += [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
            for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
                found += [tick.label1 for tick in axis.get_major_ticks()
                          if low <= tick.get_loc() <= high]  # fmt: skip
    found += [figure._suptitle, figure._supxlabel, figure._supylabel]
    found = [text for text in found if text and text.get_visible() and text.get_text()]
    return {text: text.get_window_extent() for text in found}


@pytest.mark.parametrize("ranks, microbatches", [(4, 8), (8, 32)])
@pytest.mark.parametrize("columns", [1, 2, 3, 5, 7])
def test_memory_of_many_has_no_text_over_another_or_cut_off(ranks, microbatches, columns):
    names = ["naive", "gpipe", "gpipe+recompute", "1f1b", "interleaved", "breadth-first",
             "1f1b+recompute"]  # fmt: skip
    shown = []
    for name in names[-columns:]:
        more = {"recompute": True} if "+" in name else {}
        t = predicted(name.removesuffix("+recompute"), ranks, microbatches, **more)
        shown.append(emulated(t, unit=0.03))
    figure = plot.memory(shown)
    assert "measured on emulated devices" in figure.get_suptitle()
    titles = [axes.get_title().replace("\n", "") for axes in figure.axes[:columns]]
    assert titles == (names[-columns:] if columns > 1 else [""])
    placed = list(boxes(figure).items())
    width, height = figure.get_size_inches() * figure.dpi
    for number, (text, box) in enumerate(placed):
        assert box.x0 >= 0 and box.x1 <= width and box.y0 >= 0 and box.y1 <= height, text
        for other, second in placed[number + 1 :]:
            # A tick's text may reach into the next row's, by the white above and below digits.
            across = min(box.x1, second.x1) - max(box.x0, second.x0)
            along = min(box.y1, second.y1) - max(box.y0, second.y0)
            assert across <= 0 or along <= 4, (text, other)
    for axes in figure.axes:
        assert axes.get_window_extent().width > 100  # 1 inch


def test_memory_of_unequal_sizes_names_them():
    figure = plot.memory(predicted("1f1b", 4, 8), predicted("1f1b", 2, 4))
    assert figure.get_suptitle() == "1f1b, predicted"
    titles = [axes.get_title() for axes in figure.axes[:2]]
    assert titles == ["4 ranks, 8 micro-batches", "2 ranks, 4 micro-batches"]
    assert sum(axes.axison for axes in figure.axes) == 6


def test_losses_show_curves_and_differences():
    figure = plot.losses(entries())
    above, below = figure.axes
    assert len(above.lines) == 5 and len(below.lines) == 4
    assert legend(figure)[0] == "one-process: 0.5000"
    assert below.get_yscale() == "log"
    alone = plot.losses([{"name": "gpipe", "losses": [1.0, 0.5]}])
    assert len(alone.axes[1].lines) == 0


def test_bars_show_the_largest_rank():
    figure = plot.bars(entries())
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "bytes sent a step", "parameters held", "peak activations"]  # fmt: skip
    assert [text.strip() for text in texts(figure.axes[1])] == ["1.2", "1.2", "0.31", "0.31",
                                                                 "0.31"]  # fmt: skip
    assert texts(figure.axes[0])[0].strip() == "0"
    missing = [{**entry, "peak_activation_bytes": None} for entry in entries()]
    assert texts(plot.bars(missing).axes[2])[0].strip() == "not measured"


def test_bubble_bars_leave_out_what_has_no_bubble():
    figure = plot.bubble_bars(entries())
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "gpipe", "gpipe+recompute", "1f1b"]  # fmt: skip
    assert len(axes.patches) == 6
    assert texts(axes).count(" 25.0 %") == 3 and texts(axes).count(" 26.0 %") == 3
    assert axes.get_title(loc="left") == "bubble = idle / (ranks × makespan)"
    assert legend(figure) == ["predicted", "measured"]
    paced = [{**entry, "paced_step_ms": 900.0} for entry in entries()]
    assert legend(plot.bubble_bars(paced)) == ["predicted", "measured on emulated devices"]
    assert plot.bubble_bars(entries()[:2]).axes[0].patches[:] == []


def test_save_and_display(tmp_path):
    figure = plot.timeline(predicted("naive", 2, 2))
    for ending in ("png", "svg", "pdf"):
        path = plot.save(figure, tmp_path / f"figure.{ending}")
        assert path.stat().st_size > 1000
    assert figure._repr_png_()[:4] == b"\x89PNG"


def test_no_pyplot_and_no_open_figures():
    code = ("import sys, minipipe as mp; "
            "mp.plot.timeline(mp.simulate(mp.build('gpipe', ranks=2, microbatches=2))); "
            "sys.exit('matplotlib.pyplot' in sys.modules or 'torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
