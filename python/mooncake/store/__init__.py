"""Mooncake's store module on a Tidepool cluster: same names, same arguments, same numbers; no change in the engine.

`store` is the class that engines use, put together from one module a subject: `lifecycle` (setup and close), `objects` (bytes in
and out), `zero_copy` (addresses), `ranges` and `sessions` (parts of objects), `tensors` and `parallel_tensors`, `tasks`, `segments`
(memory lent while running). What a call is given is described in `replicate`, what it gives in `descriptors`; `settings` reads what
`setup` and the environment say, `connection` is what a set-up store holds. Every name and its status: the page "Mooncake
compatibility" of the book.

Every call answers a number: 0 or a count, or one of `codes`. Nothing raises because of the cluster.
"""

from mooncake.store.buffers import (
    BufferHandle,
    BufferLease,
    BufferLeaseView,
    BufferPool,
    RegisteredBufferLease,
    RegisteredBufferLeaseView,
    RegisteredBufferPool,
)
from mooncake.store.descriptors import (
    BufferDescriptor,
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
)
from mooncake.store.enums import ObjectDataType, ReplicaStatus, SoftPinAction, TaskStatus, TaskType
from mooncake.store.host_memory import (
    MooncakeHostMemAllocator,
    bind_to_numa_node,
    get_alloc_func_addr,
    get_free_func_addr,
)
from mooncake.store.parallelism import ParallelAxis, ReadTarget, TensorParallelism
from mooncake.store.replicate import ReplicateConfig
from mooncake.store.store import MooncakeDistributedStore
from mooncake.store.tensor_format import _deserialize_tensor, _serialize_tensor, _tensor_metadata_size
from mooncake.store.unsupported import EngramStore, EngramStoreConfig, MooncakeDistributedNoFRegister

# The original's module also has the members of its enumerations by name. FAILED is of TaskStatus there.
UNKNOWN = ObjectDataType.UNKNOWN
KVCACHE = ObjectDataType.KVCACHE
TENSOR = ObjectDataType.TENSOR
WEIGHT = ObjectDataType.WEIGHT
SAMPLE = ObjectDataType.SAMPLE
ACTIVATION = ObjectDataType.ACTIVATION
GRADIENT = ObjectDataType.GRADIENT
OPTIMIZER_STATE = ObjectDataType.OPTIMIZER_STATE
METADATA = ObjectDataType.METADATA
GENERAL = ObjectDataType.GENERAL
UNDEFINED = ReplicaStatus.UNDEFINED
INITIALIZED = ReplicaStatus.INITIALIZED
COMPLETE = ReplicaStatus.COMPLETE
REMOVED = ReplicaStatus.REMOVED
PENDING = TaskStatus.PENDING
PROCESSING = TaskStatus.PROCESSING
SUCCESS = TaskStatus.SUCCESS
FAILED = TaskStatus.FAILED
REPLICA_COPY = TaskType.REPLICA_COPY
REPLICA_MOVE = TaskType.REPLICA_MOVE

__all__ = [
    "BufferDescriptor",
    "BufferHandle",
    "BufferLease",
    "BufferLeaseView",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "EngramStore",
    "EngramStoreConfig",
    "MemoryDescriptor",
    "MooncakeDistributedNoFRegister",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferLeaseView",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "bind_to_numa_node",
    "get_alloc_func_addr",
    "get_free_func_addr",
    "_deserialize_tensor",
    "_serialize_tensor",
    "_tensor_metadata_size",
]
