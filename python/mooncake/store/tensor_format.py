"""How a tensor is stored: a header of 304 bytes (type, shape, the shard that it is), then its elements, row by row.

The header is as long as Mooncake's, so buffers that are sized for one fit the other; its content is Tidepool's own.
"""

import ctypes
import math
import struct
from typing import Any, Optional

from mooncake.store.parallelism import AXES_MAX, KINDS, ParallelAxis, TensorParallelism
from tidepool import _native

HEADER_BYTES = 304
DIMENSIONS_MAX = 8
_MAGIC = b"TPTENSOR"
_VERSION = 1
_HEAD = struct.Struct("<8sHHII Q8q")  # magic, version, dimensions, type, axes, bytes of the elements, shape
_AXIS = struct.Struct("<BBHiii qq")  # kind, what is given (bits), -, rank, size, split_dim, expert, stage

#: Names of torch's types, by their number in the header; only ever added to.
TYPES = (
    "float32", "float64", "int8", "uint8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "complex64",
    "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "float8_e8m0fnu", "complex32",
)  # fmt: skip


class NotATensor(ValueError):
    """Bytes that are no stored tensor, or a tensor that cannot be stored."""


def torch_module():
    """torch. ImportError that says what needs it."""
    try:
        import torch
    except ImportError as error:
        raise ImportError("tensor calls need PyTorch; install torch, or use put and get with bytes") from error
    return torch


class Header:
    """What is known of a stored tensor."""

    def __init__(self, dtype: str, shape: tuple, length: int, parallelism: Optional[TensorParallelism]) -> None:
        self.dtype = dtype
        self.shape = shape
        self.length = length
        self.parallelism = parallelism

    def pack(self) -> bytes:
        axes = self.parallelism.axes if self.parallelism else []
        shape = tuple(self.shape) + (0,) * (DIMENSIONS_MAX - len(self.shape))
        packed = _HEAD.pack(
            _MAGIC, _VERSION, len(self.shape), TYPES.index(self.dtype), len(axes), self.length, *shape
        )
        for axis in axes:
            given = [value is not None for value in (axis.split_dim, axis.expert_id, axis.stage_id)]
            bits = sum(1 << n for n, there in enumerate(given) if there)
            packed += _AXIS.pack(
                KINDS.index(axis.kind), bits, 0, axis.rank, axis.size, axis.split_dim or 0, axis.expert_id or 0,
                axis.stage_id or 0,
            )  # fmt: skip
        return packed.ljust(HEADER_BYTES, b"\0")

    @staticmethod
    def unpack(raw: bytes, total: int) -> "Header":
        """NotATensor when it is not the header of a tensor that is `total` bytes long, header included."""
        if len(raw) < HEADER_BYTES:
            raise NotATensor(f"{len(raw)} bytes; a stored tensor has at least {HEADER_BYTES}")
        magic, version, dimensions, dtype, axes, length, *shape = _HEAD.unpack_from(raw)
        if magic != _MAGIC or version != _VERSION:
            raise NotATensor("not a stored tensor, or one of another version")
        known = dimensions <= DIMENSIONS_MAX and dtype < len(TYPES) and axes <= AXES_MAX and min(shape) >= 0
        if not known or length != total - HEADER_BYTES:
            raise NotATensor("the header of the tensor does not fit its bytes")
        found = []
        for n in range(axes):
            kind, bits, _, rank, size, split, expert, stage = _AXIS.unpack_from(raw, _HEAD.size + n * _AXIS.size)
            if kind >= len(KINDS):
                raise NotATensor("the header of the tensor names an unknown axis")
            optional = [value if bits >> place & 1 else None for place, value in enumerate((split, expert, stage))]
            found.append(ParallelAxis(KINDS[kind], rank, size, *optional))
        return Header(TYPES[dtype], tuple(shape[:dimensions]), length, TensorParallelism(found) if found else None)


