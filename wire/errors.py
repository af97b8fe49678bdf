"""One error family for "the peer broke the protocol", another for "we are wrong"."""

from __future__ import annotations

from enum import StrEnum

MAX_ERROR_TEXT = 1024
"""Bytes of UTF-8 we send in an ERROR frame (W41)."""


class ErrorCode(StrEnum):
    """The first word of an ERROR text (W12, W17, W41)."""

    AUTH = "auth"
    VERSION = "version"
    LEARNER_ID = "learner-id"
    GENERATION = "generation"
    DTYPE = "dtype"
    LAYOUT = "layout"
    HELLO_TAIL = "hello-tail"
    NUM_STREAMS = "num-streams"
    PROFILE_MISMATCH = "profile-mismatch"
    PROFILE_REQUIRED = "profile-required"
    FRAGMENT_COUNT = "fragment-count"
    CHECKPOINT_MISMATCH = "checkpoint-mismatch"
    SESSION_MISMATCH = "session-mismatch"
    DUPLICATE_GENERATION = "duplicate-generation"
    UNKNOWN_GROUP = "unknown-group"
    STREAM_INDEX = "stream-index"
    BAD_MAGIC = "bad-magic"
    BAD_TYPE = "bad-type"
    TOO_LONG = "too-long"
    BAD_LENGTH = "bad-length"
    CHUNK = "chunk"
    PARTIAL_LIMIT = "partial-limit"
    BAD_FRAGMENT = "bad-fragment"
    IDENTITY = "identity"
    ATTEMPT = "attempt"
    INIT_FORBIDDEN = "init-forbidden"
    NON_FINITE = "non-finite"
    BUDGET_OFF = "budget-off"
    OUT_OF_MEMORY = "out-of-memory"
    SUPERSEDED = "superseded"
    OVERFLOW = "overflow"
    FINAL_TIMEOUT = "final-timeout"
    STOPPED = "stopped"
    REVISION = "revision"


class ProtocolError(Exception):
    """The peer broke a rule of the protocol. Its text is safe to send in an ERROR frame.

    Attributes:
        code: the ERROR code of W41.
        sentence: what was wrong, for a person to read.
    """

    def __init__(self, code: ErrorCode, sentence: str) -> None:
        super().__init__(f"{code}: {sentence}")
        self.code = code
        self.sentence = sentence

    @property
    def text(self) -> str:
        """`<code>: <sentence>`, at most 1,024 bytes of UTF-8 (W41)."""
        return clip_utf8(f"{self.code}: {self.sentence}", MAX_ERROR_TEXT)


class LocalError(Exception):
    """This side tried something that the protocol or its own configuration forbids."""


def one_line(text: str) -> str:
    """Control characters, line ends, direction marks and lone surrogates as escapes."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def readable(text: str) -> str:
    """A text of the other side for a person: one line, at most 1,024 characters of it."""
    return one_line(text[:MAX_ERROR_TEXT])


def clip_utf8(text: str, limit: int) -> str:
    """Cut `text` to at most `limit` bytes of UTF-8, at a code-point boundary (W41)."""
    raw = text.encode("utf-8", "replace")
    if len(raw) <= limit:
        return raw.decode("utf-8")
    return raw[:limit].decode("utf-8", "ignore")
