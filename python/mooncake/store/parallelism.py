"""Which shard of a tensor is meant: `TensorParallelism` of a write, `ReadTarget` of a read; and the keys that shards have."""

import copy
import operator
from collections.abc import Sequence
from typing import Any, Optional

KINDS = ("tp", "dp", "ep", "pp")
#: Axes that the header of a stored tensor has room for.
AXES_MAX = 4
#: Ranks along one axis; the shards of a tensor are looked up in one call.
AXIS_SIZE_MAX = 65536
MODES = ("as_stored", "shard", "full")
#: What Mooncake's numbers are.
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


class _Checked:
    """Attributes that are there and nothing else, each looked at when it is set: TypeError, or AttributeError, as in Mooncake."""

    def __setattr__(self, name: str, value: object) -> None:
        check = getattr(self, f"_check_{name}", None) if not name.startswith("_") else None
        if check is None:
            raise AttributeError(f"{type(self).__name__} has no attribute '{name}'")
        object.__setattr__(self, name, check(f"{type(self).__name__}.{name}", value))


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} takes a str, not {value!r}")
    return value


def _int(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} takes an int, not {value!r}") from None
    if not INT32_MIN <= number <= INT32_MAX:
        raise TypeError(f"{name} takes an int of 32 bits, not {value!r}")
    return int(number)


def _int_or_none(name: str, value: Any) -> Optional[int]:
    return None if value is None else _int(name, value)


class ParallelAxis(_Checked):
    """One axis of a shard's identity: `rank` of `size` along an axis of one of `KINDS`."""

    _check_kind = staticmethod(_text)
    _check_rank = _check_size = staticmethod(_int)
    _check_split_dim = _check_expert_id = _check_stage_id = staticmethod(_int_or_none)
    kind: str
    rank: int
    size: int
    split_dim: Optional[int]
    expert_id: Optional[int]
    stage_id: Optional[int]

    def __init__(
        self,
        kind: str = "",
        rank: int = 0,
        size: int = 1,
        split_dim: Optional[int] = None,
        expert_id: Optional[int] = None,
        stage_id: Optional[int] = None,
    ) -> None:
        self.kind = kind
        self.rank = rank
        self.size = size
        self.split_dim = split_dim
        self.expert_id = expert_id
        self.stage_id = stage_id

    def __repr__(self) -> str:
        return f"ParallelAxis({self.kind} {self.rank} of {self.size}, split_dim={self.split_dim})"


class TensorParallelism:
    """An ordered list of axes: the identity of a shard. Copied both ways, as in Mooncake: what is done to a list that was given or
    taken changes nothing here."""

    __slots__ = ("_axes",)

    def __init__(self, axes: Optional[Sequence[ParallelAxis]] = None) -> None:
        self.axes = list(axes or [])

    _axes: tuple[ParallelAxis, ...]

    @property
    def axes(self) -> list[ParallelAxis]:
        return [copy.copy(axis) for axis in self._axes]

    @axes.setter
    def axes(self, axes: Sequence[ParallelAxis]) -> None:
        if not isinstance(axes, (list, tuple)) or not all(isinstance(axis, ParallelAxis) for axis in axes):
            raise TypeError(f"TensorParallelism.axes takes a list of ParallelAxis, not {axes!r}")
        self._axes = tuple(copy.copy(axis) for axis in axes)

    def tp(self) -> Optional[ParallelAxis]:
        """The axis that cuts the tensor."""
        return next((copy.copy(axis) for axis in self._axes if axis.kind == "tp"), None)

    def with_tp_rank(self, rank: int, size: int, split_dim: int) -> "TensorParallelism":
        """The same shard of another tensor-parallel rank."""
        return TensorParallelism(
            [ParallelAxis("tp", rank, size, split_dim) if axis.kind == "tp" else axis for axis in self._axes]
        )

    def check(self) -> None:
        """ValueError when it names no shard."""
        if len(self._axes) > AXES_MAX:
            raise ValueError(f"{len(self._axes)} axes; the limit is {AXES_MAX}")
        kinds = [axis.kind for axis in self._axes]
        for axis in self._axes:
            if axis.kind not in KINDS:
                raise ValueError(f"axis kind {axis.kind!r}; it is one of {', '.join(KINDS)}")
            if not 1 <= axis.size <= AXIS_SIZE_MAX or not 0 <= axis.rank < axis.size:
                raise ValueError(f"axis {axis.kind}: rank {axis.rank} of {axis.size}; the limit is {AXIS_SIZE_MAX} ranks")
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"an axis is given twice: {', '.join(kinds)}")


def _mode(name: str, value: object) -> str:
    mode = _text(name, value)
    if mode not in MODES:
        raise RuntimeError(f"{name} is one of {', '.join(MODES)}, not {value!r}")
    return mode


def _parallelism(name: str, value: object) -> Optional[TensorParallelism]:
    if value is not None and not isinstance(value, TensorParallelism):
        raise TypeError(f"{name} takes a TensorParallelism, not {value!r}")
    return value


class ReadTarget(_Checked):
    """What a read wants: the object as it is stored, one shard (`parallelism` says which), or the whole tensor."""

    _check_mode = staticmethod(_mode)
    _check_parallelism = staticmethod(_parallelism)
    mode: str
    parallelism: Optional[TensorParallelism]

    def __init__(self, mode: str = "as_stored", parallelism: Optional[TensorParallelism] = None) -> None:
        self.mode = mode
        self.parallelism = parallelism


def shard_key(key: str, parallelism: Optional[TensorParallelism]) -> str:
    """The key under which a shard is stored: `<key>_tp_<rank>` for tensor parallelism alone."""
    for axis in parallelism.axes if parallelism else ():
        key += f"_{axis.kind}_{axis.rank}"
        key += "" if axis.expert_id is None else f"_expert_{axis.expert_id}"
        key += "" if axis.stage_id is None else f"_stage_{axis.stage_id}"
    return key


def partition_of(writer_partition: object) -> ParallelAxis:
    """The axis that a `writer_partition` means: (rank, size, split_dim), a dict of these, or an object that has them."""
    names = ("rank", "size", "split_dim")
    if isinstance(writer_partition, dict):
        values: list[Any] = [writer_partition.get(name) for name in names]
    elif isinstance(writer_partition, (list, tuple)):
        values = list(writer_partition)
    else:
        values = [getattr(writer_partition, name, None) for name in names]
    if len(values) != 3 or not all(isinstance(value, int) for value in values):
        raise ValueError(f"writer_partition takes (rank, size, split_dim), not {writer_partition!r}")
    rank, size, split_dim = (int(value) for value in values)
    try:
        return ParallelAxis("tp", rank, size, split_dim)
    except TypeError as error:
        raise ValueError(f"writer_partition: {error}") from error
