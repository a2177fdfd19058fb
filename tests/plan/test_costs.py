"""Costs: what is accepted, and what a stage takes of a whole share."""

from fractions import Fraction as Q

import pytest

from minipipe import Costs, build, check, lower_bound, simulate
from minipipe.costs import action_time, exact, pair_time
from minipipe.family import everything
from minipipe.planning.problem import Problem


def test_a_stage_takes_ranks_over_stages_of_a_whole_share():
    looped, plain = (build(n, ranks=4, microbatches=4) for n in ("interleaved", "gpipe"))
    assert Costs(forward=3).per_stage("forward", looped) == [Q(3, 2)] * 8
    assert Costs(forward=4).per_stage("forward", looped) == [2] * 8
    assert Costs(forward=3).per_stage("recompute", looped) == [Q(3, 2)] * 8, "R as F"
    assert Costs(forward=0.5).per_stage("forward", plain) == [0.5] * 4
    assert Costs(forward=[1, 2, 3, 4]).per_stage("forward", plain) == [1, 2, 3, 4], "as it is"
    assert Costs(message_size=7).per_stage("message_size", looped) == [7] * 8, "no share of a model"
    with pytest.raises(ValueError, match="forward has 3 costs, but the schedule has 4 stages"):
        simulate(plain, Costs(forward=[1, 2, 3]))


def test_times_of_actions():
    schedule = build("gpipe", ranks=2, microbatches=2, recompute=True)
    time = action_time(Costs(2, 3, 4, recompute=5), schedule)
    assert {a.kind: time(a) for a in schedule.rows[0]} == {"F": 2, "R": 5, "B": 7}
    assert pair_time(1, 2, 0) == 3 and pair_time(2, 2, Q(1, 4)) == 3
    assert type(exact(Q(4, 2))) is int and exact(Q(1, 2)) == Q(1, 2) and exact(0.5) == 0.5


@pytest.mark.parametrize(
    "error, words, arguments",
    [
        (ValueError, "forward must be finite and not negative, not -1", {"forward": -1}),
        (ValueError, "finite", {"backward_input": float("inf")}),
        (ValueError, "finite", {"backward_weight": float("nan")}),
        (ValueError, "finite", {"forward": [1, -1]}),
        (ValueError, "latency must be finite", {"latency": {(0, 1): -1}}),
        (ValueError, "bandwidth must be greater than 0", {"bandwidth": 0}),
        (ValueError, "bandwidth must be greater than 0", {"bandwidth": {(0, 1): 0}}),
        (ValueError, "exchange is a share between 0 and 1", {"exchange": 1.5}),
        (TypeError, "forward must be a number", {"forward": None}),
        (TypeError, "forward must be a number", {"forward": True}),
        (TypeError, "forward must be a number", {"forward": [1, None]}),
        (TypeError, "forward must be a number", {"forward": "1"}),
        (TypeError, "forward must be a number", {"forward": {0: 1}}),
        (TypeError, "forward must be a number", {"forward": {1, 2}}),
        (TypeError, "exchange must be a number", {"exchange": [0.5]}),
        (TypeError, "latency must be a number", {"latency": [1, 2]}),
        (TypeError, "latency needs pairs", {"latency": {0: 1}}),
        (TypeError, "bandwidth needs pairs", {"bandwidth": {(0, "1"): 1}}),
        (TypeError, "latency must be a number or a mapping from", {"latency": [0, 1]}),
        (TypeError, "bandwidth must be a number or a mapping from", {"bandwidth": "fast"}),
        (ValueError, r"latency has a link \(1, 1\): legal are two different ranks",
         {"latency": {(0, 1): 1, (1, 1): 1}}),
        (ValueError, r"bandwidth has a link \(-1, 0\): legal are", {"bandwidth": {(-1, 0): 1}}),
    ],
)  # fmt: skip
def test_wrong_costs_are_refused(error, words, arguments):
    with pytest.raises(error, match=words):
        Costs(**arguments)


def test_no_limit_and_defaults_are_allowed():
    schedule = build("gpipe", ranks=2, microbatches=2)
    assert simulate(schedule, Costs(bandwidth=None, recompute=None)).makespan == 9
    assert simulate(schedule, None).makespan == simulate(schedule).makespan
    assert simulate(schedule, Costs(bandwidth={(0, 1): None})).makespan == 9
    assert simulate(schedule, Costs(forward=(1, 1))).makespan == 9


@pytest.mark.parametrize("use", [simulate, lower_bound, lambda s, c: check(s, None, c)])
def test_something_else_than_a_schedule_or_costs_is_named(use):
    with pytest.raises(TypeError, match="a Schedule is needed, not str; build makes one"):
        use("gpipe", None)
    for wrong in ({"F": 1}, 5, {}):
        with pytest.raises(TypeError, match="costs must be Costs"):
            use(build("gpipe", ranks=2, microbatches=2), wrong)


def wherever_costs_are_taken():
    """Each function that takes costs, for two ranks."""
    two = build("gpipe", ranks=2, microbatches=2)
    return {
        "simulate": lambda c: simulate(two, c), "bound": lambda c: lower_bound(two, c),
        "check": lambda c: check(two, None, c), "everything": lambda c: everything(2, 2, c),
        "build": lambda c: build("zb-auto", ranks=2, microbatches=2, costs=c),
        "Problem": lambda c: Problem(2, 2, costs=c),
    }  # fmt: skip


@pytest.mark.parametrize("place", wherever_costs_are_taken())
def test_the_class_instead_of_an_instance_is_named(place):
    with pytest.raises(TypeError, match=r"costs must be Costs\(\.\.\.\), not the class itself"):
        wherever_costs_are_taken()[place](Costs)


@pytest.mark.parametrize("place", wherever_costs_are_taken())
def test_links_that_do_not_exist_are_refused(place):
    words = r"latency has a link \(1, 2\), but with 2 ranks the ranks are 0 to 1"
    with pytest.raises(ValueError, match=words):
        wherever_costs_are_taken()[place](Costs(latency={(0, 1): 1, (1, 2): 1}))
    with pytest.raises(ValueError, match="bandwidth has a link"):
        wherever_costs_are_taken()[place](Costs(bandwidth={(3, 0): 1}))
    wherever_costs_are_taken()[place](Costs(latency={(0, 1): 1}, bandwidth={(1, 0): 2}))
