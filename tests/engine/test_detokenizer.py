"""Detokenizer: the text of a sequence is handed out piece by piece, and never taken back."""

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatpage.engine.detokenizer import Detokenizer
from tests.tokenizer_zoo import TEXT, byte_level, rewriting, sentencepiece_like

TOKENIZERS = {"byte level": byte_level, "sentencepiece-like": sentencepiece_like}
texts = st.text(st.one_of(st.sampled_from(sorted(set(TEXT))), st.characters(exclude_categories=["Cs"])), max_size=60)


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request: pytest.FixtureRequest) -> Any:
    return TOKENIZERS[request.param]()


def ids_of(tokenizer: Any, text: str) -> list[int]:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert isinstance(ids, list)
    return ids


def feed(detokenizer: Detokenizer, token_ids: Iterable[int]) -> list[str]:
    """Append one token at a time, finish, and return the deltas."""
    deltas = []
    for token_id in token_ids:
        delta, match = detokenizer.append([token_id])
        deltas.append(delta)
        if match is not None:
            break
    return [*deltas, detokenizer.finish()]


def byte_ids(tokenizer: Any, data: bytes) -> list[int]:
    """One token per byte, cutting every character that can be cut."""
    if tokenizer is sentencepiece_like():
        return [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [tokenizer.convert_tokens_to_ids(bytes_to_unicode()[byte]) for byte in data]


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(text=texts)
@example(text=TEXT)
@example(text="\ufffd")
@example(text="\ufffd" * 20 + "a")
@example(text=" two  spaces ")
@settings(deadline=None)
def test_deltas_join_to_the_text_whatever_it_is(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]()
    ids = ids_of(tokenizer, text)
    detokenizer = Detokenizer(tokenizer)
    deltas = feed(detokenizer, ids)
    assert "".join(deltas) == detokenizer.text == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, len(byte_level()) - 1), max_size=80))
@settings(deadline=None)
def test_random_tokens_of_a_byte_level_model_read_as_if_decoded_at_once(ids: list[int]) -> None:
    """A young or hot model writes bytes that are no text; the stream must still end up as the plain decoding."""
    tokenizer = byte_level()
    assert "".join(feed(Detokenizer(tokenizer), ids)) == tokenizer.decode(ids, skip_special_tokens=True)


@given(data=st.binary(max_size=40), words=st.lists(st.sampled_from(["Hello", "fox", "you are"]), max_size=4))
@example(data=b"\xef\xbf\xbd" * 5, words=["you are"])
@settings(deadline=None)
def test_byte_tokens_read_as_the_bytes_they_are(data: bytes, words: list[str]) -> None:
    """Between words as well as alone, valid or not; each broken sequence is one replacement character."""
    tokenizer = sentencepiece_like()
    ids: list[int] = []
    expected = ""
    for word in words:
        ids += [*ids_of(tokenizer, word), *byte_ids(tokenizer, data)]
        expected += (" " if expected else "") + word + data.decode(errors="replace")
    assert "".join(feed(Detokenizer(tokenizer), ids)) == expected


@pytest.mark.parametrize("text", ["😀", "你好", "👨‍👩‍👧", "a€b"])
def test_a_character_cut_into_bytes_comes_whole(tokenizer: Any, text: str) -> None:
    """Streams that decoded token by token showed two question marks in place of each emoji."""
    detokenizer = Detokenizer(tokenizer)
    deltas = feed(detokenizer, byte_ids(tokenizer, text.encode()))
    assert "".join(deltas) == text
    assert [delta for delta in deltas if delta] == list(text)
    assert deltas[-1] == ""  # nothing waited for the end


def test_half_a_character_is_shown_as_broken_at_the_end_only(tokenizer: Any) -> None:
    detokenizer = Detokenizer(tokenizer)
    deltas = feed(detokenizer, byte_ids(tokenizer, b"ok" + "😀".encode()[:2]))
    assert deltas[:-1] == ["o", "k", "", ""]
    assert deltas[-1].strip("\ufffd") == ""
    assert deltas[-1] != ""


