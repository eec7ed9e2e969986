"""`/v1/models`: the one model that answers."""

import time

from fastapi import APIRouter

from chatpage.server.openai.access import NEEDS_USER, check_model
from chatpage.server.rest import Chats
from chatpage.server.views import Model
from chatpage.session import Session

router = APIRouter(tags=["openai"])
_STARTED_AT = int(time.time())


class ModelCard(Model):
    """A model; `max_model_len` as vLLM has it: tokens of prompt and answer together."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "chatpage"
    max_model_len: int


class ModelList(Model):
    """All models."""

    object: str = "list"
    data: tuple[ModelCard, ...]


@router.get("/v1/models", dependencies=NEEDS_USER)
async def list_models(*, session: Chats) -> ModelList:
    """List the models."""
    return ModelList(data=(_card(session),))


@router.get("/v1/models/{model:path}", dependencies=NEEDS_USER)
async def get_model(*, session: Chats, model: str) -> ModelCard:
    """Return one model."""
    check_model(session, model)
    return _card(session)


def _card(session: Session) -> ModelCard:
    info = session.engine.info
    return ModelCard(id=info.model, created=_STARTED_AT, max_model_len=info.max_model_len)
