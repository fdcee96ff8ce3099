"""The `tidepool` program that comes with this package: where it is, and running it as the console script."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

#: Names another program, for tests of a build.
OVERRIDE = "TIDEPOOL_BINARY"


def path() -> str:
    """The program of this installation; FileNotFoundError when there is none."""
    named = os.environ.get(OVERRIDE)
    if named:
        return named
    bundled = Path(__file__).with_name("_bin") / "tidepool"
    if bundled.is_file():
        return str(bundled)
    # A source tree. The console script of this very package would only come back here.
    found = shutil.which("tidepool")
    if found and Path(found).parent != Path(sys.executable).parent:
        return found
    raise FileNotFoundError(f"the tidepool program is not in this installation; set {OVERRIDE} to its path")


def main() -> None:
    """The console script: becomes the program."""
    program = path()
    os.execv(program, [program, *sys.argv[1:]])
