"""Programs that talk to a chatpage server over `chatpage.v1`."""

from chatpage.client.client import AsyncClient, ServerError

__all__ = ["AsyncClient", "ServerError"]
