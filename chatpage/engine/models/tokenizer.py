"""Tokenizers, loaded from the files of a model.

Invariant: nothing is fetched and no code of a model is run.
"""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

from chatpage.errors import BrokenModelError

if TYPE_CHECKING:
    from transformers import AutoTokenizer, PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that lies in `folder`.

    Raises:
        BrokenModelError: There is none, or it cannot be read.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = _class_for(folder).from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise BrokenModelError(f"The tokenizer in {folder} cannot be read ({type(error).__name__}: {error}).") from error
    if not len(tokenizer):
        raise BrokenModelError(f"{folder} holds no tokenizer: a tokenizer.json (or the files of a slow one) is missing.")
    return tokenizer


def _class_for(folder: Path) -> "type[PreTrainedTokenizerBase] | type[AutoTokenizer]":
    """Return what loads the tokenizer: the class it names, if that is the one for any `tokenizer.json`, else what finds out.

    Finding out imports torch, which a process without a model has no other use for.
    """
    settings = folder / "tokenizer_config.json"
    if (folder / "tokenizer.json").is_file() and settings.is_file():
        with contextlib.suppress(OSError, ValueError, AttributeError):
            written = json.loads(settings.read_text())
            if written.get("tokenizer_class") == "TokenizersBackend" and "auto_map" not in written:
                from transformers import TokenizersBackend

                return TokenizersBackend
    from transformers import AutoTokenizer

    return AutoTokenizer


def eos_token_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the tokens that the tokenizer itself names as the end of an answer; often one, sometimes none."""
    token_id = tokenizer.eos_token_id
    return frozenset() if token_id is None else frozenset({int(token_id)})
