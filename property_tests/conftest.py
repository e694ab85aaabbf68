"""Settings of the property tests."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("fzero", deadline=None, max_examples=60)  # a first call may compile or allocate: no deadline
settings.load_profile("fzero")
