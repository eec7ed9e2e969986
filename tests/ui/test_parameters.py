"""The inputs of the right sidebar, which the shell makes and the canvas reads."""

import json
import re

from chatpage.engine.models.default_model import MODEL_NAME
from chatpage_ui.page import STATIC, STYLES
from chatpage_ui.parameters import PARAMETERS


def test_the_canvas_knows_the_same_parameters_in_the_same_order() -> None:
    source = (STATIC / "params.js").read_text(encoding="utf-8")
    (found,) = re.findall(r"const PARAMETERS = (\[.*?\n\]);", source, re.DOTALL)
    known = json.loads(re.sub(r",(\s*\])", r"\1", found))
    assert known == [[parameter.name, parameter.neutral] for parameter in PARAMETERS]


def test_the_page_knows_what_the_default_model_is_called() -> None:
    source = (STATIC / "words.js").read_text(encoding="utf-8")
    assert f'DEFAULT_MODEL = "{MODEL_NAME}"' in source


def test_every_style_is_a_file_and_every_file_is_used() -> None:
    assert sorted(STYLES) == sorted(path.stem for path in STATIC.glob("*.css"))
