"""`/chat` for `gradio_client` and Gradio's API page: one message, its answer as it grows.

Invariant: it is the same conversation that the page shows; a client that goes away stops nothing, as everywhere.
"""

import contextlib
from collections.abc import AsyncGenerator
from html import escape

import gradio as gr
from gradio.events import api

from chatpage.errors import ChatpageError
from chatpage.server.protocol import RunDelta, RunDone, RunSnapshot
from chatpage.server.security import Auth
from chatpage.server.views import RunParams, RunRequest
from chatpage.session import Session
from chatpage.store import ConversationId, RunId, RunKind


def add_chat_api(session: Session, auth: Auth) -> None:
    """Offer `/chat`, here and in Gradio's list of its interfaces."""

    async def chat(
        message: str,
        conversation_id: str = "",
        temperature: float = 1.0,
        max_tokens: int = 1024,
        request: gr.Request | None = None,
    ) -> AsyncGenerator[tuple[str, str], None]:
        """Send a message and stream the answer.

        Args:
            message: What you say.
            conversation_id: Which conversation goes on; empty begins one.
            temperature: 0 takes the most likely token.
            max_tokens: Most tokens of the answer.

        Returns:
            The answer so far, and the id of the conversation.
        """
        assert request is not None
        assert request.request is not None
        user = (await auth.require_user(request.request)).id
        try:
            if conversation_id:
                path = await session.store.get_path.aio(user, ConversationId(conversation_id))
                where, parent_id = ConversationId(conversation_id), path[-1].id if path else None
            else:
                where, parent_id = (await session.create_conversation(user)).id, None
            params = RunParams(temperature=temperature, max_tokens=int(max_tokens))
            run = await session.create_run(
                user,
                RunRequest(conversation_id=where, parent_id=parent_id, kind=RunKind.REPLY, input=message, params=params),
            )
            text = ""
            async with contextlib.aclosing(session.follow(user, RunId(run.run_id))) as news:
                async for item in news:
                    if isinstance(item, RunSnapshot):
                        text = item.samples[0].text
                    elif isinstance(item, RunDelta):
                        text += "".join(entry[1] for entry in item.d)
                    elif isinstance(item, RunDone) and item.error is not None:
                        raise gr.Error(escape(item.error.message))
                    yield text, where
        except (ChatpageError, ValueError) as error:
            raise gr.Error(escape(str(error))) from error

    api(chat, api_name="chat")
