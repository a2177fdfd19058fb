"""Orders, CSV files and lowering against torch's own (in this process, without ranks)."""

from types import SimpleNamespace

import plan_common as common
import pytest

from minipipe import Schedule, build

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


def theirs(cls, ranks: int, microbatches: int, chunks: int | None = None):
    """An object of torch's class whose stages are only what the order needs."""
    stages = [
        SimpleNamespace(
            num_stages=ranks * (chunks or 1),
            group_size=ranks,
            group_rank=0,
            stage_index=c * ranks,
            is_first=not c,
            is_last=False,
            submod=None,
        )
        for c in range(chunks or 1)
    ]
    return cls(stages if chunks else stages[0], microbatches)


def text(order) -> list[list[str]]:
    """torch's order without its idle cells and what is no compute."""
    kinds = ("F", "B", "I", "W", "OVERLAP_F_B")
    return [
        [
            str(a).removesuffix("OVERLAP_F_B")
            for a in order[rank]
            if a is not None and a.computation_type.value in kinds
        ]
        for rank in sorted(order)
    ]


def ours(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, row)) for row in schedule.rows]


SIZES = [(p, m) for p in (1, 2, 3, 4) for m in range(1, 2 * p + 2)]


@pytest.mark.parametrize("p, m", SIZES)
def test_gpipe(p, m):
    order = theirs(schedules.ScheduleGPipe, p, m).pipeline_order
    assert ours(build("gpipe", ranks=p, microbatches=m)) == text(order)


@pytest.mark.parametrize("p, m", [(p, m) for p, m in SIZES if m >= p])
def test_1f1b(p, m):
    order = text(theirs(schedules.Schedule1F1B, p, m).pipeline_order)
    # torch numbers the forwards of the last rank from 1; what it runs is right.
    order[-1] = [f"{p - 1}F{int(a.split('F')[1]) - 1}" if "F" in a else a for a in order[-1]]
    assert ours(build("1f1b", ranks=p, microbatches=m)) == order


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p, m", [(p, m) for p, m in SIZES if m % max(1, m // p) == 0])
def test_interleaved(p, m, v):
    order = theirs(schedules.ScheduleInterleaved1F1B, p, m, v).pipeline_order
    group = m // max(1, m // p)
    assert ours(build("interleaved", ranks=p, microbatches=m, chunks=v, group=group)) == text(order)
    assert ours(build("interleaved", ranks=p, microbatches=m, chunks=v)) == text(order)


@pytest.mark.parametrize("v", [1, 2, 3])
@pytest.mark.parametrize("p, m", SIZES)
def test_breadth_first(p, m, v):
    order = theirs(schedules.ScheduleLoopedBFS, p, m, v).pipeline_order
    assert ours(build("breadth-first", ranks=p, microbatches=m, chunks=v)) == text(order)


CLASSES = {
    "interleaved": "ScheduleInterleaved1F1B",
    "breadth-first": "ScheduleLoopedBFS",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "zb-1p": "ScheduleInterleavedZeroBubble",
    "zb-v": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}


@pytest.mark.parametrize("name", CLASSES)
def test_csv_files_go_both_ways(name, tmp_path):
    schedule = common.order(name)
    chunks = schedule.stages // 4
    torchs = theirs(getattr(schedules, CLASSES[name]), 4, 8, chunks)
    torchs._dump_csv(tmp_path / "theirs.csv", format="compute_only")
    assert Schedule.parse((tmp_path / "theirs.csv").read_text()) == schedule
    runtime = theirs(schedules._PipelineScheduleRuntime, 4, 8, chunks)
    (tmp_path / "ours.csv").write_text(schedule.to_csv())
    runtime._load_csv(tmp_path / "ours.csv", format="compute_only")
    assert text(runtime.pipeline_order) == ours(schedule)
    assert runtime.stage_index_to_group_rank == {s: r[0] for s, r in schedule.holders.items()}
    runtime._dump_csv(tmp_path / "again.csv", format="compute_only")
    assert Schedule.parse((tmp_path / "again.csv").read_text()) == schedule
