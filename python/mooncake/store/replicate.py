"""`ReplicateConfig`: how an object is to be stored, and its translation into the native module's options."""

import operator
from collections.abc import Iterable
from typing import Any, Callable, Optional

from mooncake.store import codes
from mooncake.store.enums import ObjectDataType, SoftPinAction
from tidepool import _native

_UINT64_MAX = 2**64 - 1
#: Longest soft pin (Mooncake's `max_kv_soft_pin_ttl`).
SOFT_PIN_TTL_MS_MAX = 24 * 60 * 60 * 1000


class ConfigRefused(Exception):
    """A configuration that no put can be made with; `code` is what the call answers."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def _number(name: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if not 0 <= number <= _UINT64_MAX:
        raise TypeError(f"ReplicateConfig.{name} takes an int from 0 to 2**64-1, not {value!r}")
    return int(number)


def _bool(name: str, value: object) -> bool:
    # What has a truth of its own, as numbers have; a text is a mistake.
    if value is None or hasattr(type(value), "__bool__"):
        return bool(value)
    raise TypeError(f"ReplicateConfig.{name} takes a bool, not {value!r}")


def _one_text(name: str, value: object) -> str:
    try:
        text = value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        text = None
    if not isinstance(text, str):
        raise TypeError(f"ReplicateConfig.{name} takes a str, not {value!r}")
    return text


def _texts(name: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"ReplicateConfig.{name} takes a list of str, not {value!r}")
    return tuple(_one_text(name, text) for text in value)


def _typed(name: str, kind: type, value: object) -> object:
    if not isinstance(value, kind):
        raise TypeError(f"ReplicateConfig.{name} takes {kind.__name__}, not {value!r}")
    return value


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "replica_num": _number,
    "nof_replica_num": _number,
    "dfs_replica_num": _number,
    "soft_pin_action": lambda name, value: _typed(name, SoftPinAction, value),
    "soft_pin_ttl_ms": lambda name, value: None if value is None else _number(name, value),
    "with_hard_pin": _bool,
    "preferred_segments": _texts,
    "preferred_nof_segments": _texts,
    "preferred_segment": _one_text,
    "prefer_alloc_in_same_node": _bool,
    "data_type": lambda name, value: _typed(name, ObjectDataType, value),
    "group_ids": lambda name, value: None if value is None else _texts(name, value),
}
_LISTS = ("preferred_segments", "preferred_nof_segments", "group_ids")


class ReplicateConfig:
    """How objects are stored. Attributes are checked when they are set (TypeError); lists are copied both ways, as in Mooncake.

    Attributes that we do not know may be set, and mean nothing: engines set what their version of Mooncake has.
    """

    replica_num: int
    nof_replica_num: int
    dfs_replica_num: int
    soft_pin_action: SoftPinAction
    soft_pin_ttl_ms: Optional[int]
    with_hard_pin: bool
    preferred_segments: list[str]
    preferred_nof_segments: list[str]
    preferred_segment: str
    prefer_alloc_in_same_node: bool
    data_type: ObjectDataType
    group_ids: Optional[list[str]]

    def __init__(self) -> None:
        self._options: dict[bool, _native.PutOptions] = {}
        self._fields: dict[str, Any] = {
            "replica_num": 1,
            "nof_replica_num": 0,
            "dfs_replica_num": 0,
            "soft_pin_action": SoftPinAction.PRESERVE,
            "soft_pin_ttl_ms": None,
            "with_hard_pin": False,
            "preferred_segments": (),
            "preferred_nof_segments": (),
            "preferred_segment": "",
            "prefer_alloc_in_same_node": False,
            "data_type": ObjectDataType.UNKNOWN,
            "group_ids": None,
        }

    @property
    def with_soft_pin(self) -> bool:
        """The boolean that `soft_pin_action` replaced; older engines set it."""
        return self._fields["soft_pin_action"] is SoftPinAction.ENABLE

    @with_soft_pin.setter
    def with_soft_pin(self, on: bool) -> None:
        self.soft_pin_action = SoftPinAction.ENABLE if on else SoftPinAction.PRESERVE

    def __str__(self) -> str:
        fields = self._fields
        ttl = fields["soft_pin_ttl_ms"]
        groups = fields["group_ids"]
        shown = [
            f"replica_num: {fields['replica_num']}",
            f"nof_replica_num: {fields['nof_replica_num']}",
            f"dfs_replica_num: {fields['dfs_replica_num']}",
            f"soft_pin_action: {fields['soft_pin_action'].name}",
            f"soft_pin_ttl_ms: {'default' if ttl is None else ttl}",
            f"with_hard_pin: {int(fields['with_hard_pin'])}",
            f"preferred_segments: [{', '.join(fields['preferred_segments'])}]",
            f"preferred_nof_segments: [{', '.join(fields['preferred_nof_segments'])}]",
            f"prefer_alloc_in_same_node: {int(fields['prefer_alloc_in_same_node'])}",
            f"data_type: {fields['data_type'].name}",
        ]
        if groups is not None:
            shown.append(f"group_ids: [{', '.join(groups)}]")
        return "ReplicateConfig: { " + ", ".join(shown) + " }"

    def __copy__(self) -> "ReplicateConfig":
        copy = ReplicateConfig()
        copy._fields = dict(self._fields)
        return copy

    def __deepcopy__(self, memo: dict) -> "ReplicateConfig":
        return self.__copy__()

    def __reduce__(self):
        return (_rebuilt, (dict(self._fields),))


def _rebuilt(fields: dict) -> ReplicateConfig:
    config = ReplicateConfig()
    config._fields.update(fields)
    return config


def _attribute(name: str) -> property:
    check = _CHECKS[name]

    def read(config: ReplicateConfig):
        value = config._fields[name]
        return list(value) if name in _LISTS and value is not None else value

    def write(config: ReplicateConfig, value: object) -> None:
        config._fields[name] = check(name, value)
        config._options.clear()

    return property(read, write)


for _name in _CHECKS:
    setattr(ReplicateConfig, _name, _attribute(_name))


def _checked(config: ReplicateConfig) -> None:
    fields = config._fields
    if fields["dfs_replica_num"]:
        raise ConfigRefused(codes.DFS_SERVICE_UNAVAILABLE, "dfs_replica_num: Tidepool has no DFS tier; set it to 0")
    if fields["nof_replica_num"]:
        raise ConfigRefused(codes.INVALID_PARAMS, "nof_replica_num: Tidepool has no NVMe-oF pool; set it to 0")
    if fields["replica_num"] == 0:
        raise ConfigRefused(codes.INVALID_PARAMS, "replica_num is 0; ask for at least one copy")
    ttl = fields["soft_pin_ttl_ms"]
    if ttl is not None and (fields["soft_pin_action"] is not SoftPinAction.ENABLE or ttl > SOFT_PIN_TTL_MS_MAX):
        raise ConfigRefused(
            codes.INVALID_PARAMS,
            f"soft_pin_ttl_ms is {ttl}; it takes SoftPinAction.ENABLE, and at most {SOFT_PIN_TTL_MS_MAX} ms",
        )


def _build(config: ReplicateConfig, upsert: bool) -> _native.PutOptions:
    _checked(config)
    fields = config._fields
    ttl = fields["soft_pin_ttl_ms"]
    preferred = (fields["preferred_segment"],) if fields["preferred_segment"] else fields["preferred_segments"]
    try:
        return _native.PutOptions(
            replicas=fields["replica_num"],
            upsert=upsert,
            data_type=fields["data_type"].name.lower(),
            soft_pin=fields["soft_pin_action"].name.lower(),
            soft_pin_ttl=None if ttl is None else ttl / 1000,
            hard_pin=fields["with_hard_pin"],
            preferred_segments=list(preferred),
            prefer_own_host=fields["prefer_alloc_in_same_node"],
        )
    except (ValueError, OverflowError) as error:
        raise ConfigRefused(codes.INVALID_PARAMS, str(error)) from error


_DEFAULTS = {upsert: _build(ReplicateConfig(), upsert) for upsert in (False, True)}


def put_options(config: Optional[ReplicateConfig], upsert: bool = False) -> _native.PutOptions:
    """The native options that say the same. ConfigRefused when no put can be made with them."""
    if config is None:
        return _DEFAULTS[upsert]
    if not isinstance(config, ReplicateConfig):
        raise TypeError(f"config takes a ReplicateConfig, not {config!r}")
    made = config._options.get(upsert)
    if made is None:
        made = config._options[upsert] = _build(config, upsert)
    return made


def group_names(config: Optional[ReplicateConfig], count: int) -> Optional[tuple[str, ...]]:
    """One group name a key, or None. ConfigRefused when there are not as many as keys."""
    groups = None if config is None else config._fields["group_ids"]
    if groups is not None and len(groups) != count:
        raise ConfigRefused(codes.INVALID_PARAMS, f"group_ids has {len(groups)} names for {count} keys; give one a key")
    return groups
