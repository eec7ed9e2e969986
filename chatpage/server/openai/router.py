"""All endpoints of this surface."""

from fastapi import APIRouter

from chatpage.server.openai import chat, completions, models, responses, tokenizing
from chatpage.server.openai.response_socket import serve_responses
from chatpage.server.views import Model


class ErrorBody(Model):
    """What is wrong, in the shape of OpenAI."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorAnswer(Model):
    """An error."""

    error: ErrorBody


router = APIRouter(
    responses={
        400: {"model": ErrorAnswer, "description": "A parameter is unknown, unsupported or wrong"},
        401: {"model": ErrorAnswer, "description": "No key, or one that is not known"},
        404: {"model": ErrorAnswer, "description": "No such model or response"},
        413: {"model": ErrorAnswer, "description": "The body is too large"},
        429: {"model": ErrorAnswer, "description": "Too much is going on; see Retry-After"},
        503: {"model": ErrorAnswer, "description": "The engine is being started again; see Retry-After"},
    }
)
router.add_api_websocket_route("/v1/responses", serve_responses)
for part in (models, chat, completions, responses, tokenizing):
    router.include_router(part.router)