def test_real_replacement_characters_do_not_stop_the_stream() -> None:
    """Text after bytes that are broken for good must not wait for the end; nor may the held part grow."""
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer)
    deltas = [detokenizer.append([token_id])[0] for token_id in byte_ids(tokenizer, b"\xff" * 200)]
    assert len("".join(deltas)) >= 197
    assert "".join(deltas) + detokenizer.append(ids_of(tokenizer, "ok"))[0] == "\ufffd" * 200 + "ok"


def test_invalid_bytes_after_a_complete_character_take_nothing_back() -> None:
    """The decoder of a byte-fallback model shows a whole run of byte tokens as broken once one of them is."""
    tokenizer = sentencepiece_like()
    ids = [*byte_ids(tokenizer, "你".encode() + b"\xe5"), *ids_of(tokenizer, "ok")]
    assert "".join(feed(Detokenizer(tokenizer), ids)) == "你\ufffd ok"


def test_a_decoder_that_tidies_up_takes_nothing_back() -> None:
    """It turns "do n't" into "don't" after the space was shown; what was shown stays, and nothing is lost or said twice."""
    tokenizer = rewriting(" n't", "n't")
    ids = byte_ids(tokenizer, "I do n't know 😀".encode())
    assert tokenizer.decode(ids) == "I don't know 😀"
    assert "".join(feed(Detokenizer(tokenizer), ids)) == "I do n't know 😀"


def test_a_decoder_that_changes_every_tail_still_costs_the_same_per_token() -> None:
    tokenizer = rewriting("^a", "X")
    counting: Any = CountingTokenizer(tokenizer)
    text = "".join(feed(Detokenizer(counting), byte_ids(tokenizer, b"a" * 500)))
    assert text.upper().replace("X", "A") == "A" * 500
    assert counting.num_decoded <= 500 * 64


def test_words_keep_their_spaces_and_the_first_one_has_none() -> None:
    tokenizer = sentencepiece_like()
    ids = ids_of(tokenizer, "Hello how are you")
    assert "".join(feed(Detokenizer(tokenizer), ids)) == "Hello how are you"


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_continued_reply_goes_on_where_its_text_ended(tokenizer: Any, cut: int) -> None:
    """Continuing a stopped reply of a sentencepiece model glued the next word to the last one."""
    ids = ids_of(tokenizer, "Hello, how are you today? 😀 fine")
    before = "".join(feed(Detokenizer(tokenizer), ids[:cut]))
    after = "".join(feed(Detokenizer(tokenizer, [tokenizer.eos_token_id, *ids[:cut]]), ids[cut:]))
    # Cut inside the emoji, the first part shows a replacement character, and the second the whole emoji.
    assert before.rstrip("\ufffd") + after == "Hello, how are you today? 😀 fine"


def test_a_reply_after_a_control_token_starts_a_text_of_its_own() -> None:
    tokenizer = sentencepiece_like()
    prompt = [*ids_of(tokenizer, "Hello"), tokenizer.eos_token_id]
    assert "".join(feed(Detokenizer(tokenizer, prompt), ids_of(tokenizer, "fine"))) == "fine"


def test_a_prompt_that_ends_within_a_character_lends_its_bytes(tokenizer: Any) -> None:
    ids = byte_ids(tokenizer, "a😀b".encode())
    assert "".join(feed(Detokenizer(tokenizer, ids[:3]), ids[3:])) == "😀b"


def test_replacement_characters_of_the_prompt_are_not_said_again() -> None:
    tokenizer = byte_level()
    prompt = byte_ids(tokenizer, b"a\xff\xff")
    assert "".join(feed(Detokenizer(tokenizer, prompt), ids_of(tokenizer, "ok"))) == "ok"


def test_control_tokens_are_no_text(tokenizer: Any) -> None:
    ids = [*ids_of(tokenizer, "Hello"), tokenizer.eos_token_id]
    assert "".join(feed(Detokenizer(tokenizer, stop=("</s>", "<|im_end|>")), ids)) == "Hello"


# -- stop strings ------------------------------------------------------------------------------------------------------


