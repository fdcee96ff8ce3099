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

#: Names of torch's types and bytes of an element, in the order of their numbers in the header; only ever added to.
ELEMENT_BYTES = {
    "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int16": 2, "int32": 4, "int64": 8, "bool": 1, "float16": 2, "bfloat16": 2,
    "complex64": 8, "complex128": 16, "uint16": 2, "uint32": 4, "uint64": 8, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "complex32": 4,
}  # fmt: skip
TYPES = tuple(ELEMENT_BYTES)
#: Bytes that a shape may stand for, with its extents of 0 left out: torch counts in signed numbers of 64 bits.
_SHAPE_BYTES_MAX = (1 << 63) - 1


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
            try:
                packed += _AXIS.pack(
                    KINDS.index(axis.kind), bits, 0, axis.rank, axis.size, axis.split_dim or 0, axis.expert_id or 0,
                    axis.stage_id or 0,
                )  # fmt: skip
            except struct.error as error:
                raise NotATensor(f"{axis} does not fit the header: {error}") from error
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
        shape = shape[:dimensions]
        element = ELEMENT_BYTES[TYPES[dtype]]
        if math.prod(shape) * element != length or math.prod(filter(None, shape)) * element > _SHAPE_BYTES_MAX:
            raise NotATensor(f"the shape {tuple(shape)} of {TYPES[dtype]} does not fit the tensor's {length} bytes")
        found = []
        for n in range(axes):
            kind, bits, _, rank, size, split, expert, stage = _AXIS.unpack_from(raw, _HEAD.size + n * _AXIS.size)
            if kind >= len(KINDS):
                raise NotATensor("the header of the tensor names an unknown axis")
            optional = [value if bits >> place & 1 else None for place, value in enumerate((split, expert, stage))]
            try:
                found.append(ParallelAxis(KINDS[kind], rank, size, *optional))
            except TypeError as error:
                raise NotATensor(f"the header of the tensor: {error}") from error
        parallelism = TensorParallelism(found) if found else None
        if parallelism is not None:
            try:
                parallelism.check()
            except ValueError as error:
                raise NotATensor(f"the header of the tensor: {error}") from error
        return Header(TYPES[dtype], tuple(shape), length, parallelism)


def describe(tensor: Any, parallelism: Optional[TensorParallelism] = None) -> tuple[Header, Any]:
    """(header, the tensor as contiguous host memory). NotATensor when it cannot be stored."""
    torch = torch_module()
    if not isinstance(tensor, torch.Tensor):
        raise NotATensor(f"not a tensor: {type(tensor).__name__}")
    dtype = str(tensor.dtype).rpartition(".")[2]
    if dtype not in TYPES or tensor.dim() > DIMENSIONS_MAX:
        raise NotATensor(f"a tensor of {dtype} with {tensor.dim()} dimensions cannot be stored; the limit is {DIMENSIONS_MAX}")
    if tensor.layout != torch.strided or tensor.device.type == "meta":
        raise NotATensor(f"a tensor of layout {tensor.layout} on '{tensor.device}' has no elements in a row; make it a dense one")
    # `conj()` and `.imag` may only mark a view as conjugated or negated: its bytes are not its elements before that is resolved.
    tensor = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
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
    tensor = torch.empty(header.shape, dtype=_dtype(header))
    if header.length:
        _native.copy_memory([tensor.data_ptr()], [value.address + HEADER_BYTES], [header.length], unchecked=True)
    return header, tensor


def _dtype(header: Header) -> Any:
    dtype = getattr(torch_module(), header.dtype, None)
    if dtype is None:
        raise NotATensor(f"this version of PyTorch has no type {header.dtype}")
    return dtype


def _view(header: Header, memory: Optional[object]) -> Any:
    torch = torch_module()
    dtype = _dtype(header)
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
