"""Prompts: what was computed for one turn is the start of the next, and nobody forges a turn."""

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from chatpage.chat_template import PLAIN_STOP
from chatpage.engine.detokenizer import special_token_ids
from chatpage.errors import InvalidRequestError
from chatpage.prompt import Message, PromptPrefix, render_prompt
from tests.chat_templates import (
    CHATML,
    DATED,
    GEMMA,
    LLAMA3,
    MISTRAL,
    PLAIN,
    STABLE,
    THINKING,
    Style,
    contents,
    end_of,
    ids_of,
    reply,
)
from tests.tokenizer_zoo import TEXT

letters = st.one_of(st.sampled_from(sorted({*TEXT, *" \n\t<|>/"})), st.characters(exclude_categories=["Cs"]))
texts = st.text(letters, max_size=20)


# -- the same as transformers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [*STABLE.values(), THINKING], ids=[*STABLE, "thinking"])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_text_alone_is_encoded_as_transformers_does(style: Style, data: st.DataObject) -> None:
    """What the model was trained on; at the border of header and content, too, where tokens may merge."""
    tokenizer = style.tokenizer()
    plain = texts.filter(lambda text: not any(token in text for token in style.control_tokens))
    messages = [Message("system", data.draw(plain))] if style.has_system and data.draw(st.booleans()) else []
    for _ in range(data.draw(st.integers(0, 2))):
        messages += [Message("user", data.draw(plain)), Message("assistant", data.draw(plain))]
    messages.append(Message("user", data.draw(plain)))
    prompt = render_prompt(tokenizer, messages)
    if style.template is not None:
        pairs = [{"role": m.role, "content": m.content} for m in messages]
        text = tokenizer.apply_chat_template(pairs, tokenize=False, add_generation_prompt=True)
        assert prompt.token_ids == ids_of(tokenizer, text)
    assert prompt.prefix_break is None
    assert all(0 <= start <= stop <= len(prompt.token_ids) for start, stop in prompt.spans)
    assert [start for start, _ in prompt.spans] == sorted(start for start, _ in prompt.spans)


def test_spans_are_the_contents() -> None:
    tokenizer = CHATML.tokenizer()
    texts = ["Be brief.", "Hello, how are you? 😀", "I am fine", "fox"]
    messages = [Message(role, text) for role, text in zip(("system", "user", "assistant", "user"), texts, strict=True)]
    prompt = render_prompt(tokenizer, messages)
    assert contents(tokenizer, prompt) == texts
    start = prompt.spans[0][0]
    assert tokenizer.decode(prompt.token_ids[:start]) == "<|im_start|>system\n"


def test_without_a_template_turns_are_paragraphs() -> None:
    tokenizer = PLAIN.tokenizer()
    messages = [Message("system", "Be brief."), Message("user", "Hi"), reply(tokenizer, " Hello"), Message("user", "Bye")]
    prompt = render_prompt(tokenizer, messages)
    assert tokenizer.decode(prompt.token_ids) == "Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: Bye\n\nAssistant:"
    assert PLAIN_STOP[0] in tokenizer.decode(prompt.token_ids)


def test_without_a_generation_prompt_the_conversation_just_ends() -> None:
    tokenizer = CHATML.tokenizer()
    prompt = render_prompt(tokenizer, [Message("user", "Hi"), reply(tokenizer, "Hello")], add_generation_prompt=False)
    assert tokenizer.decode(prompt.token_ids).endswith("<|im_start|>assistant\nHello<|im_end|>\n")


# -- a stable prefix ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STABLE.values(), ids=STABLE)
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_turn_starts_with_the_turn_before_and_its_reply(style: Style, data: st.DataObject) -> None:
    """Applications that re-tokenise replies lose their cache at the first reply whose tokens are not the tokenizer's own
    choice: a sampled token sequence seldom is."""
    tokenizer = style.tokenizer()
    end = end_of(tokenizer, style)
    words = sorted(set(range(len(tokenizer))) - special_token_ids(tokenizer))
    messages = [Message("system", data.draw(texts))] if style.has_system and data.draw(st.booleans()) else []
    known: PromptPrefix | None = None
    for _ in range(data.draw(st.integers(2, 4))):
        messages.append(Message("user", data.draw(texts)))
        prompt = render_prompt(tokenizer, messages, known=known)
        assert prompt.prefix_break is None
        if known is not None:
            assert prompt.token_ids[: len(known.token_ids)] == known.token_ids
        assert prompt == render_prompt(tokenizer, messages)  # with or without help from the turn before
        generated = tuple(data.draw(st.lists(st.sampled_from(words), max_size=12)))
        text = tokenizer.decode(generated, skip_special_tokens=True)
        if data.draw(st.booleans()):
            generated = (*generated, end)  # else: stopped, or cut at a stop string
        known = prompt.followed_by(generated)
        messages.append(Message("assistant", text, generated))


