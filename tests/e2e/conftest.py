"""End-to-end tests of nanotf's promises."""

from __future__ import annotations

from real_workers import *  # noqa: F403 - fixtures and hooks
from real_workers import _iterators_end_at_once, _keras_as_new  # noqa: F401
