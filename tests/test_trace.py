"""Chrome traces have a slice an action, an arrow a message; stories name who waits for whom."""

import json

import minipipe as mp
from minipipe import trace
from minipipe.timeline import Timeline


def predicted(name="1f1b", ranks=2, microbatches=2, **arguments):
    return mp.simulate(mp.build(name, ranks=ranks, microbatches=microbatches, **arguments))


def in_seconds(t, unit=0.005):
    return Timeline(t.schedule, [float(s.start) * unit for s in t.spans],
                    [float(s.end) * unit for s in t.spans], t.levels, origin="measured",
                    time_unit="s")  # fmt: skip


def events(t, phase):
    return [event for event in trace.chrome(t)["traceEvents"] if event["ph"] == phase]


def test_threads_are_ranks_with_their_stages():
    t = predicted("interleaved", 4, 8)
    names = [e["args"]["name"] for e in events(t, "M") if e["name"] == "thread_name"]
    assert names[0] == "rank 0 (stages 0, 4)" and len(names) == 4
    process = [e["args"]["name"] for e in events(t, "M") if e["name"] == "process_name"]
    assert process == ["interleaved, 4 ranks, 8 micro-batches, predicted"]


def test_slices_are_actions_in_microseconds():
    t = predicted()
    slices = events(t, "X")
    assert [e["name"] for e in slices] == [str(span.action) for span in t.spans]
    assert (slices[1]["ts"], slices[1]["dur"]) == (1000, 1000)  # one unit of the costs is 1 ms
    measured = events(in_seconds(t), "X")
    assert (measured[1]["ts"], measured[1]["dur"]) == (5000, 5000)
    assert measured[0]["args"] == {"does": "micro-batch 0 forward through stage 0"}


def test_arrows_join_the_slices_of_sender_and_receiver():
    t = predicted("1f1b", 3, 4)
    slices = {(e["tid"], e["name"]): e for e in events(t, "X")}
    starts = {e["id"]: e for e in events(t, "s")}
    ends = {e["id"]: e for e in events(t, "f")}
    assert len(starts) == len(ends) == t.messages == 2 * 2 * 4
    for number, start in starts.items():
        sender = slices[start["tid"], start["name"].split()[-1]]
        assert sender["ts"] < start["ts"] < sender["ts"] + sender["dur"]
        end = ends[number]
        assert abs(end["tid"] - start["tid"]) == 1 and end["ts"] > start["ts"]
        assert any(e["tid"] == end["tid"] and e["ts"] == end["ts"] for e in slices.values())


def test_counters_follow_memory_and_the_file_is_json(tmp_path):
    t = predicted("gpipe", 2, 3)
    levels = [e["args"]["activations"] for e in events(t, "C") if e["name"].startswith("rank 0")]
    assert max(levels) == 3 and levels[-1] == 0
    written = json.loads(trace.write(t, tmp_path / "trace.json").read_text(encoding="utf-8"))
    assert written == trace.chrome(t)
    assert mp.Schedule.parse(written["otherData"]["rows"]) == t.schedule


def test_pairs_and_idle_ranks_have_traces():
    t = mp.simulate(mp.Schedule.parse("0F0 0F1 1F0 (1F1;1B0) 1B1 0B0 0B1\n-"))
    assert [e["name"] for e in events(t, "X")][3] == "(1F1;1B0)"
    assert [e["args"].get("name") for e in events(t, "M")][-2] == "rank 1"
    assert "micro-batch 1 forward through stage 1 overlapped with micro-batch 0 backward " \
        "through stage 1" in "\n".join(trace.narrate(t))  # fmt: skip


def test_the_story_in_full():
    assert list(trace.narrate(predicted("1f1b", 2, 2))) == [
        "t = 0: rank 0 starts 0F0 (micro-batch 0 forward through stage 0).",
        "t = 1: rank 0 starts 0F1 (micro-batch 1 forward through stage 0); rank 1, which has "
        "waited 1 unit of time, receives the activation of 0F0 from rank 0 and starts 1F0 "
        "(micro-batch 0 forward through stage 1).",
        "t = 2: rank 1 starts 1B0 (micro-batch 0 backward through stage 1).",
        "t = 4: rank 0, which has waited 2 units of time, receives the gradient of 1B0 from rank "
        "1 and starts 0B0 (micro-batch 0 backward through stage 0); rank 1 receives the "
        "activation of 0F1 from rank 0 and starts 1F1 (micro-batch 1 forward through stage 1).",
        "t = 5: rank 1 starts 1B1 (micro-batch 1 backward through stage 1).",
        "t = 7: rank 0, which has waited 1 unit of time, receives the gradient of 1B1 from rank 1 "
        "and starts 0B1 (micro-batch 1 backward through stage 0).",
        "t = 9: the step is over; rank 1 has had nothing to do for 2 units of time.",
    ]


def test_measured_stories_are_in_ms_and_in_order():
    t = in_seconds(predicted("interleaved", 4, 8))
    told = list(trace.narrate(t))
    times = [float(sentence.split(" ms:")[0]) for sentence in told]
    assert times == sorted(times)
    assert sum(sentence.count("starts ") for sentence in told) == len(t.spans)
    assert "rank 3, which has waited 7.5 ms, receives the activation of 2F0 from rank 2" in \
        "\n".join(told)  # fmt: skip
