"""Numbers that calls answer with. They are Mooncake's; each Tidepool error knows its own (`tidepool explain -704`).

vLLM takes some numbers of a call with addresses for "nothing is under way any more", and gives up a worker and its buffers for any
other. When one of our calls returns nothing is under way, whatever it says, so it says it in those numbers.
"""

OK = 0
INTERNAL_ERROR = -1
SEGMENT_NOT_FOUND = -101
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
INVALID_REPLICA = -702
OBJECT_NOT_FOUND = -704
OBJECT_ALREADY_EXISTS = -705
LEASE_EXPIRED = -707
REPLICA_ALREADY_EXISTS = -711
RPC_FAIL = -900
RPC_TIMEOUT = -901
TASK_NOT_FOUND = -1400
BUSY = -1401
DFS_SERVICE_UNAVAILABLE = -1601

#: Nobody could be asked: what the answer would have been is not known.
NOT_ANSWERED = frozenset({RPC_FAIL, RPC_TIMEOUT, -1010, -1011})

_MASTERS_BUSY_OR_GONE = dict.fromkeys((-1011, -1010, -103, -300), RPC_FAIL)
#: For gets: no copy could be used (its bytes did not arrive, or are not the right ones), or the masters could not serve.
OF_GETS = {**_MASTERS_BUSY_OR_GONE, **dict.fromkeys((-800, -801, -101, -700), INVALID_REPLICA), BUSY: RPC_FAIL}
#: For puts: pressure of any kind is -200, on which engines store less for a while. A source that changed stays -801.
OF_PUTS = {**_MASTERS_BUSY_OR_GONE, **dict.fromkeys((-800, -101, -700, -702), RPC_FAIL), BUSY: NO_AVAILABLE_HANDLE}


def settled(results: list[int], numbers: dict[int, int]) -> list[int]:
    """The results in numbers that engines know."""
    if not results or min(results) >= 0:
        return results
    return [numbers.get(each, each) for each in results]
