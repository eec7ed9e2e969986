"""Chat templates in the styles of real model families, with the control tokens they need, and how to look at a prompt."""

from dataclasses import dataclass
from typing import Any

from chatpage.prompt import Message, Prompt
from tests.tokenizer_zoo import byte_level, sentencepiece_like


@dataclass(frozen=True)
class Style:
    """A template, its control tokens (the last one ends a turn), and the tokenizer family it comes with."""

    template: str | None
    control_tokens: tuple[str, ...]
    plain_tokens: tuple[str, ...] = ()
    is_sentencepiece: bool = False
    has_system: bool = True

    def tokenizer(self) -> Any:
        make = sentencepiece_like(self.control_tokens) if self.is_sentencepiece else None
        tokenizer = make or byte_level(self.control_tokens, self.plain_tokens)
        tokenizer.chat_template = self.template
        return tokenizer

    @property
    def end(self) -> str:
        return self.control_tokens[-1]


_CHATML_TURN = "'<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n'"
_CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHATML_HEADER = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"

CHATML = Style("{% for m in messages %}{{ " + _CHATML_TURN + " }}{% endfor %}" + _CHATML_HEADER, _CHATML_TOKENS)

DEFAULT_SYSTEM = Style(
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{{ " + _CHATML_TURN + " }}{% endfor %}" + _CHATML_HEADER,
    _CHATML_TOKENS,
)

DATED = Style(
    "{{ '<|im_start|>system\\nToday is ' + date + '. ' }}"
    "{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}{% endif %}{{ '<|im_end|>\\n' }}"
    "{% for m in messages if m['role'] != 'system' %}{{ " + _CHATML_TURN + " }}{% endfor %}" + _CHATML_HEADER,
    _CHATML_TOKENS,
)

LLAMA3 = Style(
    "{{ '<|begin_of_text|>' }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
)

MISTRAL = Style(
    "{{ '<s>' }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}",
    ("<unk>", "<s>", "</s>"),
    is_sentencepiece=True,
    has_system=False,
)

LLAMA2 = Style(
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<s>[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' </s>' }}{% endif %}{% endfor %}",
    ("<unk>", "<s>", "</s>"),
    is_sentencepiece=True,
    has_system=False,
)

GEMMA = Style(
    "{{ '<bos>' }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\\n' + m['content'] | trim + '<end_of_turn>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}",
    ("<bos>", "<start_of_turn>", "<end_of_turn>"),
    has_system=False,
)

# Keeps the thinking of the last turn only, and may switch thinking off with an empty block in front of the reply.
THINKING = Style(
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set c = m['content'] %}"
    "{% if m['role'] == 'assistant' %}{% set thought = '' %}"
    "{% if '</think>' in c %}{% set thought = c.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set c = c.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<|im_start|>assistant\\n<think>\\n' + thought + '\\n</think>\\n\\n' + c + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>assistant\\n' + c + '<|im_end|>\\n' }}{% endif %}"
    "{% else %}{{ " + _CHATML_TURN + " }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}",
    _CHATML_TOKENS,
    ("<think>", "</think>"),
)

PLAIN = Style(None, ("<|bos|>", "<|endoftext|>"))

STABLE = {
    "chatml": CHATML,
    "default system": DEFAULT_SYSTEM,
    "llama 3": LLAMA3,
    "mistral": MISTRAL,
    "llama 2": LLAMA2,
    "gemma": GEMMA,
    "none": PLAIN,
}


def ids_of(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def end_of(tokenizer: Any, style: Style) -> int:
    token_id = tokenizer.convert_tokens_to_ids(style.end)
    assert isinstance(token_id, int)
    return token_id


def reply(tokenizer: Any, text: str, *end: int) -> Message:
    """A reply as it was generated: ids, and the text that was shown for them."""
    ids = ids_of(tokenizer, text)
    return Message("assistant", tokenizer.decode(ids, skip_special_tokens=True), (*ids, *end))


def contents(tokenizer: Any, prompt: Prompt) -> list[str]:
    return [tokenizer.decode(prompt.token_ids[start:stop]) for start, stop in prompt.spans]
