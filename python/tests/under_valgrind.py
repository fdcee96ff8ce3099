#!/usr/bin/env python3
"""Runs pytest under valgrind's memcheck and shows what it found in the native module: under_valgrind.py [PYTEST ARGUMENT ...]

What has no frame of the module in its stack is CPython's, numpy's or the loader's, and is only counted. The tests' child processes are
followed, the tidepool program is not. Needs valgrind; takes 20 to 50 times as long as the tests alone, so their deadlines are as much
wider (`patience`) unless TIDEPOOL_TEST_PATIENCE says otherwise.
"""

import ctypes
import errno
import glob
import os
import re
import struct
import subprocess
import sys
import tempfile

MODULE = "_native.abi3.so"
#: The module asks the kernel, by msync, whether what it was given as an address is one.
SUPPRESSED = """{
  addresses-are-looked-up
  Memcheck:Param
  msync(start)
  ...
  fun:*registry*check*
}
"""
#: How much longer tests wait, and calls that name no deadline.
PATIENCE = "20"
#: Children that are not followed.
SKIPPED = "*/tidepool,*/gcc,*/cc,*/ld,*/ldconfig*,*/sh"
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
PR_GET_AUXV = 0x41555856
SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 0x7FFF0000, 0x00050000
SYS_PRCTL = 157  # x86_64
LOAD, JUMP_EQUAL, RETURN = 0x20, 0x15, 0x06


def without_get_auxv() -> None:
    """From here on prctl(PR_GET_AUXV) fails. Valgrind lets it through, with the address of a vDSO that it has unmapped; what is in
    /proc/self/auxv instead it has set right."""
    program = [
        (LOAD, 0, 0, 0),  # the call's number
        (JUMP_EQUAL, 0, 3, SYS_PRCTL),
        (LOAD, 0, 0, 16),  # its first argument
        (JUMP_EQUAL, 0, 1, PR_GET_AUXV),
        (RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EINVAL),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    filter_ = struct.pack("@HxxxxxxP", len(program), ctypes.addressof(code))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in ((PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), (PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(filter_), 0, 0)):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "prctl")


def findings(log: str) -> "list[str]":
    """The errors in a log, each with its stack."""
    lines = [re.sub(r"^==\d+== ?", "", line) for line in log.splitlines() if line.startswith("==")]
    parts = re.split(r"\n\s*\n", "\n".join(lines))
    return [part for part in parts if re.search(r"^\s+at 0x", part, re.MULTILINE)]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="under-valgrind-") as directory, tempfile.NamedTemporaryFile("w") as suppressed:
        suppressed.write(SUPPRESSED)
        suppressed.flush()
        command = [
            "valgrind", "--tool=memcheck", "--trace-children=yes", f"--trace-children-skip={SKIPPED}", "--leak-check=no",
            "--num-callers=60", "--error-limit=no", f"--log-file={directory}/%p", f"--suppressions={suppressed.name}",
            sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "timeout=3600", *sys.argv[1:],
        ]  # fmt: skip
        # Python's own allocator would hide what is read after it was freed.
        environment = {"TIDEPOOL_TEST_PATIENCE": PATIENCE, **os.environ, "PYTHONMALLOC": "malloc"}
        environment.update({"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"})
        code = subprocess.call(command, env=environment, preexec_fn=without_get_auxv)
        found = []
        for path in glob.glob(f"{directory}/*"):
            with open(path, errors="replace") as log:
                found += findings(log.read())
    ours = [each for each in found if MODULE in each]
    print("\n\n".join(ours))
    print(f"valgrind: {len(ours)} kinds of error with {MODULE} in the stack, {len(found) - len(ours)} others")
    return code or bool(ours)


if __name__ == "__main__":
    sys.exit(main())
