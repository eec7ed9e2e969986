"""Tokenizers, loaded from the files of a model.

Invariant: nothing is fetched and no code of a model is run.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from chatpage.errors import BrokenModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(folder: Path) -> "PreTrainedTokenizerBase":
    """Load the tokenizer that lies in `folder`.

    Raises:
        BrokenModelError: There is none, or it cannot be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise BrokenModelError(f"The tokenizer in {folder} cannot be read ({type(error).__name__}: {error}).") from error
    if not len(tokenizer):
        raise BrokenModelError(f"{folder} holds no tokenizer: a tokenizer.json (or the files of a slow one) is missing.")
    return tokenizer


def eos_token_ids(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Return the tokens that the tokenizer itself names as the end of an answer; often one, sometimes none."""
    token_id = tokenizer.eos_token_id
    return frozenset() if token_id is None else frozenset({int(token_id)})
