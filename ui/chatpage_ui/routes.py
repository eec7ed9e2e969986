"""What the canvas asks of the server beside `/ws` and `/api`: text rendered as blocks of HTML, and the colours of code.

Invariant: rendering never runs on the event loop, and at most `NUM_THREADS` texts are rendered at a time, whoever asks.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Self

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from starlette.responses import Response

from chatpage_ui.rendering import Block, RenderCache, code_css

MAX_ITEMS = 64
MAX_CHARS = 400_000  # of a request
NUM_THREADS = 2
CSS_PATH = "/canvas/code.css"


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class RenderItem(_Body):
    """A text to render.

    Args:
        id: Whatever the page calls it.
        text: Markdown.
        open: Whether it is still being written.
        in_reasoning: Whether its prompt ended with `<think>`.
    """

    id: Annotated[str, StringConstraints(max_length=200)]
    text: str
    open: bool = False
    in_reasoning: bool = False


class RenderBody(_Body):
    """Texts to render."""

    items: Annotated[tuple[RenderItem, ...], Field(max_length=MAX_ITEMS, strict=False)]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        num_chars = sum(len(item.text) for item in self.items)
        if num_chars > MAX_CHARS:
            raise ValueError(f"the texts have {num_chars} characters together; at most {MAX_CHARS} are rendered at once")
        return self


class BlockView(_Body):
    """A block: `text.slice(start, end)` is where it comes from; a settled one never changes while its text grows."""

    start: int
    end: int
    html: str
    settled: bool


class RenderedItem(_Body):
    """The blocks of a text; between them there are only blank lines and reference definitions."""

    id: str
    blocks: tuple[BlockView, ...]


class RenderResult(_Body):
    """One result for each item, in their order."""

    items: tuple[RenderedItem, ...]


def router(user: Callable[..., Any], *, cache: RenderCache | None = None) -> APIRouter:
    """Return the routes below `/canvas`.

    Args:
        user: The dependency that says whose request it is, or refuses it.
        cache: What was rendered before.
    """
    routes = APIRouter(prefix="/canvas", tags=["page"])
    kept = cache or RenderCache()
    threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="chatpage-render")

    @routes.post("/render", dependencies=[Depends(user)])
    async def render(body: RenderBody) -> RenderResult:
        """Render texts as blocks of HTML, which is safe to put into a page."""
        loop = asyncio.get_running_loop()
        items = [await loop.run_in_executor(threads, _render, kept, item) for item in body.items]
        return RenderResult(items=tuple(items))

    @routes.get("/code.css", response_class=Response)
    async def stylesheet() -> Response:
        """Return the colours of code."""
        return Response(code_css(), media_type="text/css", headers={"Cache-Control": "max-age=3600"})

    return routes


def _render(cache: RenderCache, item: RenderItem) -> RenderedItem:
    blocks = cache.render(item.text, is_open=item.open, in_reasoning=item.in_reasoning)
    return RenderedItem(id=item.id, blocks=tuple(map(_view, blocks)))


def _view(block: Block) -> BlockView:
    return BlockView(start=block.start, end=block.end, html=block.html, settled=block.is_settled)
