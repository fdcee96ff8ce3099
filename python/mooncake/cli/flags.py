"""Flags as Mooncake's programs take them: `--name=value`, `--name value`, `--name` and `--noname`, and a file of them."""

import json
from collections.abc import Mapping, Sequence


#: Flags that every program of Mooncake's has from its libraries. These print what there is to say of flags.
HELPS = frozenset({"help", "helpfull", "helpmatch", "helpon", "helppackage", "helpshort", "helpxml"})
#: These tune its log and its shell completion: one warning each, no effect.
OF_LIBRARIES = frozenset(
    {
        "alsologtoemail", "alsologtostderr", "colorlogtostderr", "drop_log_memory", "log_backtrace_at", "log_dir", "log_link",
        "log_prefix", "logbuflevel", "logbufsecs", "logemaillevel", "logfile_mode", "logmailer", "logtostderr", "max_log_size",
        "minloglevel", "mmap_arena_pool_size", "stderrthreshold", "stop_logging_if_full_disk", "symbolize_stacktrace",
        "tab_completion_columns", "tab_completion_word", "use_mmap_arena_allocator", "v", "vmodule",
    }
)  # fmt: skip
#: These change what the command line itself means, and are not followed.
REFUSED_OF_LIBRARIES = {
    "fromenv": (("",), "flags are not read from the environment; give them here"),
    "tryfromenv": (("",), "flags are not read from the environment; give them here"),
    "undefok": (("",), "flags that do not exist are an error always; take them out"),
}
#: Read where it stands, in place of itself.
FILE_OF_FLAGS = "flagfile"
FILES_OF_FLAGS_MAX = 16
BOOLEANS_OF_LIBRARIES = frozenset(
    {
        "help", "helpfull", "helppackage", "helpshort", "helpxml", "version", "alsologtostderr", "colorlogtostderr",
        "drop_log_memory", "log_prefix", "logtostderr", "stop_logging_if_full_disk", "symbolize_stacktrace",
        "use_mmap_arena_allocator",
    }
)  # fmt: skip
FALSE = ("false", "f", "0", "no", "n")


class FlagError(Exception):
    """A command line that cannot be followed. The message says what to do."""


def parse(arguments: Sequence[str], booleans: frozenset, names: frozenset) -> dict[str, str]:
    """Values by name, with `-` read as `_`. FlagError for what is not known."""
    told: dict[str, str] = {}
    left = list(arguments)
    files = 0
    while left:
        word = left.pop(0)
        if not word.startswith("-") or word.strip("-") == "":
            raise FlagError(f"'{word}' is no flag; give --name=value")
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if name.startswith("no") and name[2:] in booleans and not equals:
            name, equals, value = name[2:], "=", "false"
        if name not in names and name != FILE_OF_FLAGS:
            raise FlagError(f"--{name}: no such flag; --help lists them")
        if not equals:
            if name in booleans:
                value = left.pop(0) if left and left[0] in ("true", "false") else "true"
            elif left:
                value = left.pop(0)
            else:
                raise FlagError(f"--{name} takes a value")
        if name == FILE_OF_FLAGS:
            files += 1
            if files > FILES_OF_FLAGS_MAX:
                raise FlagError(f"--{name}={value}: more than {FILES_OF_FLAGS_MAX} files of flags; does one name itself?")
            left = _flags_of(value) + left
            continue
        told[name] = value
    return told


def _flags_of(path: str) -> list[str]:
    """The lines of a file of flags, less comments. FlagError when it cannot be read."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = [line.strip() for line in file]
    except (OSError, ValueError) as error:
        raise FlagError(f"--{FILE_OF_FLAGS}={path}: {error}") from error
    return [line for line in lines if line and not line.startswith("#")]


def refuse(told: Mapping[str, str], refused: Mapping[str, tuple[tuple[str, ...], str]]) -> None:
    """FlagError for a flag whose promise cannot be kept, unless it has one of its harmless values."""
    for name in sorted(told):
        if name in refused and told[name].strip().lower() not in refused[name][0]:
            raise FlagError(f"--{name}={told[name]}: {refused[name][1]}")


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
    if word in FALSE:
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
