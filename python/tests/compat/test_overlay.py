"""Beside an installed original: `mooncake.store` is ours, what we do not have stays the original's, no file is shared."""

import pathlib
import shutil
import subprocess
import sys

import pytest

import mooncake
import mooncake.store

OURS = pathlib.Path(mooncake.store.__file__).resolve().parents[1]
#: The original's modules that ours stand before, and one that only it has.
THEIRS = ["store", "async_store", "buffer_pool", "mooncake_config", "cli", "cli_client", "mooncake_store_service"]


@pytest.fixture
def site(tmp_path):
    """A site directory with a stand-in of the original."""
    package = tmp_path / "site" / "mooncake"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("WHOSE = 'theirs'\n")
    for name in [*THEIRS, "engine", "ep"]:
        (package / f"{name}.py").write_text("WHOSE = 'theirs'\n")
    return package


def overlaid(package):
    """Ours installed over it, as pip does: file by file."""
    shutil.copytree(OURS, package, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


def whose(site, name):
    """Which installation a module comes from, and that it is the one in the site directory."""
    script = f"import {name} as module; print(getattr(module, 'WHOSE', 'ours'), module.__file__)"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site.parent)!r})\n{script}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    found, _, file = run.stdout.strip().partition(" ")
    assert file.startswith(str(site))
    return found


def test_no_file_but_the_package_itself_is_shared(site):
    before = {path.name for path in site.iterdir()}
    ours = {path.name for path in OURS.iterdir() if path.name != "__pycache__"}
    assert before & ours == {"__init__.py"}
    assert {name.removesuffix(".py") for name in before} & ours == set(THEIRS)


def test_ours_go_first_and_the_rest_stays(site):
    overlaid(site)
    for name in THEIRS[:-1]:
        assert whose(site, f"mooncake.{name}") == "ours"
    for name in ("engine", "ep"):
        assert whose(site, f"mooncake.{name}") == "theirs"


def test_the_original_installed_after_ours_changes_nothing_that_matters(site):
    overlaid(site)
    (site / "__init__.py").write_text("WHOSE = 'theirs'\n")
    (site / "store.py").write_text("WHOSE = 'theirs'\n")
    assert whose(site, "mooncake.store") == "ours"
    assert whose(site, "mooncake.engine") == "theirs"


def test_a_package_that_is_spread_over_two_directories(site):
    """Ours in one directory of the path, the original in a later one."""
    path = [str(OURS.parent), str(site.parent)]
    script = "import mooncake.store, mooncake.engine; print(hasattr(mooncake.store, 'codes'), mooncake.engine.WHOSE)"
    run = subprocess.run([sys.executable, "-c", f"import sys; sys.path[:0] = {path!r}\n{script}"], capture_output=True, text=True)
    assert run.stdout.split() == ["True", "theirs"], run.stderr


def test_the_package_does_not_load_the_native_module_for_a_sibling(site):
    overlaid(site)
    script = "import mooncake.engine, sys; print('tidepool._native' in sys.modules)"
    run = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(site.parent)!r})\n{script}"], capture_output=True, text=True
    )
    assert run.stdout.strip() == "False", run.stderr
