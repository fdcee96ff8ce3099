"""Numbers that calls answer with. They are Mooncake's; each Tidepool error knows its own (`tidepool explain -704`)."""

OK = 0
INTERNAL_ERROR = -1
SEGMENT_NOT_FOUND = -101
NO_AVAILABLE_HANDLE = -200
INVALID_PARAMS = -600
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