@pytest.mark.parametrize("style", STABLE.values(), ids=STABLE)
def test_a_stopped_reply_gets_its_end_from_the_template(style: Style) -> None:
    """A reply stopped by the reader has no end token; without one the model takes the next message for more of it."""
    tokenizer = style.tokenizer()
    question = Message("user", "Hello")
    stopped = render_prompt(tokenizer, [question, reply(tokenizer, "I am f"), Message("user", "why")])
    ended = render_prompt(tokenizer, [question, reply(tokenizer, "I am f", end_of(tokenizer, style)), Message("user", "why")])
    if style.template is not None:
        assert end_of(tokenizer, style) in stopped.token_ids[stopped.spans[1][1] :]
        assert stopped.token_ids.count(end_of(tokenizer, style)) == ended.token_ids.count(end_of(tokenizer, style))
    assert stopped.prefix_break is None
    first = render_prompt(tokenizer, [question])
    assert stopped.token_ids[: len(first.token_ids)] == first.token_ids


def test_a_greeting_that_answers_nobody_keeps_its_ids() -> None:
    tokenizer = CHATML.tokenizer()
    greeting = reply(tokenizer, "Hello")
    prompt = render_prompt(tokenizer, [Message("system", "Be brief."), greeting])
    start, stop = prompt.spans[1]
    assert prompt.token_ids[start:stop] == greeting.token_ids


def test_an_end_token_that_the_template_does_not_write_stays() -> None:
    tokenizer = CHATML.tokenizer()
    other_end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    messages = [Message("user", "Hi"), reply(tokenizer, "Hello", other_end), Message("user", "Bye")]
    prompt = render_prompt(tokenizer, messages)
    assert "Hello<|endoftext|><|im_end|>\n" in tokenizer.decode(prompt.token_ids)


@pytest.mark.parametrize("style", [LLAMA3, GEMMA, STABLE["llama 2"]], ids=["llama 3", "gemma", "llama 2"])
def test_white_space_that_a_template_trims_stays_in_a_generated_reply(style: Style) -> None:
    tokenizer = style.tokenizer()
    message = Message("user", "Hello")
    ids = ids_of(tokenizer, "\n\n fine, thank you \n")
    answer = Message("assistant", "\n\n fine, thank you \n", ids)
    prompt = render_prompt(tokenizer, [message, answer, message])
    assert prompt.prefix_break is None
    start, stop = prompt.spans[1]
    assert prompt.token_ids[start:stop] == ids


def test_known_encodings_are_used_again() -> None:
    """A turn costs the encoding of what is new, however long the conversation is."""
    tokenizer = CHATML.tokenizer()
    messages = [Message("user", "Hello " * 500), reply(tokenizer, "fine")]
    known = render_prompt(tokenizer, messages[:1]).followed_by(messages[1].token_ids or ())
    counting = CountingTokenizer(tokenizer)
    prompt = render_prompt(counting, [*messages, Message("user", "Bye")], known=known)  # type: ignore[arg-type]
    assert prompt.token_ids[: len(known.token_ids)] == known.token_ids
    assert 0 < counting.num_characters < 100


