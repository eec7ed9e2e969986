"""Programs that talk to a chatpage server: `Client`, and `AsyncClient` for asyncio."""

from chatpage.client.blocking import Client
from chatpage.client.client import AsyncClient
from chatpage.client.http import ServerError

__all__ = ["AsyncClient", "Client", "ServerError"]
