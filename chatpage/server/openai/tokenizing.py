"""`/tokenize`, `/detokenize` and `/apply-template`, in the shapes of vLLM and of llama.cpp.

Invariant: a token id is a whole number of the vocabulary; `true` is not 1.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from fastapi import APIRouter
from pydantic import Field, model_validator

from chatpage.chat_template import render
from chatpage.errors import InvalidParameterError
from chatpage.prompt import render_prompt
from chatpage.server.openai.access import NEEDS_USER, check_model
from chatpage.server.openai.common import ChatMessage, ModelName, OpenAIModel, Variables, body_reader
from chatpage.server.openai.token_texts import token_texts
from chatpage.server.openai.variables import check_variables
from chatpage.server.rest import Chats
from chatpage.server.views import Model, Text, TokenId
from chatpage.session import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = Annotated[tuple[ChatMessage, ...], Field(min_length=1, max_length=10_000)]
router = APIRouter(tags=["openai"])


class TokenizeBody(OpenAIModel):
    """Text to be tokenised: `prompt` (vLLM), `content` (llama.cpp), or `messages` through the chat template (vLLM)."""

    nested: ClassVar[Mapping[str, type[OpenAIModel]]] = {"messages": ChatMessage}
    model: ModelName | None = None
    prompt: Text | None = None
    content: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(default=None, description="with prompt; default true")
    return_token_strs: bool = Field(default=False, description="with prompt or messages")
    add_special: bool | None = Field(default=None, description="with content; default false")
    parse_special: bool | None = Field(default=None, description="with content; default true")
    with_pieces: bool = Field(default=False, description="with content")
    add_generation_prompt: bool | None = Field(default=None, description="with messages; default true")
    continue_final_message: bool | None = Field(default=None, description="with messages")
    chat_template_kwargs: Variables | None = Field(default=None, max_length=16, description="with messages")

    @model_validator(mode="after")
    def _fits(self) -> Self:
        kinds = [name for name in ("prompt", "content", "messages") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError("send one of prompt, content and messages")
        belongs = {
            "add_special_tokens": ("prompt",),
            "return_token_strs": ("prompt", "messages"),
            "add_special": ("content",),
            "parse_special": ("content",),
            "with_pieces": ("content",),
            "add_generation_prompt": ("messages",),
            "continue_final_message": ("messages",),
            "chat_template_kwargs": ("messages",),
        }
        for name, owners in belongs.items():
            if getattr(self, name) and kinds[0] not in owners:
                raise ValueError(f"{name} belongs to {' and '.join(owners)}")
        if self.continue_final_message and self.add_generation_prompt in (None, True):
            raise ValueError("continue_final_message needs add_generation_prompt to be false")
        return self


class Piece(Model):
    """A token and its text, or its bytes where it is part of a character."""

    id: int
    piece: str | tuple[int, ...]


class TokenizeView(Model):
    """The tokens of a text."""

    tokens: tuple[int, ...] | tuple[Piece, ...]
    count: int
    max_model_len: int
    token_strs: tuple[str, ...] | None = None


class DetokenizeBody(OpenAIModel):
    """Tokens to be turned into text."""

    model: ModelName | None = None
    tokens: Annotated[tuple[TokenId, ...], Field(max_length=2**20)]


class DetokenizeView(Model):
    """The text of tokens, under the names of vLLM (`prompt`) and of llama.cpp (`content`)."""

    prompt: str
    content: str


class TemplateBody(OpenAIModel):
    """Messages to be rendered."""

    nested: ClassVar[Mapping[str, type[OpenAIModel]]] = {"messages": ChatMessage}
    model: ModelName | None = None
    messages: Messages
    add_generation_prompt: bool = True
    chat_template_kwargs: Variables | None = Field(default=None, max_length=16)


class TemplateView(Model):
    """Messages as the model would read them."""

    prompt: str


@router.post("/tokenize", response_model_exclude_none=True, dependencies=NEEDS_USER)
async def tokenize(*, session: Chats, body: Annotated[TokenizeBody, body_reader(TokenizeBody)]) -> TokenizeView:
    """Return the tokens of a text, or of messages."""
    check_model(session, body.model)
    check_variables(body.chat_template_kwargs or {})
    token_ids = await session.prompts.run(lambda tokenizer: _encode(tokenizer, body))
    texts = token_texts(session.tokenizer)
    strings = tuple(map(texts.text_of, token_ids)) if body.return_token_strs else None
    tokens: Any = (
        tuple(Piece(id=i, piece=_piece(texts.bytes_of(i))) for i in token_ids) if body.with_pieces else tuple(token_ids)
    )
    return TokenizeView(
        tokens=tokens, count=len(token_ids), max_model_len=session.engine.info.max_model_len, token_strs=strings
    )


@router.post("/detokenize", dependencies=NEEDS_USER)
async def detokenize(*, session: Chats, body: Annotated[DetokenizeBody, body_reader(DetokenizeBody)]) -> DetokenizeView:
    """Return the text of tokens."""
    check_model(session, body.model)
    _check_tokens(session, body.tokens)
    text = await session.prompts.run(lambda tokenizer: str(tokenizer.decode(list(body.tokens))))
    return DetokenizeView(prompt=text, content=text)


@router.post("/apply-template", dependencies=NEEDS_USER)
async def apply_template(*, session: Chats, body: Annotated[TemplateBody, body_reader(TemplateBody)]) -> TemplateView:
    """Return messages as the chat template writes them."""
    check_model(session, body.model)
    variables = body.chat_template_kwargs or {}
    check_variables(variables)
    messages = [message.message() for message in body.messages]
    pairs = [(message.role, message.content) for message in messages]
    text = await session.prompts.run(
        lambda tokenizer: render(tokenizer, pairs, add_generation_prompt=body.add_generation_prompt, variables=variables)
    )
    return TemplateView(prompt=text)


def _encode(tokenizer: "PreTrainedTokenizerBase", body: TokenizeBody) -> Sequence[int]:
    if body.messages is not None:
        is_open = bool(body.continue_final_message)
        return render_prompt(
            tokenizer,
            [message.message() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False and not is_open,
            continue_final=is_open,
            template_variables=body.chat_template_kwargs or {},
        ).token_ids
    if body.prompt is not None:
        return list(tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False))
    return list(
        tokenizer.encode(
            body.content or "",
            add_special_tokens=bool(body.add_special),
            split_special_tokens=body.parse_special is False,
        )
    )


def _check_tokens(session: Session, token_ids: Sequence[int]) -> None:
    size = session.engine.info.vocab_size
    if token_ids and max(token_ids) >= size:
        raise InvalidParameterError(f"Token id {max(token_ids)} is outside the vocabulary of {size} tokens.")


def _piece(data: bytes) -> str | tuple[int, ...]:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return tuple(data)
