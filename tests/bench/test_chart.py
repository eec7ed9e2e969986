"""The chart: what its bars say, and that every reader can read it."""

from xml.etree import ElementTree

from chatpage.bench.chart import draw
from chatpage.bench.measuring import Outcome, Results

SVG = "{http://www.w3.org/2000/svg}"


def _results() -> Results:
    return Results(
        {
            "W1": {"chatpage": Outcome({"decode tok/s": [100.0]}), "a<b": Outcome({"decode tok/s": [50.0, 25.0, 50.0]})},
            "W3": {"chatpage": Outcome({"first token ms": [40.0]}), "a<b": Outcome({"first token ms": [20.0]})},
            "W7": {"chatpage": Outcome({"copied bytes": [0.0]}), "a<b": Outcome(reason="has no fork")},
            "W4": {"chatpage": Outcome({"cold s": [1.5]}), "a<b": Outcome(reason="failed")},
        }
    )


def _panels() -> dict[str, ElementTree.Element]:
    root = ElementTree.fromstring(draw(_results(), ["chatpage", "a<b"]))
    return {str(group[0].text): group for group in root.iter(f"{SVG}g")}


def _widths(panel: ElementTree.Element) -> list[float]:
    return [float(bar.attrib["width"]) for bar in panel.iter(f"{SVG}rect")]


def test_the_longest_bar_is_the_best_engine_and_half_as_good_is_half_as_long() -> None:
    ours, theirs = _widths(_panels()["Decode, one stream, tokens/s"])
    assert theirs == ours / 2
    ours, theirs = _widths(_panels()["Next turn, 1,500 cached: first token, ms"])
    assert ours == theirs / 2


def test_only_headline_numbers_that_were_taken_have_a_panel() -> None:
    assert len(_panels()) == 3


def test_an_engine_without_a_number_has_a_dash_and_no_bar() -> None:
    panel = _panels()["8 samples of one 1,500-token prompt, s"]
    assert len(_widths(panel)) == 1
    assert [text.text for text in panel.iter(f"{SVG}text")][-2:] == ["a<b", "-"]


def test_bars_and_values_stay_inside_the_picture() -> None:
    root = ElementTree.fromstring(draw(_results(), ["chatpage", "a<b"]))
    _, _, _, height = map(float, root.attrib["viewBox"].split())
    tops = [float(group.attrib["transform"].split()[1].rstrip(")")) for group in root.iter(f"{SVG}g")]
    inner = [float(bar.attrib["y"]) + float(bar.attrib["height"]) for bar in root.iter(f"{SVG}rect")]
    assert max(tops) + max(inner) <= height


def test_the_picture_has_colours_for_dark_pages_and_loads_nothing() -> None:
    text = draw(_results(), ["chatpage", "a<b"])
    assert "prefers-color-scheme: dark" in text
    assert not any(word in text for word in ("<script", "href", "url(", "@import"))
