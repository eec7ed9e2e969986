"""What a prompt maker knows of its model."""

from pathlib import Path

import pytest

from chatpage.server.websocket import welcome_to
from chatpage.store import LOCAL_USER
from tests.engine.engines import tiny_engine
from tests.sessions import Desk, with_desk
from tests.tiny_models import CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("template", "opens"),
    [
        (CHAT_TEMPLATE, False),
        (CHAT_TEMPLATE + "{% if add_generation_prompt %}{{ '<think>\\n' }}{% endif %}", True),
        (CHAT_TEMPLATE + "{% if add_generation_prompt %}{{ '<think>\\n\\n</think>\\n' }}{% endif %}", False),
        ("{{ raise_exception('never alone') }}", False),
        (None, False),
    ],
)
def test_a_client_is_told_whether_replies_begin_within_reasoning(tmp_path: Path, template: str | None, opens: bool) -> None:
    """The tag is in the prompt then, and a page that waits for it in the reply shows the reasoning as the answer."""

    async def test(desk: Desk) -> None:
        assert welcome_to(desk.session, LOCAL_USER).model.opens_reasoning is opens

    engine = tiny_engine()
    engine.tokenizer.chat_template = template
    with_desk(tmp_path, test, engine=engine)
