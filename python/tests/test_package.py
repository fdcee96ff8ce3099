"""What the package promises as a package: its stub names what the module has, its documented snippets run."""

import ast
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tidepool
from tidepool import _native, errors

PACKAGE = Path(tidepool.__file__).parent
ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = ["README.md", "python/README.md", "docs/start/python.md"]


def stub_names(body) -> dict:
    names = {}
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names[node.name] = node
        elif isinstance(node, ast.AnnAssign):
            names[node.target.id] = node
    return names


def test_the_stub_is_the_module():
    stub = stub_names(ast.parse((PACKAGE / "_native.pyi").read_text()).body)
    shown = {name for name in vars(_native) if not name.startswith("__")} | {"__version__"}
    # Not for callers, and not there at run time.
    hidden = {"stop_at_exit"}
    dicts = {name for name in stub if name.endswith("Dict")} | {"Key", "Buffer", "Loop", "Item"}
    assert shown - hidden - set(stub) == set(), "not in the stub"
    assert set(stub) - dicts - shown == {"Key", "Buffer", "Loop", "Item"} - dicts, "only in the stub"
    for name in ("Client", "LocalNode", "Value", "Memory", "PutOptions", "PutResult", "ItemError"):
        named = {method for method in stub_names(stub[name].body) if not method.startswith("_")}
        real = {method for method in dir(getattr(_native, name)) if not method.startswith("_")}
        assert named == real, name


def test_every_public_name_is_documented():
    for name in tidepool.__all__:
        assert getattr(tidepool, name).__doc__, name
    for cls in (tidepool.Store, tidepool.AsyncStore):
        for name, member in vars(cls).items():
            if not name.startswith("_"):
                assert member.__doc__, f"{cls.__name__}.{name}"
    own = {name for name in vars(tidepool.Store) if not name.startswith("_")} - {"lend", "deadline"}
    other = {name for name in vars(tidepool.AsyncStore) if not name.startswith("_")} - {"connect"}
    assert own == other, "Store and AsyncStore have the same calls"


def test_store_and_its_twin_for_asyncio_take_the_same_arguments():
    calls = [name for name, member in vars(tidepool.Store).items() if inspect.isfunction(member) and not name.startswith("_")]
    assert len(calls) > 20
    for name in set(calls) - {"lend"}:
        of, of_twin = (inspect.signature(getattr(cls, name)).parameters for cls in (tidepool.Store, tidepool.AsyncStore))
        assert list(of.values()) == list(of_twin.values()), name


def test_every_class_of_errors_is_raised_for_its_names():
    by_name = {name: code for code, name, _, _ in tidepool.ERROR_CODES}
    assert len(by_name) == len(tidepool.ERROR_CODES)
    reference = (ROOT / "docs/reference/python.md").read_text()
    for cls, names in errors._CLASSES.items():
        assert issubclass(cls, tidepool.TidepoolError)
        row = f"| `{cls.__name__}` | {', '.join(f'`{name}`' for name in names)} |"
        assert row in reference, row
        assert all(name in by_name for name in names)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_snippets_run(document):
    snippets = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.S)
    assert snippets
    for snippet in snippets:
        done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, f"{snippet}\n{done.stderr}"
