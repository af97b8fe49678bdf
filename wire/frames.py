"""The outer frame: magic, type, length (W1, W6, section 2)."""

from __future__ import annotations

import struct
from enum import IntEnum

PROTOCOL_VERSION = 4
MAGIC = 0xD170C0DE
FRAME_HEADER = struct.Struct("<IBQ")
CHUNK_HEADER = struct.Struct("<QQQ")
FRAME_BYTES = FRAME_HEADER.size
CHUNK_BYTES = CHUNK_HEADER.size
SLICE_BYTES = 4_194_304
"""Inner-frame bytes carried by one CHUNK of ours (W24)."""
HELLO_LIMIT = 16_777_216
DATA_HELLO_BYTES = 16
ERROR_READ_LIMIT = 65_536
FINALIZATION_REVISION = 1


class MessageType(IntEnum):
    """Frame types (section 3)."""

    HELLO = 1
    INIT_PARAMS = 2
    PULL_REQ = 3
    PUSH_FRAGMENT = 4
    BCAST_FRAGMENT = 5
    HEARTBEAT = 6
    SHUTDOWN = 7
    DATA_HELLO = 8
    CHUNK = 9
    ERROR = 10
    FINAL_MANIFEST = 11
    FINAL_ACK = 12
    FINAL_FRAGMENT = 13
    BUDGET_DONE = 14


BULK_TYPES = frozenset(
    {
        MessageType.INIT_PARAMS,
        MessageType.PUSH_FRAGMENT,
        MessageType.BCAST_FRAGMENT,
        MessageType.FINAL_FRAGMENT,
    }
)
"""Types that are cut into CHUNKs over the data sockets (W10, W24)."""


class Role(IntEnum):
    """Which end of the wire reads: it decides what may arrive."""

    SYNCER = 0
    LEARNER = 1


READABLE: dict[Role, frozenset[MessageType]] = {
    Role.SYNCER: frozenset(
        {
            MessageType.INIT_PARAMS,
            MessageType.PUSH_FRAGMENT,
            MessageType.HEARTBEAT,
            MessageType.CHUNK,
            MessageType.FINAL_ACK,
            MessageType.BUDGET_DONE,
        }
    ),
    Role.LEARNER: frozenset(
        {
            MessageType.PULL_REQ,
            MessageType.BCAST_FRAGMENT,
            MessageType.SHUTDOWN,
            MessageType.CHUNK,
            MessageType.ERROR,
            MessageType.FINAL_MANIFEST,
            MessageType.FINAL_FRAGMENT,
        }
    ),
}
"""Types legal after the first frame, per reader (section 3 and 4)."""


def frame_header(kind: MessageType, length: int) -> bytes:
    """The 13 bytes before a payload of `length` bytes."""
    return FRAME_HEADER.pack(MAGIC, kind, length)
