"""`/canvas/render` and the stylesheet of code."""

from typing import Annotated, Any

from fastapi import FastAPI, Header
from starlette.testclient import TestClient

from chatpage.server.problems import UnauthorizedError, handle_errors
from chatpage_ui.rendering import code_css
from chatpage_ui.routes import CSS_PATH, MAX_CHARS, MAX_ITEMS, router


def _client() -> TestClient:
    async def user(authorization: Annotated[str | None, Header()] = None) -> str:
        if authorization is None:
            raise UnauthorizedError("no key")
        return authorization

    app = FastAPI()
    handle_errors(app)
    app.include_router(router(user))
    return TestClient(app, headers={"Authorization": "me"})


def _render(client: TestClient, *items: dict[str, Any], status: int = 200) -> Any:
    response = client.post("/canvas/render", json={"items": list(items)})
    assert response.status_code == status, response.text
    return response.json()


def test_texts_are_rendered_in_their_order() -> None:
    found = _render(_client(), {"id": "a", "text": "*x*"}, {"id": "b", "text": "# y\n\nz", "open": True})
    assert found == {
        "items": [
            {"id": "a", "blocks": [{"start": 0, "end": 3, "html": "<p><em>x</em></p>\n", "settled": True}]},
            {
                "id": "b",
                "blocks": [
                    {"start": 0, "end": 3, "html": "<h1>y</h1>\n", "settled": False},
                    {"start": 5, "end": 6, "html": "<p>z</p>\n", "settled": False},
                ],
            },
        ]
    }
    reasoning = _render(_client(), {"id": "c", "text": "hm", "in_reasoning": True})
    assert "<details" in reasoning["items"][0]["blocks"][0]["html"]


def test_too_much_at_once_is_refused_with_the_numbers() -> None:
    client = _client()
    half = "x" * (MAX_CHARS // 2 + 1)
    refused = _render(client, {"id": "a", "text": half}, {"id": "b", "text": half}, status=422)
    assert str(MAX_CHARS) in refused["error"]["message"]
    many = [{"id": str(number), "text": "x"} for number in range(MAX_ITEMS + 1)]
    _render(client, *many, status=422)
    assert len(_render(client, *many[:MAX_ITEMS])["items"]) == MAX_ITEMS


def test_unknown_fields_and_halves_of_characters_are_refused() -> None:
    client = _client()
    _render(client, {"id": "a", "text": "x", "colour": "red"}, status=422)
    broken = client.post("/canvas/render", content='{"items":[{"id":"a","text":"\\ud83d"}]}')
    assert broken.status_code == 422


def test_nobody_renders_without_being_a_user() -> None:
    """Rendering costs time; a stranger must not be able to ask for it."""
    client = _client()
    del client.headers["Authorization"]
    assert _render(client, {"id": "a", "text": "x"}, status=401)["error"]["code"] == "unauthorized"


def test_the_stylesheet_is_there_for_everyone() -> None:
    response = TestClient(_client().app).get(CSS_PATH)
    assert response.headers["content-type"].startswith("text/css")
    assert response.text == code_css()
