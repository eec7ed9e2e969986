"""The drawer beside the conversation: its tabs, its size, and what it is on a phone."""

from playwright.sync_api import Locator, expect

from tests.ui.pages import PHONE, Site, Visit


def drawer(visit: Visit) -> Locator:
    return visit.page.locator(".cp-drawer")


def handle(visit: Visit) -> Locator:
    return visit.page.get_by_role("separator", name="Size of the drawer")


def button(visit: Visit, name: str) -> Locator:
    return visit.page.locator(".cp-bar").get_by_role("button", name=name)


def size(visit: Visit, side: str) -> float:
    box = drawer(visit).bounding_box()
    assert box is not None
    return float(box[side])  # type: ignore[literal-required]


def test_the_buttons_open_their_tab_and_close_it_again(visit: Visit) -> None:
    expect(drawer(visit)).to_be_hidden()
    button(visit, "Tree of the conversation").click()
    expect(visit.page.get_by_role("tabpanel", name="Tree")).to_be_visible()
    button(visit, "Memory").click()
    expect(visit.page.get_by_role("tabpanel", name="Memory")).to_be_visible()
    expect(visit.page.get_by_role("tabpanel")).to_have_count(1)
    button(visit, "Memory").click()
    expect(drawer(visit)).to_be_hidden()


def test_arrow_keys_change_the_tab(visit: Visit) -> None:
    button(visit, "Tree of the conversation").click()
    tab = visit.page.get_by_role("tab", name="Tree")
    expect(tab).to_have_attribute("aria-selected", "true")
    tab.press("ArrowRight")
    expect(visit.page.get_by_role("tab", name="Memory")).to_be_focused()
    expect(visit.page.get_by_role("tab", name="Memory")).to_have_attribute("aria-selected", "true")
    expect(visit.page.get_by_role("tabpanel", name="Memory")).to_be_visible()


def test_its_width_is_set_by_key_and_pointer_and_remembered(visit: Visit) -> None:
    button(visit, "Tree of the conversation").click()
    before = size(visit, "width")
    handle(visit).press("ArrowLeft")
    assert size(visit, "width") == before + 24
    expect(handle(visit)).to_have_attribute("aria-valuenow", str(round(before + 24)))
    box = handle(visit).bounding_box()
    assert box is not None
    visit.page.mouse.move(box["x"] + box["width"] / 2, 300)
    visit.page.mouse.down()
    visit.page.mouse.move(box["x"] - 60, 320)
    visit.page.mouse.up()
    wide = size(visit, "width")
    assert wide > before + 60
    visit.page.reload()
    visit.ready()
    expect(visit.page.get_by_role("tabpanel", name="Tree")).to_be_visible()
    assert size(visit, "width") == wide


def test_on_a_phone_it_is_a_sheet_at_the_lower_edge(site: Site) -> None:
    with site.visit(viewport=PHONE, has_touch=True) as visit:
        button(visit, "Memory").click()
        expect(visit.page.get_by_role("tabpanel", name="Memory")).to_be_visible()
        assert size(visit, "width") == PHONE["width"]
        assert size(visit, "y") + size(visit, "height") == PHONE["height"]
        expect(handle(visit)).to_have_attribute("aria-orientation", "horizontal")
        before = size(visit, "height")
        handle(visit).press("ArrowUp")
        assert size(visit, "height") == before + 24
        visit.page.get_by_role("button", name="Close the drawer").click()
        expect(drawer(visit)).to_be_hidden()
