"""Flags as Mooncake's programs take them: `--name=value`, `--name value`, `--name` and `--noname`, and a file of them."""

import json
from collections.abc import Mapping, Sequence


class FlagError(Exception):
    """A command line that cannot be followed. The message says what to do."""


def parse(arguments: Sequence[str], booleans: frozenset, names: frozenset) -> dict[str, str]:
    """Values by name, with `-` read as `_`. FlagError for what is not known."""
    told: dict[str, str] = {}
    left = list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word.strip("-") == "":
            raise FlagError(f"'{word}' is no flag; give --name=value")
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name.startswith("no") and name[2:] in booleans and not equals:
            name, equals, value = name[2:], "=", "false"
        if name not in names:
            raise FlagError(f"--{name}: no such flag; --help lists them")
        if not equals:
            if name in booleans:
                value = left.pop(0) if left and left[0] in ("true", "false") else "true"
            elif left:
                value = left.pop(0)
            else:
                raise FlagError(f"--{name} takes a value")
        told[name] = value
    return told


def with_file(told: dict[str, str], names: frozenset) -> dict[str, str]:
    """The flags, and what the file of `--config_path` says of others. JSON, or lines of `name: value`."""
    path = told.get("config_path")
    if not path:
        return told
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise FlagError(f"--config_path={path}: {error}") from error
    read: Mapping[str, object]
    if text.lstrip().startswith("{"):
        try:
            read = json.loads(text)
        except ValueError as error:
            raise FlagError(f"--config_path={path}: {error}") from error
    else:
        read = _lines(path, text)
    named = {"client_live_ttl_sec": "client_ttl"}
    merged = {named.get(name, name): _text(value) for name, value in read.items()}
    for name in merged:
        if name not in names:
            raise FlagError(f"--config_path={path}: '{name}' is no flag")
    return {**merged, **told}


def _lines(path: str, text: str) -> dict[str, object]:
    read: dict[str, object] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#", 1)[0].strip()
        if not line or line == "---":
            continue
        name, colon, value = line.partition(":")
        if not colon:
            raise FlagError(f"--config_path={path}: line {number} is not 'name: value'")
        read[name.strip()] = value.strip().strip("\"'")
    return read


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def is_true(name: str, value: str) -> bool:
    """FlagError for what is neither yes nor no."""
    word = value.strip().lower()
    if word in ("true", "t", "1", "yes", "y"):
        return True
    if word in ("false", "f", "0", "no", "n"):
        return False
    raise FlagError(f"--{name}={value}: give true or false")


def number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise FlagError(f"--{name}={value}: give a number") from None


def seconds(name: str, value: str) -> str:
    """A time in seconds, as `tidepool` writes it."""
    return f"{int(number(name, value) * 1000)}ms"
