"""The overlay with the original's own wheel: both installed by pip, in either order, and taken away again.

TIDEPOOL_ORIGINAL_WHEEL names the wheel (`scripts/test --full` fetches it); without it `test_overlay` tries the same on a stand-in.
Ours is packed from the package under test, or is TIDEPOOL_WHEEL.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import zipfile

import pytest

import mooncake.store
from compat.rig import MIB

ORIGINAL = os.environ.get("TIDEPOOL_ORIGINAL_WHEEL")
pytestmark = pytest.mark.skipif(not ORIGINAL, reason="TIDEPOOL_ORIGINAL_WHEEL names no wheel of the original")

TREE = pathlib.Path(mooncake.store.__file__).resolve().parents[2]
#: What ours answers for, and what is the original's alone and imports without PyTorch.
OURS = ["store", "async_store", "buffer_pool", "mooncake_config", "cli", "cli_client"]
THEIRS = ["engine", "cli_bench", "dataproto_catalog", "fabric_allocator_utils", "reshard", "structured_object_store"]

WHICH = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module("mooncake." + name).__file__ for name in sys.argv[2:]}))
"""

#: The original's engine and what the original builds on its store, with ours in the same process.
TOGETHER = f"""
import mooncake.engine, mooncake.store, numpy
from mooncake.structured_object_store import MooncakeBundleTransfer

engine = mooncake.engine.TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
store = mooncake.store.MooncakeDistributedStore()
assert store.setup("localhost", "P2PHANDSHAKE", {64 * MIB}, {16 * MIB}, "tcp", "", sys.argv[2], engine) == 0
while not any(each["name"] == store.get_hostname() for each in store._client.segments()):
    time.sleep(0.02)
bundles = MooncakeBundleTransfer(store)
stored = {{"numbers": numpy.arange(100_000, dtype=numpy.float32).reshape(100, 1000), "bytes": bytes(range(256)) * 20}}
name = bundles.put_object(stored)
found = bundles.get_object(name)
assert numpy.array_equal(found["numbers"], stored["numbers"]) and found["bytes"] == stored["bytes"]
bundles.remove_bundle(name)
assert store.close() == 0
"""


def packed(directory):
    """A wheel of the package under test."""
    path = directory / "tidepool-0-py3-none-any.whl"
    described = (TREE / "pyproject.toml").read_text()
    programs = re.findall(r'^(\w+) = "([\w.]+:\w+)"$', described.partition("[project.scripts]")[2], re.MULTILINE)
    assert "mooncake_master" in dict(programs)
    texts = {
        "METADATA": "Metadata-Version: 2.1\nName: tidepool\nVersion: 0\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "entry_points.txt": "[console_scripts]\n" + "".join(f"{name} = {what}\n" for name, what in programs),
    }
    with zipfile.ZipFile(path, "w") as wheel:
        files = [file for part in ("tidepool", "mooncake") for file in sorted((TREE / part).rglob("*"))]
        names = [str(file.relative_to(TREE)) for file in files if file.is_file() and "__pycache__" not in file.parts]
        for name in names:
            wheel.write(TREE / name, name)
        for name, text in texts.items():
            wheel.writestr(f"tidepool-0.dist-info/{name}", text)
            names.append(f"tidepool-0.dist-info/{name}")
        listed = [*names, "tidepool-0.dist-info/RECORD"]
        wheel.writestr("tidepool-0.dist-info/RECORD", "".join(f"{name},,\n" for name in listed))
    return str(path)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    return os.environ.get("TIDEPOOL_WHEEL") or packed(tmp_path_factory.mktemp("wheel"))


class Environment:
    """A virtual environment with nothing in it."""

    def __init__(self, directory):
        self.bin = directory / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)

    def pip(self, *arguments):
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", self.bin / "python", *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def install(self, *wheels):
        for wheel in wheels:
            self.pip("install", "--no-index", "--no-deps", "--force-reinstall", wheel)

    def run(self, script, *arguments):
        """What a script prints. Its second argument on are `arguments`; what the original needs is that of the tests."""
        needs = {os.path.dirname(pytest.importorskip(name).__path__[0]) for name in ("numpy", "msgpack")}
        start = f"import sys, time\nsys.path += {sorted(needs)!r}\n"
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self.bin / "python", "-c", start + script, "-", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=self.bin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def whose(self, *names):
        """Whose each module is: a directory of ours, or the original's file."""
        files = json.loads(self.run(WHICH, *names))
        return {name: "ours" if file.endswith(f"/mooncake/{name}/__init__.py") and name in OURS else "theirs" for name, file in files.items()}

    def version(self, program):
        return subprocess.run([self.bin / program, "--version"], capture_output=True, text=True, check=True).stdout


def overlaid(directory, *wheels):
    made = Environment(directory / "environment")
    made.install(*wheels)
    return made


#: What pip installed one after the other. The second time is what an upgrade does.
ORDERS = ["original, ours", "ours, original, ours", "original, ours, original"]


@pytest.fixture(scope="module", params=ORDERS)
def both(request, tmp_path_factory, ours):
    """An environment with both."""
    wheels = [{"original": ORIGINAL, "ours": ours}[name] for name in request.param.split(", ")]
    return overlaid(tmp_path_factory.mktemp("both"), *wheels)


def test_ours_answers_for_the_store_and_the_rest_is_the_originals(both):
    found = both.whose(*OURS, *THEIRS)
    assert found == {**dict.fromkeys(OURS, "ours"), **dict.fromkeys(THEIRS, "theirs")}
    assert both.version("mooncake_master").startswith("tidepool ")


def test_the_originals_engine_and_its_structured_objects_work_beside_ours(both, cluster):
    both.run(TOGETHER, cluster.addresses)


def test_going_back_as_the_book_says(tmp_path, ours):
    both = overlaid(tmp_path, ORIGINAL, ours)
    both.pip("uninstall", "--yes", "tidepool")
    both.install(ORIGINAL)
    assert both.whose(*OURS, *THEIRS) == dict.fromkeys([*OURS, *THEIRS], "theirs")
    assert (both.bin / "mooncake_master").exists() and not (both.bin / "tidepool").exists()


def test_staying_when_the_original_goes_as_the_book_says(tmp_path, ours):
    both = overlaid(tmp_path, ORIGINAL, ours)
    name = "-".join(pathlib.Path(ORIGINAL).name.split("-")[0].split("_"))
    both.pip("uninstall", "--yes", name)
    # Tried without putting ours back: `mooncake_master` is gone.
    both.install(ours)
    assert both.whose(*OURS) == dict.fromkeys(OURS, "ours")
    assert both.version("mooncake_master").startswith("tidepool ")
