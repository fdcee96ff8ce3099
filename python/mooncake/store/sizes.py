"""Sizes as Mooncake's configuration writes them: bytes, or a number with a unit of 1024 ("16MB", "3.5 GiB", "4g", "1e9")."""

import re

_UNITS = {"": 1, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_FORM = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:e\+?[0-9]{1,2})?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_size(value: object) -> int:
    """Bytes. ValueError when it is not a size, names the value."""
    if isinstance(value, bool) or value is None:
        raise ValueError(f"{value!r} is not a size; give bytes, or a number with KB, MB, GB or TB")
    if isinstance(value, (int, float)):
        return int(value)
    matched = _FORM.fullmatch(str(value))
    unit = matched.group(2).lower() if matched else "?"
    if len(unit) > 1:
        unit = unit[:-2] if unit.endswith("ib") else unit[:-1] if unit.endswith("b") else "?"
    if not matched or unit not in _UNITS:
        raise ValueError(f"{value!r} is not a size; give bytes, or a number with KB, MB, GB or TB")
    number = matched.group(1)
    return int(number) * _UNITS[unit] if number.isdigit() else int(float(number) * _UNITS[unit])


def parse_bool(value: object) -> bool:
    """A yes or no that may come as text. ValueError when it is neither."""
    if isinstance(value, (bool, int, float)):
        return bool(value)
    word = "" if value is None else str(value).strip().lower()
    if word in ("", "0", "false", "no", "off", "disable"):
        return False
    if word in ("1", "true", "yes", "on", "enable"):
        return True
    raise ValueError(f"{value!r} is neither yes nor no; give true or false")
