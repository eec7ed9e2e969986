"""Conversations joined with the engine; `Session` is the door."""

from chatpage.session.limits import SessionLimits
from chatpage.session.session import Session, SessionStats

__all__ = ["Session", "SessionLimits", "SessionStats"]
