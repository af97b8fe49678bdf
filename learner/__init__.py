"""The training side: partition, session core, network client, training-loop API."""

from learner.config import LearnerConfig
from learner.errors import LearnerError
from learner.events import Counters, Event, Result, StepInfo
from learner.loop import Learner
from learner.parameters import find_trainables

__all__ = [
    "Counters",
    "Event",
    "Learner",
    "LearnerConfig",
    "LearnerError",
    "Result",
    "StepInfo",
    "find_trainables",
]
