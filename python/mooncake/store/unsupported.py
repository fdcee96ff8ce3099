"""Names that exist so that imports work, and say that Tidepool has no such thing when they are used."""


class _Absent:
    _what = ""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise NotImplementedError(f"{type(self).__name__}: Tidepool has no {self._what}")


class MooncakeDistributedNoFRegister(_Absent):
    """Registration of NVMe-oF targets."""

    _what = "NVMe-oF pool; lend memory with 'tidepool datanode'"


class EngramStoreConfig(_Absent):
    """Tables of an Engram store."""

    _what = "Engram tables; store them as objects"


class EngramStore(_Absent):
    """Embedding tables."""

    _what = "Engram tables; store them as objects"
