"""Models of the Hugging Face hub, through its own cache, so that a model fetched by another program is not fetched again.

Invariant: what is returned is a complete local folder; after that nothing of a model needs a network.
"""

from pathlib import Path

from chatpage.errors import ModelNotFoundError

_SETTINGS = ("*.json", "*.jinja", "*.model", "*.txt", "tokenizer*", "vocab*", "merges*")
_IGNORED = ("consolidated*", "original/*", "*/*")  # the same weights once more, in the format of their author


def fetch(name: str) -> Path:
    """Return the folder of a hub model, downloading what is not in the local cache.

    Without a network, or with HF_HUB_OFFLINE=1, only the local cache is asked.

    Raises:
        ModelNotFoundError: It is not there; the message says whether the hub could be asked.
    """
    from huggingface_hub import HfApi, constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        files = HfApi().model_info(name).siblings or []
    except HFValidationError as error:
        raise ModelNotFoundError(
            f"{name!r} is neither 'default', nor a folder, nor a file, and cannot be the id of a hub model."
        ) from error
    except RepositoryNotFoundError as error:
        raise ModelNotFoundError(
            f"There is no file {name!r}, and {constants.ENDPOINT} has no such model (or wants a login: `hf auth login`)."
        ) from error
    except Exception as error:  # noqa: BLE001 - its network library decides what is raised; the local cache may have it
        return _cached(name, error)
    has_safetensors = any(file.rfilename.endswith(".safetensors") for file in files)
    weights = "*.safetensors" if has_safetensors else "*.bin"
    try:
        return Path(snapshot_download(name, allow_patterns=[*_SETTINGS, weights], ignore_patterns=list(_IGNORED)))
    except Exception as error:
        raise ModelNotFoundError(f"{name} could not be downloaded from {constants.ENDPOINT} ({error}).") from error


def _cached(name: str, reason: Exception) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, local_files_only=True))
    except LocalEntryNotFoundError as error:
        state = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached ({reason})"
        raise ModelNotFoundError(
            f"{name!r} is no folder or file here, it is not in the local cache {constants.HF_HUB_CACHE}, and {state}. "
            "Name a model that is on this machine, or 'default'."
        ) from error
