"""Settings that all tests share."""

from __future__ import annotations

from hypothesis import settings

# Loops are compiled on first use, and test machines are busy: time is no property of an example.
settings.register_profile("yeto", deadline=None)
settings.load_profile("yeto")
