"""The application: everything that is served on the one port, put together.

Invariant: `app.state.session` and `app.state.auth` are all that an endpoint needs; nothing here owns engine or store.
"""

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse

from chatpage import __version__
from chatpage.server import files, login, metrics, rest, tokens
from chatpage.server.asyncapi import asyncapi_yaml
from chatpage.server.draining import Drain, DrainEnds
from chatpage.server.logs import RunLogger
from chatpage.server.metrics import Metrics
from chatpage.server.openai import router as openai
from chatpage.server.openai.replies import ReplyMemory
from chatpage.server.passwords import Passwords
from chatpage.server.problems import handle_errors
from chatpage.server.revoking import Revoker
from chatpage.server.security import SOCKET_PATH, Auth, BodyLimit, LoginGate, OriginGuard
from chatpage.server.settings import ServeSettings
from chatpage.server.watch import RequestWatch
from chatpage.server.websocket import serve_socket
from chatpage.session import Session

MAX_BODY_BYTES = 8 * 2**20


def create_app(session: Session, settings: ServeSettings) -> FastAPI:
    """Make the application of a session.

    Args:
        session: Open; whoever made it closes it after the server has ended.
        settings: Where it will listen decides who needs a key.
    """
    app = FastAPI(title="chatpage", version=__version__, docs_url=None, redoc_url=None)
    app.state.session = session
    app.state.auth = Auth(session.store, needs_key=settings.needs_users, secure_cookies=settings.secure_cookies)
    app.state.passwords = Passwords(session.store)
    app.state.metrics = Metrics(session)
    app.state.replies = ReplyMemory()
    app.state.drain = Drain(session)
    app.state.revoker = Revoker(app.state.auth)
    session.watchers += [app.state.metrics, RunLogger(with_text=settings.logs.with_text)]
    app.add_middleware(DrainEnds, drain=app.state.drain)
    app.add_middleware(LoginGate, auth=app.state.auth)
    app.add_middleware(BodyLimit, max_bytes=MAX_BODY_BYTES, unlimited=frozenset({files.IMPORT_PATH}))
    if settings.allowed_origins:
        app.add_middleware(CORSMiddleware, allow_origins=settings.allowed_origins, allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(OriginGuard, settings=settings)
    app.add_middleware(RequestWatch, metrics=app.state.metrics)  # the last one added is the first to see a request
    handle_errors(app)
    app.add_api_websocket_route(SOCKET_PATH, serve_socket)
    app.include_router(rest.router)
    app.include_router(tokens.router)
    app.include_router(files.router)
    app.include_router(openai.router)
    app.include_router(login.router)
    app.include_router(metrics.router)
    for methods in (["GET"], ["HEAD"]):
        is_described = methods == ["GET"]
        app.add_api_route("/health", _health, methods=methods, include_in_schema=is_described)
        app.add_api_route("/ready", _ready, response_model=None, methods=methods, include_in_schema=is_described)
    app.add_api_route("/asyncapi.yaml", _asyncapi, response_class=Response)
    return app


async def _health(request: Request) -> dict[str, str]:
    """The process is up; whether it computes and saves too stands beside it: 200 all the same, since both are tried again."""
    session: Session = request.app.state.session
    state = _state_of(request)
    saving = "waits" if session.counts().num_unsaved_runs else "ok"
    is_well = state == "ready" and saving == "ok"
    return {"status": "ok" if is_well else "degraded", "engine": state, "saving": saving}


async def _ready(request: Request) -> JSONResponse:
    """The engine computes; 503 while it is started again, and while the server ends."""
    drain: Drain = request.app.state.drain
    state = "restarting" if drain.has_begun else _state_of(request)
    return JSONResponse({"status": state}, 200 if state == "ready" else 503)


def _state_of(request: Request) -> str:
    session: Session = request.app.state.session
    return "ready" if session.engine.is_alive else "starting"


async def _asyncapi() -> Response:
    """The websocket protocol, for machines."""
    return Response(asyncapi_yaml(), media_type="application/yaml")
