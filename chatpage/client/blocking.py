"""The same client for programs without asyncio.

Invariant: every method is one of `AsyncClient` with the same name, arguments, result and errors; it runs on an event loop in a
thread of the client's own, and whoever stops waiting (Ctrl-C, leaving a loop early) ends the work there too.
"""

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Iterator
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from chatpage.client.client import AsyncClient

P = ParamSpec("P")
T = TypeVar("T")


def _waiting(
    method: Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["Client", P], T]:
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._thread.wait(getattr(self._client, method.__name__)(*args, **kwargs))
        return result

    return _named(call, method)


def _iterating(
    method: Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]],
) -> Callable[Concatenate["Client", P], Iterator[T]]:
    def call(self: "Client", /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        return self._thread.iterate(getattr(self._client, method.__name__)(*args, **kwargs))

    return _named(call, method)


def _named(call: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    call.__name__, call.__doc__ = method.__name__, method.__doc__
    return call


class Client:
    """Runs, conversations, search, presets and files of a chatpage server.

    with Client("http://127.0.0.1:8642") as client:
        chat = client.create_conversation(title="Colours")
        request = RunRequest(conversation_id=chat.id, kind=RunKind.REPLY, input="Name a colour.", n=4)
        for message in client.run(request):
            ...

    Args:
        url: Of the server.
        key: API key, where the server needs one.
        patience_s: Seconds without any connection after which a call gives up.
    """

    def __init__(self, url: str, *, key: str | None = None, patience_s: float = 60.0) -> None:
        self._client = AsyncClient(url, key=key, patience_s=patience_s)
        self._thread = LoopThread("chatpage-client")

    @property
    def hint(self) -> str:
        """What a person should know about how answers are computed; empty where there is nothing to say."""
        return ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Closing twice is fine."""
        self._thread.close()

    run = _iterating(AsyncClient.run)
    follow = _iterating(AsyncClient.follow)
    follow_conversation = _iterating(AsyncClient.follow_conversation)
    cancel = _waiting(AsyncClient.cancel)
    plan = _waiting(AsyncClient.plan)
    welcome = _waiting(AsyncClient.welcome)

    create_conversation = _waiting(AsyncClient.create_conversation)
    list_conversations = _waiting(AsyncClient.list_conversations)
    tree = _waiting(AsyncClient.tree)
    update_conversation = _waiting(AsyncClient.update_conversation)
    delete_conversation = _waiting(AsyncClient.delete_conversation)
    restore_conversation = _waiting(AsyncClient.restore_conversation)
    fork_conversation = _waiting(AsyncClient.fork_conversation)

    add_message = _waiting(AsyncClient.add_message)
    edit = _waiting(AsyncClient.edit)
    edit_and_answer = _waiting(AsyncClient.edit_and_answer)
    select = _waiting(AsyncClient.select)
    delete_node = _waiting(AsyncClient.delete_node)
    restore_node = _waiting(AsyncClient.restore_node)
    tokens = _waiting(AsyncClient.tokens)

    search = _waiting(AsyncClient.search)
    list_tags = _waiting(AsyncClient.list_tags)
    list_presets = _waiting(AsyncClient.list_presets)
    create_preset = _waiting(AsyncClient.create_preset)
    update_preset = _waiting(AsyncClient.update_preset)
    delete_preset = _waiting(AsyncClient.delete_preset)
    kv = _waiting(AsyncClient.kv)
    conversation_kv = _waiting(AsyncClient.conversation_kv)
    export = _waiting(AsyncClient.export)
    import_file = _waiting(AsyncClient.import_file)


class LoopThread:
    """An event loop in a thread, for callers that wait."""

    def __init__(self, name: str) -> None:
        self._open: list[AsyncGenerator[Any, None]] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_closed(self) -> bool:
        return self._loop.is_closed()

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to its end and return its result; an interrupt cancels it."""
        if self._loop.is_closed():
            work.close()
            raise RuntimeError("the client is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
            raise

    def iterate(self, messages: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        """Yield what an asynchronous generator yields; leaving early closes it."""
        self._open.append(messages)
        try:
            while found := self.wait(_next(messages)):
                yield found[0]
        finally:
            self._open.remove(messages)
            if not self._loop.is_closed():  # else it was closed with the loop
                self.wait(_close(messages))

    def close(self) -> None:
        """Cancel what goes on and end the thread. Closing twice is fine."""
        if self._loop.is_closed():
            return
        asyncio.run_coroutine_threadsafe(_end_all(self._open), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _next(messages: AsyncGenerator[T, None]) -> tuple[T] | None:
    async for message in messages:
        return (message,)
    return None


async def _close(messages: AsyncGenerator[Any, None]) -> None:
    with contextlib.suppress(RuntimeError):  # its last step is just being cancelled, which closes it
        await messages.aclose()


async def _end_all(generators: Iterable[AsyncGenerator[Any, None]]) -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for messages in list(generators):  # from the outside in: each closes those inside it
        await _close(messages)
