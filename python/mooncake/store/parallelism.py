"""Which shard of a tensor is meant: `TensorParallelism` of a write, `ReadTarget` of a read; and the keys that shards have."""

from typing import Any, Optional

KINDS = ("tp", "dp", "ep", "pp")
#: Axes that the header of a stored tensor has room for.
AXES_MAX = 4
#: Ranks along one axis; the shards of a tensor are looked up in one call.
AXIS_SIZE_MAX = 65536
MODES = ("as_stored", "shard", "full")


class ParallelAxis:
    """One axis of a shard's identity: `rank` of `size` along an axis of one of `KINDS`."""

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
    """An ordered list of axes: the identity of a shard."""

    def __init__(self, axes: Optional[list[ParallelAxis]] = None) -> None:
        self.axes = list(axes or [])

    def tp(self) -> Optional[ParallelAxis]:
        """The axis that cuts the tensor."""
        return next((axis for axis in self.axes if axis.kind == "tp"), None)

    def with_tp_rank(self, rank: int, size: int, split_dim: int) -> "TensorParallelism":
        """The same shard of another tensor-parallel rank."""
        return TensorParallelism(
            [ParallelAxis("tp", rank, size, split_dim) if axis.kind == "tp" else axis for axis in self.axes]
        )

    def check(self) -> None:
        """ValueError when it names no shard."""
        if len(self.axes) > AXES_MAX:
            raise ValueError(f"{len(self.axes)} axes; the limit is {AXES_MAX}")
        kinds = [axis.kind for axis in self.axes]
        for axis in self.axes:
            if axis.kind not in KINDS:
                raise ValueError(f"axis kind {axis.kind!r}; it is one of {', '.join(KINDS)}")
            if not 1 <= axis.size <= AXIS_SIZE_MAX or not 0 <= axis.rank < axis.size:
                raise ValueError(f"axis {axis.kind}: rank {axis.rank} of {axis.size}; the limit is {AXIS_SIZE_MAX} ranks")
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"an axis is given twice: {', '.join(kinds)}")


class ReadTarget:
    """What a read wants: the object as it is stored, one shard (`parallelism` says which), or the whole tensor."""

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
    return ParallelAxis("tp", rank, size, split_dim)
