"""What a person can do about an end that the syncer brought (L13): appended to its own words."""

from __future__ import annotations

from wire.errors import ErrorCode, ProtocolError, readable

_OF_REFUSALS: dict[str, str] = {
    ErrorCode.AUTH: "the key is what --auth-key-file or YETO_AUTH_KEY_FILE names",
    ErrorCode.SESSION_MISMATCH: (
        "all learners of a run need the same model, fragments, merge options, wire dtype and run "
        "id (their layout.json files show where two models differ)"
    ),
    ErrorCode.CHECKPOINT_MISMATCH: (
        "the syncer resumed a run of another model, partition or run id than this learner's"
    ),
    ErrorCode.LEARNER_ID: "give this learner another id, or the syncer a larger --learners",
    ErrorCode.PROFILE_MISMATCH: (
        "the syncer runs with other settings; compare with its --print-profile"
    ),
    ErrorCode.PROFILE_REQUIRED: "give this learner what the syncer's --print-profile prints",
    ErrorCode.SUPERSEDED: "another process joined with this learner's id; each needs its own",
}


_NO_KEY = "this syncer has no key"
_SEALED_FOR_NOTHING = "give the syncer the key too, or start this learner without one"
_MODEL, _CONTRACT, _DTYPE = "fingerprint ", "contract ", "dtype "
_OTHER_RUN = "the other learners have another run id (--run-id)"
_OTHER_DTYPE = "the other learners have another --wire-dtype"


def refusal(text: str) -> str:
    """One line for the text of an ERROR, `code: sentence`, with what to do about it if known."""
    said = readable(text)
    code, _, sentence = said.partition(":")
    if _NO_KEY in sentence:
        return f"{said}; {_SEALED_FOR_NOTHING}"
    if code == ErrorCode.SESSION_MISMATCH and _MODEL not in sentence:
        # The contract follows from fingerprint and run id, so the model is the same.
        if _CONTRACT in sentence:
            return f"{said}; {_OTHER_RUN}"
        if _DTYPE in sentence:
            return f"{said}; {_OTHER_DTYPE}"
    return f"{said}; {_OF_REFUSALS[code]}" if code in _OF_REFUSALS else said


def fault(problem: ProtocolError, *, heard: bool) -> str:
    """One line for what the other side did wrong; `heard`: it had sent a message before that."""
    said = f"the syncer broke the protocol: {problem}"
    if heard or problem.code is not ErrorCode.BAD_MAGIC:
        return said
    return f"{said}; is it a yeto-syncer that listens there, and does it expect TLS?"
