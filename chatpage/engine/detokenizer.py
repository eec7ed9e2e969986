"""Token ids to text, a token at a time.

Invariant: the texts handed out, joined, are `text`, and what has been handed out never changes. A character is handed out
whole, a stop string never, not even its beginning; what could still become either is held back until it is decided.

    bytes of tokens:   Hi | E2 82 | AC 20 | #| ## | ok          stop = "###"
    handed out:        Hi |       | €     |  |    -> stopped; "#", held back twice, was the stop string
                                                     (without the third #: "##ok" would follow at once)
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Self

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # what tokenizers decode incomplete or invalid bytes to
_MAX_INCOMPLETE = 3  # bytes of a UTF-8 character that is not complete, so at most so many replacement characters
_CONTEXT = 8  # tokens that are decoded with the new one, so that spaces between words come out right
_MAX_WINDOW = 4 * _CONTEXT


@lru_cache(maxsize=16)
def special_token_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens that are no text: end of turn, padding and their like."""
    added = (token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset({*tokenizer.all_special_ids, *added})


@lru_cache(maxsize=16)
def byte_fallback_tokens(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, int]:
    """Return the tokens of sentencepiece models that stand for one byte each (`<0xE2>`), with that byte; mostly none."""
    vocab = tokenizer.get_vocab()
    names = {f"<0x{byte:02X}>": byte for byte in range(256)}
    if not names.keys() <= vocab.keys() or tokenizer.decode([vocab["<0x41>"]]) != "A":
        return {}  # a vocabulary may hold such names as mere text
    return {vocab[name]: byte for name, byte in names.items()}


class Detokenizer:
    """The text of one sequence.

    Args:
        tokenizer: Any tokenizer of transformers.
        prompt_token_ids: The prompt, or its end. Only what follows its last special token is context: a reply after a header
            starts as a text of its own, while a reply that is continued keeps the space between its words.
        stop: Strings that end the text and are cut from it.
        min_tokens: Stop strings that end before this many tokens exist are part of the text.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt_token_ids: Sequence[int] = (),
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
    ) -> None:
        self.num_tokens = 0
        self.stop_match: str | None = None
        self._tokenizer = tokenizer
        self._special = special_token_ids(tokenizer)
        self._matcher = _StopMatcher(stop) if stop else None
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._byte_tokens = byte_fallback_tokens(tokenizer)
        self._anchor = next((token_id for token_id, byte in self._byte_tokens.items() if byte == ord("A")), -1)
        self._bytes = b""  # byte tokens that are no complete character yet
        # The window: recent tokens, and how much of their text was handed out (or belongs to the prompt).
        self._window: list[int] = []
        self._done = ""
        self._num_done = 0  # tokens of the window whose text was handed out in full
        self._not_ours = ""
        self._enter(self._context_of(prompt_token_ids))

    @property
    def text(self) -> str:
        """Everything handed out so far."""
        return "".join(self._parts)

    def append(self, token_ids: Iterable[int]) -> tuple[str, str | None]:
        """Take new tokens; return the text that became certain, and the stop string that ended it.

        After a match nothing more may be appended: the rest of `token_ids` was not looked at, and `num_tokens` tells how
        many were.
        """
        assert self.stop_match is None, "appended after a stop string"
        delta = ""
        for token_id in token_ids:
            delta += self._append(token_id)
            if self.stop_match is not None:
                break
        self._parts.append(delta)
        return delta, self.stop_match

    def finish(self) -> str:
        """Return what is still held back; nothing follows. Empty after a stop string."""
        if self.stop_match is not None:
            return ""
        rest = self._take(self._decode(self._window)[len(self._done) :]) + self._end_bytes()
        delta = self._find_stop(rest)
        self._restart([])
        if self._matcher is not None and self.stop_match is None:
            delta += self._matcher.take_held()
        self._parts.append(delta)
        return delta

    def fork(self) -> Self:
        """Return a copy that goes its own way from here."""
        other = type(self).__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._parts = list(self._parts)
        other._window = list(self._window)
        other._matcher = None if self._matcher is None else self._matcher.copy()
        return other

    def _enter(self, prompt_token_ids: list[int]) -> None:
        """Start after the end of a prompt, which may lie within a character."""
        num_bytes = 0
        while num_bytes < len(prompt_token_ids) and prompt_token_ids[-1 - num_bytes] in self._byte_tokens:
            num_bytes += 1
        if num_bytes:
            for token_id in prompt_token_ids[-num_bytes:]:
                self._decode_byte(token_id)
            return
        self._window = prompt_token_ids
        prompt_text = self._decode(self._window)
        self._done = _without_incomplete(prompt_text)
        self._not_ours = prompt_text[len(self._done) :]  # real replacement characters, unless the reply completes them
        self._num_done = len(self._window)

    def _append(self, token_id: int) -> str:
        self.num_tokens += 1
        if token_id in self._special:
            return ""
        if token_id in self._byte_tokens:
            return self._find_stop(self._take(self._decode_byte(token_id)))
        delta = self._end_bytes() + self._decode_in_window(token_id)
        return self._find_stop(self._take(delta))

    def _decode_in_window(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        if not text.startswith(self._done):
            # A decoder that tidies up changed what was handed out: that stays, and the tokens since then start anew.
            self._cut_loose(num_new=1)
            text = self._decode(self._window)
        certain = _without_incomplete(text)
        delta = certain[len(self._done) :]
        if delta:
            self._done = certain
        if certain == text:
            self._num_done = len(self._window)
        if len(self._window) >= _MAX_WINDOW:
            self._trim(text)
        return delta

    def _decode_byte(self, token_id: int) -> str:
        """Decode a byte token apart from the tokenizer, whose decoder shows a run of them as broken until it is complete."""
        data = self._bytes + bytes([self._byte_tokens[token_id]])
        text, num_read = utf_8_decode(data, "replace", False)
        self._bytes = data[num_read:]
        # A letter stands for the run, so that a word after it keeps its space.
        self._restart([self._anchor], done="A", num_done=1)
        return text

    def _end_bytes(self) -> str:
        text, self._bytes = self._bytes.decode(errors="replace"), b""
        return text

    def _take(self, delta: str) -> str:
        """Drop the replacement characters that the prompt ended with, if they turn out to have been real."""
        if delta and self._not_ours:
            delta = delta.removeprefix(self._not_ours)
            self._not_ours = ""
        return delta

    def _find_stop(self, delta: str) -> str:
        if self._matcher is None:
            return delta
        text, self.stop_match = self._matcher.feed(delta, is_held_off=self.num_tokens < self._min_tokens)
        return text

    def _trim(self, text: str) -> None:
        """Forget old tokens: keep a tail that decodes to the tail of the text, and starts with text already handed out."""
        for start in range(len(self._window) - _CONTEXT, 0, -1):
            tail = self._decode(self._window[start:])
            dropped = len(text) - len(tail)
            if text.endswith(tail) and dropped <= len(self._done):
                self._window = self._window[start:]
                self._done = self._done[dropped:]
                self._num_done = max(0, self._num_done - start)
                return
        self._cut_loose(num_new=0)  # a decoder that makes something else of every tail; the cost per token stays constant

    def _cut_loose(self, *, num_new: int) -> None:
        """Start a text of its own after the tokens that were handed out in full; the last `num_new` were not looked at yet."""
        rest = self._window[self._num_done :]
        self._restart(rest, done=_without_incomplete(self._decode(rest[: len(rest) - num_new])))

    def _restart(self, window: list[int], *, done: str = "", num_done: int = 0) -> None:
        self._window = window
        self._done = done
        self._num_done = num_done

    def _context_of(self, token_ids: Sequence[int]) -> list[int]:
        context: list[int] = []
        for token_id in reversed(token_ids[-_CONTEXT:]):
            if token_id in self._special:
                break
            context.append(token_id)
        return context[::-1]

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _without_incomplete(text: str) -> str:
    """Cut the replacement characters at the end that the next bytes may turn into a character."""
    end = len(text)
    while end > max(0, len(text) - _MAX_INCOMPLETE) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


class _StopMatcher:
    """Finds the first stop string to be completed, character by character (Knuth-Morris-Pratt), over any cut into deltas.

    `_matched[i]` is how much of stop string i the text so far ends with; the longest of these is held back.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._borders = [_borders(stop) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""

    def feed(self, delta: str, *, is_held_off: bool) -> tuple[str, str | None]:
        """Return the text that is certain, and the stop string that ended it. Held off, a complete one is mere text."""
        buffer = self._held + delta
        for position in range(len(self._held), len(buffer)):
            found = self._step(buffer[position])
            if found is not None and not is_held_off:
                self._held = ""
                return buffer[: position + 1 - len(found)], found
        num_held = max(self._matched)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held], None

    def take_held(self) -> str:
        held, self._held = self._held, ""
        return held

    def copy(self) -> "_StopMatcher":
        other = _StopMatcher.__new__(_StopMatcher)
        other._stops, other._borders, other._held = self._stops, self._borders, self._held
        other._matched = list(self._matched)
        return other

    def _step(self, character: str) -> str | None:
        """Advance by one character; return the longest stop string that it completes."""
        found: str | None = None
        for i, (stop, borders) in enumerate(zip(self._stops, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                matched = borders[matched - 1]
            self._matched[i] = matched
        return found


def _borders(stop: str) -> list[int]:
    """Return for each prefix of `stop` the length of its longest proper prefix that is also its end."""
    borders = [0] * len(stop)
    matched = 0
    for i in range(1, len(stop)):
        while matched and stop[i] != stop[matched]:
            matched = borders[matched - 1]
        matched += stop[i] == stop[matched]
        borders[i] = matched
    return borders