def describe(tensor: Any, parallelism: Optional[TensorParallelism] = None) -> tuple[Header, Any]:
    """(header, the tensor as contiguous host memory). NotATensor when it cannot be stored."""
    torch = torch_module()
    if not isinstance(tensor, torch.Tensor):
        raise NotATensor(f"not a tensor: {type(tensor).__name__}")
    dtype = str(tensor.dtype).rpartition(".")[2]
    if dtype not in TYPES or tensor.dim() > DIMENSIONS_MAX or tensor.is_sparse:
        raise NotATensor(f"a tensor of {dtype} with {tensor.dim()} dimensions cannot be stored; the limit is {DIMENSIONS_MAX}")
    tensor = tensor.detach().cpu().contiguous()
    length = tensor.numel() * tensor.element_size()
    return Header(dtype, tuple(tensor.shape), length, parallelism), tensor


def copy_from(address: int, total: int) -> tuple[Header, Any]:
    """(header, a tensor of its own) of a stored tensor at an address that a caller named. NotATensor, also without memory there."""
    header = header_at(address, total)
    torch = torch_module()
    packed = torch.empty(header.length, dtype=torch.uint8)
    if header.length:
        _copy(packed.data_ptr(), address + HEADER_BYTES, header.length)
    return header, _view(header, packed)


def header_at(address: int, total: int) -> Header:
    """The header of a stored tensor at an address that a caller named. NotATensor, also when there is no memory."""
    if total < HEADER_BYTES:
        raise NotATensor(f"{total} bytes; a stored tensor has at least {HEADER_BYTES}")
    packed = ctypes.create_string_buffer(HEADER_BYTES)
    _copy(ctypes.addressof(packed), address, HEADER_BYTES)
    return Header.unpack(packed.raw, total)


def _copy(target: int, source: int, size: int) -> None:
    try:
        _native.copy_memory([target], [source], [size], unchecked=True)
    except (ValueError, OverflowError) as error:
        raise NotATensor(f"{size} bytes at {source:#x}: {error}") from error


def tensor_at(address: int, total: int) -> tuple[Header, Any]:
    """(header, a tensor over the elements) of a stored tensor that was just read to an address, whose memory the caller keeps."""
    header = Header.unpack(ctypes.string_at(address, min(total, HEADER_BYTES)), total)
    return header, _view(header, (ctypes.c_ubyte * header.length).from_address(address + HEADER_BYTES))


def tensor_of(value: Any) -> tuple[Header, Any]:
    """(header, a tensor of its own) of a stored tensor, from what a get handed out. NotATensor."""
    torch = torch_module()
    header = Header.unpack(bytes(memoryview(value)[:HEADER_BYTES]), len(value))
    element = torch.empty((), dtype=getattr(torch, header.dtype)).element_size()
    if header.length != math.prod(header.shape) * element:
        raise NotATensor("the shape of the tensor does not fit its bytes")
    tensor = torch.empty(header.shape, dtype=getattr(torch, header.dtype))
    if header.length:
        _native.copy_memory([tensor.data_ptr()], [value.address + HEADER_BYTES], [header.length], unchecked=True)
    return header, tensor


def _view(header: Header, memory: Optional[object]) -> Any:
    torch = torch_module()
    dtype = getattr(torch, header.dtype)
    if not header.length:
        return torch.empty(header.shape, dtype=dtype)
    try:
        flat = memory if isinstance(memory, torch.Tensor) else torch.frombuffer(memory, dtype=torch.uint8)
        return flat.view(dtype).reshape(header.shape)
    except RuntimeError as error:
        raise NotATensor(f"the shape of the tensor does not fit its bytes: {error}") from error


def _serialize_tensor(tensor: Any) -> tuple:
    """(header, address of the elements, their bytes, what keeps them). ValueError for what is no tensor."""
    header, kept = describe(tensor)
    return header.pack(), kept.data_ptr(), header.length, kept


def _deserialize_tensor(data: bytes) -> Any:
    """The tensor of a header and elements in a row. ValueError when they are none."""
    header = Header.unpack(data[:HEADER_BYTES], len(data))
    return _view(header, bytearray(data[HEADER_BYTES:]))


def _tensor_metadata_size() -> int:
    """Bytes of a stored tensor's header."""
    return HEADER_BYTES
