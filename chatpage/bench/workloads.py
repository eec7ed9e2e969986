"""The workloads W1 to W8 and STEP, as exact token ids.

Invariant: every runner gets the same ids, and each repetition gets ids that share nothing with the ones before, so "cold" is
cold everywhere.

    W1 decode, one stream: 300 in, 128 out          W4 8 samples of a 1,500-token prompt, 64 out each (cold, warm)
    W2 prefill: 1,500 tokens, cold                   W5 8 chats on one 1,000-token system prompt, 64 out (cold, warm)
    W3 next turn: 1,500 cached + 28 new, first token W6 regenerate one reply at 1,500 tokens: first token, tokens computed
    W7 fork a 4,000-token conversation: bytes copied, microseconds      W8 restart, then continue at 4,000 tokens: first token
    STEP a decode step of 1, 2, 4, 8 and 16 rows that share 1,500 tokens
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from chatpage.bench.text import paragraph
from chatpage.errors import InvalidParameterError
from chatpage.prompt import Message, render_prompt

TITLES = {
    "W1": "decode, one stream",
    "W2": "prefill, cold",
    "W3": "next turn, first token",
    "W4": "8 samples of one prompt",
    "W5": "8 chats on one system prompt",
    "W6": "regenerate, first token",
    "W7": "fork a long conversation",
    "W8": "restart, then continue a long conversation",
    "STEP": "decode step, shared prompt",
}
NUM_SAMPLES = 8
_QUESTIONS = (
    "Explain how a bicycle stays upright while it is moving forward along a flat road.",
    "Write a short story about a lighthouse keeper who finds a bottle with a map.",
    "Give me a recipe for a simple vegetable soup with beans and fresh herbs.",
    "What are the main differences between a comet, an asteroid and a meteor?",
    "Describe how to plan a weekend trip to the mountains with two small children.",
    "Summarise the history of the printing press and its effect on education in Europe.",
    "How does a refrigerator move heat from the inside to the outside of its box?",
    "Suggest five ways to make a small living room feel larger and brighter today.",
)
_SECOND_QUESTIONS = (
    "Tell me how bread dough rises and why the temperature of the kitchen matters.",
    "Compose a short poem about the first snow of winter on a quiet harbour.",
    "Which stretches should I do in the morning before I go out for a long run?",
    "How do bees decide where to build a new hive when the old one is full?",
    "Help me write a polite note to a neighbour about loud music late at night.",
    "Explain the water cycle to a ten year old child in a few simple sentences.",
    "What should I look for when I buy a second hand guitar for a beginner?",
    "List the most important steps for repairing a puncture in a bicycle inner tube.",
)
_CHARACTERS_PER_TOKEN = 8  # more than any tokenizer packs, so that a text is always long enough to be cut


@dataclass(frozen=True, slots=True)
class Material:
    """The prompts of one repetition of a workload; what a workload does not need is empty."""

    prompt: list[int]
    turn: list[int] = field(default_factory=list)
    chats: list[list[int]] = field(default_factory=list)
    second_chats: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Lengths in tokens."""

    decode_in: int = 300
    decode_out: int = 128
    prompt: int = 1500
    next_turn: int = 28
    system: int = 1000
    question: int = 25
    sample_out: int = 64
    fork: int = 4000
    step_out: int = 33

    def scaled(self, share: float) -> "Sizes":
        """Shorten the long ones; a turn and a question stay what they are."""
        long = {"decode_in", "decode_out", "prompt", "system", "sample_out", "fork"}
        lengths = {name: getattr(self, name) for name in Sizes.__dataclass_fields__}
        return Sizes(**{name: max(4, int(n * share)) if name in long else n for name, n in lengths.items()})


def parse_names(text: str) -> tuple[str, ...]:
    """Read "W1,W4" in the order of the workloads.

    Raises:
        InvalidParameterError: A name is unknown.
    """
    wanted = {name.strip().upper() for name in text.split(",") if name.strip()}
    if unknown := sorted(wanted - TITLES.keys()):
        raise InvalidParameterError(f"There is no workload {', '.join(unknown)}; known are {', '.join(TITLES)}.")
    if not wanted:
        raise InvalidParameterError(f"--workloads names none; known are {', '.join(TITLES)}.")
    return tuple(name for name in TITLES if name in wanted)


class Prompts:
    """Makes prompts of exact lengths for one tokenizer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def material(self, name: str, seed: str, sizes: Sizes) -> Material:
        """The prompts of workload `name`, new for every seed."""
        if name == "W1":
            return Material(self.chat(seed, sizes.decode_in))
        if name == "W5":
            system = self.system(seed, sizes.system)
            chats, second = (self.questions(system, sizes.question, is_second=is_second) for is_second in (False, True))
            return Material(system, chats=chats, second_chats=second)
        prompt = self.chat(seed, sizes.fork if name in ("W7", "W8") else sizes.prompt)
        turn = self.turn("And what came after that?", sizes.next_turn) if name in ("W3", "W8") else []
        return Material(prompt, turn)

    def chat(self, seed: str, num_tokens: int) -> list[int]:
        """A prompt of a long user message that ends where a reply begins, `num_tokens` long.

        The text in the middle is cut; what the template writes behind it stays whole.
        """
        texts = (paragraph(seed, num_tokens * _CHARACTERS_PER_TOKEN), paragraph(seed + "!", 10))
        long, short = (self._render([Message("user", text)]) for text in texts)
        return _cut(long, _common_suffix(long, short), num_tokens)

    def turn(self, question: str, num_tokens: int) -> list[int]:
        """The last `num_tokens` of a prompt that asks `question`: what a next turn adds."""
        filler = paragraph("a turn", num_tokens * _CHARACTERS_PER_TOKEN)
        return self._render([Message("user", f"{filler} {question}")])[-num_tokens:]

    def system(self, seed: str, num_tokens: int) -> list[int]:
        """The first `num_tokens` of a chat with a long system prompt."""
        text = paragraph(seed, num_tokens * _CHARACTERS_PER_TOKEN)
        return self._render([Message("system", text), Message("user", "Hello.")])[:num_tokens]

    def questions(self, system_ids: Sequence[int], num_tokens: int, *, is_second: bool = False) -> list[list[int]]:
        """Eight chats that go on from the same system prompt, each `num_tokens` longer."""
        return [[*system_ids, *self.turn(text, num_tokens)] for text in (_SECOND_QUESTIONS if is_second else _QUESTIONS)]

    def _render(self, messages: list[Message]) -> list[int]:
        return list(render_prompt(self._tokenizer, messages).token_ids)


def _common_suffix(a: Sequence[int], b: Sequence[int]) -> int:
    length = 0
    while length < min(len(a), len(b)) and a[-1 - length] == b[-1 - length]:
        length += 1
    return length


def _cut(token_ids: list[int], num_tail: int, num_tokens: int) -> list[int]:
    """Take tokens out of the middle, before the last `num_tail`, until `num_tokens` are left."""
    num_tail = min(num_tail, num_tokens - 1)
    assert len(token_ids) >= num_tokens, "the filler text is too short"
    return token_ids[: num_tokens - num_tail] + token_ids[len(token_ids) - num_tail :]
