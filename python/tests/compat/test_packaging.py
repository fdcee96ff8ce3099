"""What the native module asks of a host: its C library, and nothing that has to be installed first."""

import re
import struct

import pytest

from tidepool import _native

#: Libraries of glibc itself, and of the compiler that every system has.
OF_EVERY_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|gcc_s)\.so\.\d+|ld-linux.*")
_DT_NEEDED, _DT_STRTAB, _PT_LOAD, _PT_DYNAMIC = 1, 5, 1, 2


def needed(path):
    """Names of the shared libraries that a 64-bit ELF file asks for."""
    with open(path, "rb") as file:
        raw = file.read()
    assert raw[:5] == b"\x7fELF\x02"
    start, size, count = struct.unpack_from("<Q", raw, 32)[0], *struct.unpack_from("<HH", raw, 54)
    segments = [struct.unpack_from("<IIQQQQQQ", raw, start + n * size) for n in range(count)]
    (dynamic,) = [each for each in segments if each[0] == _PT_DYNAMIC]
    tags = list(struct.iter_unpack("<QQ", raw[dynamic[2] : dynamic[2] + dynamic[5] // 16 * 16]))
    address = next(value for tag, value in tags if tag == _DT_STRTAB)
    load = next(each for each in segments if each[0] == _PT_LOAD and each[3] <= address < each[3] + each[5])
    strings = address - load[3] + load[2]
    names = [value for tag, value in tags if tag == _DT_NEEDED]
    return [raw[strings + at : raw.index(b"\0", strings + at)].decode() for at in names]


# User report 87: a wheel for hosts without GPUs needed libcudart, and a system with libibverbs, libcurl and libnuma.
def test_case_087_nothing_has_to_be_installed_first():
    found = needed(_native.__file__)
    assert "libc.so.6" in found
    assert [name for name in found if not OF_EVERY_SYSTEM.fullmatch(name)] == []


# User report 90: one wheel a CUDA version.
@pytest.mark.parametrize("library", ["cuda", "nccl", "ibverbs", "nvml"])
def test_case_090_one_wheel_whatever_gpu_the_host_has(library):
    assert not [name for name in needed(_native.__file__) if library in name]


# User report 89: wheels needed a newer C library than the system had. One stable interface for every Python.
def test_case_089_one_module_for_every_python():
    assert ".abi3." in _native.__file__
