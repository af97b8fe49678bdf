"""What can end a learner, each with the exit code of `yeto-learner` (cli.md section 5)."""

from __future__ import annotations


class LearnerError(Exception):
    """Base of everything the learner raises on purpose. The text is for a person to read.

    Attributes:
        exit_code: what `yeto-learner` exits with.
    """

    exit_code = 1


class ConfigError(LearnerError, ValueError):
    """A setting is out of range, or two settings contradict each other."""

    exit_code = 2


class LayoutError(LearnerError, ValueError):
    """The model has no usable trainables, or the partition cannot be built (L1, L3, L9)."""

    exit_code = 2


class StateMismatch(LearnerError):
    """The state directory belongs to another learner, model, run or dtype (L51)."""

    exit_code = 2


class ConnectTimeout(LearnerError):
    """The syncer could not be reached within `connect_timeout_s` (L11)."""


class SyncerRefused(LearnerError):
    """The syncer sent ERROR: fatal, never retried (L13, W40)."""


class ProtocolFault(LearnerError):
    """The syncer sent what the protocol forbids: fatal, never retried (L13, W40)."""


class TransportRefused(LearnerError):
    """TLS ended the connection for a reason that a redial cannot mend (S13)."""


class NonFiniteParameters(LearnerError):
    """A local value is NaN or infinite, or the wire dtype would make it so (L27)."""


class FinalizationTimeout(LearnerError):
    """The final cut, or the end of the session after it, did not come in time (L30)."""


class SyncTimeout(LearnerError):
    """Blocking mode: the merge of a boundary did not come in time."""


class BudgetFailed(LearnerError):
    """The budget run could not go on: lost report, or no progress (L40, L43)."""


class SafetyStop(LearnerError):
    """`max_local_steps` was reached before the final cut came."""


class Interrupted(LearnerError):
    """`request_stop` was called: state saved, group closed, the run goes on without us (L54)."""


class StateUnreadable(LearnerError):
    """There is saved state, and none of it verifies (L51)."""

    exit_code = 2
