"""English filler text for prompts, made of stock sentences in an order that a seed decides.

Invariant: the same seed gives the same text, and different seeds part in their first words, so nothing is shared by accident.
"""

import random
from collections.abc import Iterator

_SUBJECTS = (
    "The harbour master",
    "A retired teacher",
    "The youngest gardener",
    "Our neighbour's cousin",
    "The night train",
    "An old fishing boat",
    "The village orchestra",
    "A patient carpenter",
    "The mountain guide",
    "The librarian of the small town",
    "A travelling painter",
    "The baker on the corner",
)
_VERBS = (
    "remembered",
    "repaired",
    "carried home",
    "described in a long letter",
    "sold for a fair price",
    "painted in three colours",
    "measured twice",
    "found under the stairs",
    "borrowed for the winter",
    "drew on the back of a map",
    "forgot at the station",
    "kept in a wooden box",
)
_OBJECTS = (
    "the brass lantern",
    "a basket of early apples",
    "the clock from the town hall",
    "two notebooks full of weather",
    "the key of the boat shed",
    "a violin without strings",
    "the plan of the new bridge",
    "seven letters tied with string",
    "a chair with a broken leg",
    "the first map of the valley",
    "a jar of dark honey",
    "the bell of the old school",
)
_ENDINGS = (
    "before the rain came in from the sea",
    "while the others were still asleep",
    "because nobody else had asked for it",
    "on the first cold morning of the year",
    "and told the whole story at dinner",
    "as if it had always been there",
    "when the river had fallen again",
    "without saying a word about it",
    "for the children of the next street",
    "after the lights had gone out",
)


def sentences(seed: str) -> Iterator[str]:
    """Yield sentences without end; the first names the seed."""
    choose = random.Random(seed)
    yield f"These are the notes of {seed}."
    while True:
        parts = (choose.choice(part) for part in (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS))
        yield " ".join(parts) + "."


def paragraph(seed: str, num_characters: int) -> str:
    """Return whole sentences of at least `num_characters` together."""
    chosen: list[str] = []
    length = 0
    for sentence in sentences(seed):
        chosen.append(sentence)
        length += len(sentence) + 1
        if length > num_characters:
            break
    return " ".join(chosen)
