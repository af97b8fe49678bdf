"""What a person can do about an end that the syncer brought (L13): appended to its own words."""

from __future__ import annotations

from wire.errors import ErrorCode, ProtocolError, readable

_OF_REFUSALS: dict[str, str] = {
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


def refusal(text: str) -> str:
    """One line for the text of an ERROR, `code: sentence`, with what to do about it if known."""
    said = readable(text)
    code = said.partition(":")[0]
    return f"{said}; {_OF_REFUSALS[code]}" if code in _OF_REFUSALS else said


def fault(problem: ProtocolError, *, heard: bool) -> str:
    """One line for what the other side did wrong; `heard`: it had sent a message before that."""
    said = f"the syncer broke the protocol: {problem}"
    if heard or problem.code is not ErrorCode.BAD_MAGIC:
        return said
    return f"{said}; is it a yeto-syncer that listens there, and does it expect TLS?"
