"""An engine that writes known words at an exact pace, so that what stands around it is measured and not the model.

Every sample writes one word per step, from a place of its own in the same round of words: paragraphs, a list, a table and code,
or a single paragraph without an end, which is the worst a page can be given.
"""

import time
from typing import Any

from chatpage.events import Event, FinishReason, RequestFinished, RequestId, SampleFinished, TokenDelta, Usage
from tests.engine.scripted_engine import ScriptedEngine
from tests.tiny_models import tiny_tokenizer

TOKEN_ID = 5  # any will do: nobody reads these tokens again
SENTENCE = (
    "The harbour lay quiet while the boats of the north came home with nets full of silver and **nobody** spoke a `word` . "
)
PROSE = (
    f"{SENTENCE * 3}\n\n{SENTENCE * 2}\n\n- {SENTENCE}\n- {SENTENCE}\n\n| a | b |\n| --- | --- |\n"
    + "| one | two |\n" * 6
    + "\n```python\n"
    + "def add ( a , b ) :\n    return a + b\n\n" * 6
    + f"```\n\n{SENTENCE}\n\n"
)
TEXTS = {"prose": PROSE, "endless": SENTENCE.replace("*", "").replace("`", "")}


class PacedEngine(ScriptedEngine):
    """Steps come `rate` times a second; one that came late is made up for.

    Args:
        text: A name in `TEXTS`.
    """

    def __init__(self, rate: float, text: str) -> None:
        super().__init__(step_s=0.0)
        self.tokenizer = tiny_tokenizer()
        self.words = [word + " " if not word.endswith("\n") else word for word in _words(TEXTS[text])]
        self._interval = 1 / rate
        self._due = time.monotonic()
        self._counts: dict[tuple[RequestId, int], int] = {}

    def text_of(self, sample: int, num_tokens: int) -> str:
        """Return what a sample has written after so many tokens."""
        return "".join(self._word(sample, i) for i in range(num_tokens))

    def step(self) -> list[Event]:
        now = time.monotonic()
        self._due = max(self._due + self._interval, now - 0.5)
        time.sleep(max(0.0, self._due - now))
        for request_id, (_, params, texts) in list(self._running.items()):
            for sample in list(texts):
                at = self._counts.get((request_id, sample), 0)
                self._counts[request_id, sample] = at + 1
                texts[sample] += self._word(sample, at)
                self._events.append(TokenDelta(request_id, sample, self._word(sample, at), (TOKEN_ID,)))
                if at + 1 == params.max_tokens:
                    self._finish(request_id, sample, FinishReason.LENGTH)
            if not texts:
                num_prompt_tokens, _, _ = self._running.pop(request_id)
                self._events.append(RequestFinished(request_id, Usage(num_prompt_tokens, 0, num_prompt_tokens, 0)))
        events, self._events = self._events, []
        return events

    def check_integrity(self) -> None:
        """Keep no blocks, so there is nothing that could be wrong."""

    def memory(self) -> Any:
        return self.stats().memory

    def _word(self, sample: int, at: int) -> str:
        return self.words[(at + 7 * sample) % len(self.words)]

    def _finish(self, request_id: RequestId, sample: int, reason: FinishReason) -> None:
        text = self._running[request_id][2].pop(sample)
        count = self._counts.pop((request_id, sample), 0)
        rate = 1 / self._interval
        self._events.append(SampleFinished(request_id, sample, reason, text, (TOKEN_ID,) * count, 0.0, 0.001, rate))


def _words(text: str) -> list[str]:
    """Cut at spaces and after newlines; the indent of code belongs to its first word."""
    words = []
    for line in text.splitlines(keepends=True):
        indent = line[: len(line) - len(line.lstrip(" "))]
        parts = line.strip(" ").split(" ")
        words += [indent + parts[0], *parts[1:]]
    return [word for word in words if word]
