"""The stepper's frames say what the table says."""

import json
import re
from fractions import Fraction

import pytest

import minipipe as mp
from minipipe.teach import Stepper


@pytest.fixture
def stepper():
    return Stepper(mp.simulate(mp.build("1f1b", ranks=2, microbatches=2), mp.Costs(latency=0)))


def test_frames_by_hand(stepper):
    """0F0 0-1, 0F1 1-2, 1F0 1-2, 1B0 2-4, 0B0 4-6, 1F1 4-5, 1B1 5-7, 0B1 7-9."""
    first, second, third, fourth = stepper.frames[:4]
    assert (first.does, first.waits[1]) == (
        ("0F0", ""), "waits for the activation of 0F0 from rank 0 to start 1F0")  # fmt: skip
    assert second.time == third.time == 1
    assert second.does == ("0F1", "1F0")
    assert fourth.does == ("", "1B0")
    assert fourth.waits[0] == "waits for the gradient of 1B0 from rank 1 to start 0B0"
    assert fourth.holds == (((0, 0), (0, 1)), ((1, 0),))
    assert fourth.under_way == ("the activation of 0F1 to rank 1",)
    last = stepper.frames[-1]
    assert (last.does, last.waits, last.holds) == (("0B1", ""), ("", "is done"), (((0, 1),), ()))


@pytest.mark.parametrize("name", ["zb-v", "dualpipe", "interleaved", "gpipe"])
def test_any_schedule_has_a_frame_an_action(name):
    t = mp.simulate(mp.build(name, ranks=4, microbatches=8), mp.Costs(latency=Fraction(1, 10)))
    frames = Stepper(t).frames
    assert len(frames) == len(t.spans)
    assert max(len(frame.holds[0]) for frame in frames) <= 16
    for frame in frames:
        assert all(bool(does) != bool(waits)
                   for does, waits in zip(frame.does, frame.waits, strict=True))  # fmt: skip


def test_page_shows_the_first_frame_without_scripts_and_has_them_all(stepper):
    page = stepper._repr_html_()
    assert "rank 0 starts 0F0" in page.partition("<script>")[0]
    frames = json.loads(re.search(r"const frames = (\[.*?\]), root", page)[1])
    assert frames == [stepper.text(place) for place in range(8)]


def test_only_timelines():
    with pytest.raises(TypeError, match="takes a Timeline"):
        Stepper(mp.build("1f1b", ranks=2, microbatches=2))
