"""The one exception tree of chatpage.

Invariant: every mistake a user can make raises a subclass of `ChatpageError` whose message says what is wrong (with the
numbers), why, and what to do about it. `assert` is kept for our own invariants; a `ChatpageError` never means a bug of ours.
Each class carries a stable `code` for machines: the wire protocols send it as it stands.
"""

from typing import ClassVar


class ChatpageError(Exception):
    """Base of every error a user of chatpage can meet."""

    code: ClassVar[str] = "error"


class InvalidRequestError(ChatpageError, ValueError):
    """A request that can never be served as it stands: a parameter or an input is wrong."""

    code = "invalid_request"


class InvalidParameterError(InvalidRequestError):
    """A sampling or engine parameter is outside its range, or does not fit the others."""

    code = "invalid_parameter"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room in the context of the model, or in the KV cache."""

    code = "context_length_exceeded"


class UnknownRequestError(InvalidRequestError, LookupError):
    """A request or sample that the engine does not know, or has forgotten."""

    code = "unknown_request"


class ConfigError(ChatpageError, ValueError):
    """A setting is unknown, unreadable, or impossible on this machine."""

    code = "invalid_config"


class ModelError(ChatpageError):
    """The model cannot be used."""

    code = "model_error"


class ModelNotFoundError(ModelError, LookupError):
    """Neither a folder, nor a file, nor a model in the local cache or on a reachable hub."""

    code = "model_not_found"


class ModelDownloadError(ModelError):
    """The default model could not be fetched, or what arrived is damaged."""

    code = "model_download_failed"


class BrokenModelError(ModelError):
    """The files of the model are damaged or incomplete."""

    code = "model_broken"


class UnsupportedModelError(ModelError):
    """The architecture cannot be served by paged attention; the message names it and the reason."""

    code = "model_unsupported"


class EngineDeadError(ChatpageError):
    """The thread that owns the engine has ended; nothing more can be computed."""

    code = "engine_dead"


class EngineStepError(ChatpageError):
    """A step failed; the requests of that step have ended, the engine goes on."""

    code = "engine_step_failed"


class StoreError(ChatpageError):
    """The conversation store could not do what was asked of it."""

    code = "store_error"


class StoreReadOnlyError(StoreError):
    """The database, or the folder it lies in, cannot be written."""

    code = "store_read_only"


class StoreFullError(StoreError):
    """The disk that holds the database is full; nothing of the failed change was written."""

    code = "store_full"


class StoreBusyError(StoreError):
    """Another process held the database for too long."""

    code = "store_busy"


class StoreDamagedError(StoreError):
    """The file is not a chatpage database, is damaged, or was made by a newer version."""

    code = "store_damaged"


class NotFoundError(StoreError, LookupError):
    """No such thing, or not one of this user: the two look alike on purpose."""

    code = "not_found"


class ConflictError(StoreError):
    """A change was based on an old version of the conversation, or on a state that has passed.

    Args:
        message: What clashed, and what to do.
        version: The conversation's version now; None if the clash is not about a version.
    """

    code = "conflict"

    def __init__(self, message: str, version: int | None = None) -> None:
        super().__init__(message)
        self.version = version


class ImportFileError(InvalidRequestError):
    """A file cannot be imported at all; what is wrong with single items stands in the import's report instead."""

    code = "import_file"


class OverloadedError(ChatpageError):
    """Too much is waiting; the same request can succeed later.

    Args:
        message: What there is too much of, and what to do.
        retry_after_s: Seconds after which it can.
    """

    code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RestartingError(ChatpageError):
    """The server is ending, most likely to be started again; the same request can succeed when it is back."""

    code = "restarting"

    def __init__(self, message: str = "The server is restarting; send the request again in a moment.") -> None:
        super().__init__(message)
