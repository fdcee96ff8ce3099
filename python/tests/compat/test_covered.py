"""The table in README.md: what it names exists, and no method is left without a test that calls it."""

import ast
import pathlib
import re

import pytest

from compat import api
from compat.test_api import ENGINES

HERE = pathlib.Path(__file__).resolve().parent
TEXT = (HERE / "README.md").read_text(encoding="utf-8")
#: They compare names and throw garbage at every method: neither says what a call does.
SAY_NOTHING = {"test_api", "test_bad_input", "test_covered"}


def trees():
    return {path.stem: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("test_*.py"))}


def named():
    """(file, test) of every test that the tables name."""
    names = re.findall(r"`(?:(test_\w+)::)?(test_\w+)`", "\n".join(line for line in TEXT.splitlines() if line.startswith("|")))
    return [(file or "test_objects", test) for file, test in names]


def test_every_test_in_the_table_exists():
    there = {
        (file, node.name)
        for file, tree in trees().items()
        for node in tree.body
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert len(named()) > 80
    assert [each for each in named() if each not in there] == []


def test_every_method_is_called_by_a_test():
    called = set()
    for file, tree in trees().items():
        if file in SAY_NOTHING:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                called.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                called.add(node.value)  # the methods of a parametrized test
    assert sorted({"setup", *api.METHODS} - called) == []


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_every_method_of_an_engine_is_in_the_table(engine):
    table = TEXT.partition("## What engines call")[2].partition("\n## ")[0]
    assert [name for name in ENGINES[engine].split() if f"`{name}`" not in table] == []
