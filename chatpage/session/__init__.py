"""Conversations joined with the engine; `Session` is the door."""

from chatpage.session.limits import SessionLimits
from chatpage.session.session import Session, SessionCounts

__all__ = ["Session", "SessionCounts", "SessionLimits"]
