"""`MooncakeDistributedStore`: the class that engines make."""

from mooncake.store.parallel_tensors import ParallelTensors


class MooncakeDistributedStore(ParallelTensors):
    """A client of a Tidepool cluster with Mooncake's API. Making one costs nothing; `setup` connects it.

    For any number of threads. Calls on a store that is not set up, or closed, answer -600 (b"", None or [] where they answer
    no number). It is closed when the process ends; a process that is killed is found out by its silence.
    """