def cut_at_stop(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule, spelled out: the first stop string to be completed ends the text; the longest if several end at once."""
    for end in range(len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            longest = max(matches, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(
    text=st.text("ab😀 ", max_size=40),
    stops=st.lists(st.text("ab😀 ", min_size=1, max_size=5), min_size=1, max_size=3).map(tuple),
)
@example(text="aabaabaaab", stops=("aabaaa",))
@example(text="abab", stops=("abb", "ba"))
@settings(deadline=None)
def test_a_stop_string_is_neither_missed_nor_shown_in_part(kind: str, text: str, stops: tuple[str, ...]) -> None:
    """Stop strings that straddle tokens were missed when each delta was searched by itself, and half shown when not held."""
    tokenizer = TOKENIZERS[kind]()
    ids = ids_of(tokenizer, text)
    whole = tokenizer.decode(ids)
    detokenizer = Detokenizer(tokenizer, stop=stops)
    deltas = feed(detokenizer, ids)
    assert ("".join(deltas), detokenizer.stop_match) == cut_at_stop(whole, stops)


@given(text=st.text("ab", max_size=30), stop=st.text("ab", min_size=1, max_size=5))
@settings(deadline=None)
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stop: str) -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=(stop,))
    seen = ""
    for token_id in ids_of(tokenizer, text):
        seen += tokenizer.decode([token_id])
        _, match = detokenizer.append([token_id])
        if match is not None:
            break
        held = max(size for size in range(len(stop)) if seen.endswith(stop[:size]))
        assert detokenizer.text == seen[: len(seen) - held]


def test_one_append_of_many_tokens_stops_within_them() -> None:
    tokenizer = byte_level()
    ids = byte_ids(tokenizer, b"one two three")
    detokenizer = Detokenizer(tokenizer, stop=("two",))
    assert detokenizer.append(ids) == ("one ", "two")
    assert detokenizer.num_tokens == len("one two")
    assert detokenizer.finish() == ""


def test_the_end_releases_what_was_held_back() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=("###",))
    assert detokenizer.append(byte_ids(tokenizer, b"ok##")) == ("ok", None)
    assert detokenizer.finish() == "##"
    assert detokenizer.text == "ok##"
    assert detokenizer.finish() == ""


def test_min_tokens_hold_off_a_stop_string() -> None:
    tokenizer = byte_level()
    ids = byte_ids(tokenizer, b"a.b.c")
    detokenizer = Detokenizer(tokenizer, stop=(".",), min_tokens=3)
    assert "".join(feed(detokenizer, ids)) == "a.b"
    assert detokenizer.num_tokens == 4


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=("###",), min_tokens=4)
    assert "".join(feed(detokenizer, byte_ids(tokenizer, b"a###"))) == "a"


# -- forks -------------------------------------------------------------------------------------------------------------


@given(text=texts, cut=st.integers(0, 40), tail=texts)
@settings(deadline=None)
def test_a_fork_goes_its_own_way(text: str, cut: int, tail: str) -> None:
    """A fork within a character or a possible stop string owns the part that was held back, and so does the original."""
    tokenizer = byte_level()
    ids, tail_ids = ids_of(tokenizer, text), ids_of(tokenizer, tail)
    original = Detokenizer(tokenizer, stop=("zzz",))
    original.append(ids[:cut])
    fork = original.fork()
    feed(fork, tail_ids)
    feed(original, ids[cut:])
    straight = Detokenizer(tokenizer, stop=("zzz",))
    feed(straight, [*ids[:cut], *tail_ids])
    assert (fork.text, fork.stop_match) == (straight.text, straight.stop_match)
    again = Detokenizer(tokenizer, stop=("zzz",))
    feed(again, ids)
    assert original.text == again.text


class CountingTokenizer:
    """Hands on to a tokenizer and counts the tokens it decodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_decoded = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int], **options: Any) -> str:
        self.num_decoded += len(token_ids)
        text = self._tokenizer.decode(token_ids, **options)
        assert isinstance(text, str)
        return text


@pytest.mark.parametrize("data", [b"word ", b"\xff", "\ufffd".encode(), "你".encode(), "😀".encode()[:3]])
def test_the_cost_of_a_token_does_not_grow_with_the_text(tokenizer: Any, data: bytes) -> None:
    counting: Any = CountingTokenizer(tokenizer)
    detokenizer = Detokenizer(counting)
    ids = byte_ids(tokenizer, data * 400)
    detokenizer.append(ids[:200])
    first = counting.num_decoded
    detokenizer.append(ids[200:400])
    assert counting.num_decoded - first <= 1.5 * first
    assert first <= 200 * 64