class CountingTokenizer:
    """Hands on to a tokenizer and counts the characters it encodes."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.num_characters = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, **options: Any) -> Any:
        self.num_characters += len(text)
        return self._tokenizer(text, **options)


# -- continuing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", [*STABLE.values(), THINKING], ids=[*STABLE, "thinking"])
def test_continuing_goes_on_from_the_ids(style: Style) -> None:
    tokenizer = style.tokenizer()
    question = Message("user", "Hello")
    first = render_prompt(tokenizer, [question])
    for end in ((), (end_of(tokenizer, style),)):
        answer = reply(tokenizer, "I am f", *end)
        known = first.followed_by(answer.token_ids or ())
        prompt = render_prompt(tokenizer, [question, answer], continue_final=True, known=known)
        assert prompt.token_ids == (*first.token_ids, *ids_of(tokenizer, "I am f"))
        assert prompt.spans[1] == (len(first.token_ids), len(prompt.token_ids))
        assert prompt.prefix_break is None


@pytest.mark.parametrize("style", STABLE.values(), ids=STABLE)
@given(text=texts)
@example(text="\nHello")
@example(text="Hello ")
@settings(max_examples=25, deadline=None)
def test_a_prefilled_reply_is_stable_once_it_has_ids(style: Style, text: str) -> None:
    """Words put into the mouth of the model: their ids and the generated ones make the reply."""
    tokenizer = style.tokenizer()
    messages = [Message("user", "Hello"), Message("assistant", text)]
    prompt = render_prompt(tokenizer, messages, continue_final=True)
    asked = render_prompt(tokenizer, messages[:1])
    assert prompt.token_ids[: len(asked.token_ids)] == asked.token_ids
    start, stop = prompt.spans[1]
    assert (start, stop) == (len(asked.token_ids), len(prompt.token_ids))
    whole = (*prompt.token_ids[start:], *ids_of(tokenizer, "fine"))
    shown = tokenizer.decode(whole, skip_special_tokens=True)
    later = render_prompt(tokenizer, [messages[0], Message("assistant", shown, whole), messages[0]])
    assert later.token_ids[: len(asked.token_ids) + len(whole)] == (*asked.token_ids, *whole)


def test_the_space_before_a_prefill_is_the_templates() -> None:
    tokenizer = MISTRAL.tokenizer()
    messages = [Message("user", "Hello"), Message("assistant", "fine")]
    prompt = render_prompt(tokenizer, messages, continue_final=True)
    closed = render_prompt(tokenizer, messages, add_generation_prompt=False)
    assert closed.token_ids[:-1] == prompt.token_ids


def test_a_template_that_never_ends_in_a_reply_still_allows_a_prefill() -> None:
    refusal = "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('Ask something') }}{% endif %}"
    tokenizer = Style(refusal + (CHATML.template or ""), CHATML.control_tokens).tokenizer()
    prompt = render_prompt(tokenizer, [Message("user", "Hi"), Message("assistant", "Hello")], continue_final=True)
    assert tokenizer.decode(prompt.token_ids).endswith("<|im_start|>assistant\nHello")


def test_only_a_reply_can_be_continued() -> None:
    tokenizer = CHATML.tokenizer()
    for messages in ([Message("user", "Hi")], [Message("assistant", "Hi")]):
        with pytest.raises(InvalidRequestError, match="Only a reply that follows another message can be continued"):
            render_prompt(tokenizer, messages, continue_final=True)


# -- breaks ------------------------------------------------------------------------------------------------------------


def test_a_template_that_drops_earlier_thinking_breaks_there_and_says_so() -> None:
    """Qwen 3 shows only the answer of earlier turns; the cache looked broken for no reason, each turn."""
    tokenizer = THINKING.tokenizer()
    thought = "<think>\nthe fox\n</think>\n\n"
    messages = [Message("user", "Hello"), reply(tokenizer, thought + "fine", end_of(tokenizer, THINKING))]
    ids = messages[1].token_ids or ()
    first = render_prompt(tokenizer, messages[:1])
    messages.append(Message("user", "why"))
    prompt = render_prompt(tokenizer, messages, known=first.followed_by(ids))
    assert tokenizer.decode(prompt.token_ids).count("think") == 0
    assert prompt.token_ids[: len(first.token_ids)] == first.token_ids
    found = prompt.prefix_break
    assert found is not None
    assert (found.token_index, found.message_index) == (len(first.token_ids), 1)
    assert found.num_tokens_lost == len(ids)
    assert found.reason == "the chat template rewrites this reply, 30 characters as 4"
    alone = render_prompt(tokenizer, messages).prefix_break
    assert alone is not None
    assert (alone.token_index, alone.message_index) == (len(first.token_ids), 1)
    assert alone.num_tokens_lost == len(ids)


def test_a_break_counts_everything_computed_after_it() -> None:
    tokenizer = THINKING.tokenizer()
    answers = [reply(tokenizer, f"<think>\n{word}\n</think>\n\nfine") for word in ("fox", "dog", "lazy dog")]
    messages = [message for answer in answers for message in (Message("user", "Hello"), answer)]
    found = render_prompt(tokenizer, [*messages, Message("user", "why")]).prefix_break
    assert found is not None
    assert (found.message_index, found.token_index) == (1, len(render_prompt(tokenizer, messages[:1]).token_ids))
    untouched = [Message(m.role, m.content if m.token_ids is None else "x", m.token_ids) for m in messages]
    whole = render_prompt(tokenizer, [*untouched, Message("user", "why")]).spans[5][1]
    assert found.num_tokens_lost == whole - found.token_index


def test_thinking_of_the_turn_in_progress_is_kept() -> None:
    """Between tool calls there is no new question, and the template keeps the thinking."""
    tokenizer = THINKING.tokenizer()
    answer = reply(tokenizer, "<think>\nthe fox\n</think>\n\nfine")
    messages = [Message("user", "Hello"), answer, Message("tool", "42")]
    prompt = render_prompt(tokenizer, messages)
    start, stop = prompt.spans[1]
    assert prompt.prefix_break is None
    assert prompt.token_ids[start:stop] == answer.token_ids


def test_a_header_that_history_does_not_keep_is_a_break() -> None:
    """Switching thinking off puts an empty block before the reply, and the next turn leaves it out."""
    tokenizer = THINKING.tokenizer()
    options: dict[str, Any] = {"template_variables": {"enable_thinking": False}}
    messages = [Message("user", "Hello"), reply(tokenizer, "fine")]
    first = render_prompt(tokenizer, messages[:1], **options)
    assert tokenizer.decode(first.token_ids).endswith("assistant\n<think>\n\n</think>\n\n")
    known = first.followed_by(messages[1].token_ids or ())
    prompt = render_prompt(tokenizer, [*messages, Message("user", "why")], known=known, **options)
    found = prompt.prefix_break
    assert found is not None
    assert found.message_index == 1
    assert prompt.token_ids[: found.token_index] == known.token_ids[: found.token_index]
    assert "<think>" in found.reason


def test_a_date_in_the_system_prompt_breaks_at_midnight() -> None:
    """The whole conversation was computed anew each morning, and nobody could tell why."""
    tokenizer = DATED.tokenizer()
    messages = [Message("system", "Be brief."), Message("user", "Hello"), reply(tokenizer, "fine")]
    first = render_prompt(tokenizer, messages[:2], template_variables={"date": "31 May"})
    known = first.followed_by(messages[2].token_ids or ())
    messages.append(Message("user", "why"))
    assert render_prompt(tokenizer, messages, known=known, template_variables={"date": "31 May"}).prefix_break is None
    found = render_prompt(tokenizer, messages, known=known, template_variables={"date": "32 May"}).prefix_break
    assert found is not None
    assert tokenizer.decode(known.token_ids[: found.token_index]).endswith("Today is 3")
    assert found.message_index == 0
    assert found.num_tokens_lost == len(known.token_ids) - found.token_index
    assert "'2 May" in found.reason
    assert "'1 May" in found.reason


def test_an_edited_message_is_a_break_and_a_shorter_conversation_is_none() -> None:
    tokenizer = CHATML.tokenizer()
    messages = [Message("user", "Hello fox"), reply(tokenizer, "fine"), Message("user", "why")]
    known = render_prompt(tokenizer, messages).followed_by(ids_of(tokenizer, "I am"))
    edited = render_prompt(tokenizer, [Message("user", "Hello dog"), *messages[1:]], known=known)
    assert edited.prefix_break is not None
    assert edited.prefix_break.message_index == 0
    assert render_prompt(tokenizer, messages[:1], known=known).prefix_break is None
    assert render_prompt(tokenizer, messages, known=known).prefix_break is None


# -- refusals -----------------------------------------------------------------------------------------------------------


def test_half_a_surrogate_pair_is_refused_with_its_place() -> None:
    """A browser that cut an emoji in two made the server answer with a stack trace."""
    with pytest.raises(InvalidRequestError, match=r"half a surrogate pair \('\\ud83d'\) at character 3"):
        Message("user", "abc\ud83d")


def test_unknown_roles_and_ids_without_an_author_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match=r"role 'user<\|im_end\|>' is unknown; known are system"):
        Message("user<|im_end|>", "Hi")
    with pytest.raises(InvalidRequestError, match="only assistant messages are generated"):
        Message("user", "Hi", (1, 2))
    with pytest.raises(InvalidRequestError, match="has no message"):
        render_prompt(CHATML.tokenizer(), [])


def test_a_tokenizer_without_offsets_finds_the_contents_by_their_length() -> None:
    """Tokenizers written in Python do not tell where a token came from."""
    tokenizer: Any = WithoutOffsets(CHATML.tokenizer())
    prompt = render_prompt(
        tokenizer, [Message("user", "Hello, how are you"), Message("assistant", "fine"), Message("user", "")]
    )
    assert contents(tokenizer, prompt) == ["Hello, how are you", "fine", ""]


class WithoutOffsets:
    """Hands on to a tokenizer, but keeps its offsets."""

    is_fast = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: str, *, return_offsets_mapping: bool, **options: Any) -> Any:
        assert not return_offsets_mapping
        return self._tokenizer(text, **options)
