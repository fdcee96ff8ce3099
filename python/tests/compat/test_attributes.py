"""Attributes of the objects that calls take: looked at when they are set, with the errors that Mooncake raises, and copied."""

import copy
import pickle

import pytest

from mooncake.store import MooncakeHostMemAllocator, ObjectDataType, ParallelAxis, ReadTarget, ReplicateConfig, TensorParallelism


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("rank", "a", TypeError),
        ("rank", 1.5, TypeError),
        ("rank", None, TypeError),
        ("rank", 2**40, TypeError),
        ("size", "x", TypeError),
        ("kind", 3, TypeError),
        ("split_dim", "a", TypeError),
        ("expert_id", "x", TypeError),
        ("ranks", 1, AttributeError),
    ],
)
def test_an_axis_refuses_what_is_none(name, value, error):
    axis = ParallelAxis()
    with pytest.raises(error, match=name):
        setattr(axis, name, value)
    assert axis.rank == 0 and axis.kind == ""


@pytest.mark.parametrize(("name", "value"), [("rank", -1), ("rank", True), ("kind", "zz"), ("split_dim", None), ("stage_id", 2)])
def test_an_axis_takes_what_mooncakes_takes(name, value):
    axis = ParallelAxis()
    setattr(axis, name, value)
    assert getattr(axis, name) == value
    assert getattr(copy.deepcopy(axis), name) == getattr(pickle.loads(pickle.dumps(axis)), name) == value


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [("mode", "x", RuntimeError), ("mode", 3, TypeError), ("parallelism", 1, TypeError), ("mod", "full", AttributeError)],
)
def test_a_target_refuses_what_is_none(name, value, error):
    target = ReadTarget()
    with pytest.raises(error, match=name):
        setattr(target, name, value)
    assert target.mode == "as_stored" and target.parallelism is None


def test_axes_are_copied_both_ways():
    """Tried without a copy on the way out: fails."""
    axis = ParallelAxis("tp", 1, 4, 0)
    given = [axis]
    parallelism = TensorParallelism()
    parallelism.axes = given
    given.append(ParallelAxis())
    axis.rank = 3
    parallelism.axes.append(ParallelAxis())
    parallelism.axes[0].rank = 2
    assert [each.rank for each in parallelism.axes] == [1]
    for wrong in (3, [3], "tp"):
        with pytest.raises(TypeError, match="axes"):
            parallelism.axes = wrong
    with pytest.raises(AttributeError):
        parallelism.axess = []


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("with_hard_pin", 1, True),
        ("with_hard_pin", None, False),
        ("with_hard_pin", 0.0, False),
        ("prefer_alloc_in_same_node", True, True),
        ("preferred_segment", b"a", "a"),
        ("preferred_segments", (b"a", "b"), ["a", "b"]),
        ("replica_num", True, 1),
    ],
)
def test_a_config_takes_what_mooncakes_takes(name, value, taken):
    config = ReplicateConfig()
    setattr(config, name, value)
    assert getattr(config, name) == taken


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("with_hard_pin", "yes"),
        ("prefer_alloc_in_same_node", "x"),
        ("preferred_segment", None),
        ("preferred_segment", b"\xff"),
        ("preferred_segments", "a"),
        ("preferred_segments", [3]),
        ("replica_num", 1.0),
    ],
)
def test_a_config_refuses_what_mooncakes_refuses(name, value):
    with pytest.raises(TypeError, match=name):
        setattr(ReplicateConfig(), name, value)


def test_numbers_and_truths_of_numpy_are_taken():
    numpy = pytest.importorskip("numpy")
    config = ReplicateConfig()
    config.with_hard_pin, config.replica_num = numpy.bool_(True), numpy.int64(2)
    assert config.with_hard_pin is True and config.replica_num == 2


def test_what_differs_from_mooncakes_and_is_on_the_page():
    with pytest.raises(ValueError):
        ObjectDataType(99)
    assert MooncakeHostMemAllocator().alloc(0) == 0
