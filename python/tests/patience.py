"""How long tests wait, and calls that name no deadline: TIDEPOOL_TEST_PATIENCE times as long, for valgrind and slow machines."""

import os

import mooncake.store.deadlines
import mooncake.store.settings
import tidepool

FACTOR = float(os.environ.get("TIDEPOOL_TEST_PATIENCE", "1"))
#: For the scripts of tests that run in a process of their own.
PREAMBLE = f"import sys; sys.path.insert(0, {os.path.dirname(__file__)!r}); import patience; patience.widen()\n"


def widen() -> None:
    """Sets the deadlines that calls of this process have when they name none."""
    if FACTOR == 1:
        return
    defaults = tidepool.Store.__init__.__kwdefaults__
    for name in ("deadline", "connect_deadline"):
        defaults[name] *= FACTOR
    connect, widened = tidepool.AsyncStore.connect, {name: defaults[name] for name in ("deadline", "connect_deadline")}
    tidepool.AsyncStore.connect = staticmethod(lambda *masters, **options: connect(*masters, **{**widened, **options}))
    for module, names in (
        (mooncake.store.deadlines, ("LOOK_S", "PUT_S")),
        (mooncake.store.settings, ("DEADLINE_S", "CONNECT_DEADLINE_S")),
    ):
        for name in names:
            setattr(module, name, getattr(module, name) * FACTOR)
    mooncake.store.deadlines.BYTES_PER_S_MIN /= FACTOR
