"""uvicorn's websocket protocol, made able to get rid of a client that takes nothing.

Invariant: a socket that is closed by us is gone `CLOSE_S` later, whether or not the client reads what is still in its buffer.
"""

from typing import TYPE_CHECKING

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if TYPE_CHECKING:
    from uvicorn._types import ASGISendEvent

CLOSE_S = 5.0


class SocketProtocol(WebSocketsSansIOProtocol):
    """Closes past a full buffer: the close frame is queued behind it, and the connection is cut soon after."""

    async def send(self, message: "ASGISendEvent") -> None:
        """As an ASGI server's `send`; only closing does not wait for the client."""
        if message["type"] == "websocket.close" and self.handshake_complete:
            self.writable.set()
            self.loop.call_later(CLOSE_S, self.transport.abort)
        await super().send(message)
