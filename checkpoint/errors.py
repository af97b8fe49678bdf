"""Why a checkpoint is refused: the words of K19, and the refusals at start of K8 and K9."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """One word for each way a file or a start is refused."""

    # K19: what is wrong with a file.
    MAGIC = "magic"
    TRUNCATED = "truncated"
    LEGACY_V1 = "legacy-v1"
    BACKEND_ID = "backend-id"
    BACKEND_MISMATCH = "backend-mismatch"
    TRAILER = "trailer"
    FINGERPRINT_MISMATCH = "fingerprint-mismatch"
    FRAGMENT_MISMATCH = "fragment-mismatch"
    LEGACY_GROUPED = "legacy-grouped"
    CONTRACT_MISSING = "contract-missing"
    CONTRACT_MISMATCH = "contract-mismatch"
    VERSIONS = "versions"
    LEDGER = "ledger"
    INTEGRITY = "integrity"
    NON_FINITE = "non-finite"
    STEP_AFTER_TOTAL = "step-after-total"

    # K8, K9 and the tools: what is wrong around it.
    DIRECTORY = "directory"
    LOCKED = "locked"
    PRESENT = "checkpoint-present"
    MISSING = "checkpoint-missing"
    NOT_A_FILE = "not-a-file"
    PREVIOUS_ONLY = "previous-only"
    LEFTOVER = "leftover"
    UNREADABLE = "unreadable"
    UNMARKED = "unmarked"
    LAYOUT = "layout"
    OUTPUT = "output"


class CheckpointRefused(Exception):
    """A file, or a start, that the rules refuse; nothing on disk was changed.

    Attributes:
        word: the reason, one word.
        message: what is wrong, and where there is one the way out, for a person to read.
    """

    def __init__(self, word: Reason, message: str) -> None:
        super().__init__(f"{word}: {message}")
        self.word = word
        self.message = message
