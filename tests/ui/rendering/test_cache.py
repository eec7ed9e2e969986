"""The cache of rendered texts."""

from concurrent.futures import ThreadPoolExecutor

from chatpage_ui.rendering import RenderCache, render_blocks


def test_a_whole_text_is_rendered_once_and_an_open_one_each_time() -> None:
    cache = RenderCache()
    assert cache.render("*a*", is_open=False) is cache.render("*a*", is_open=False)
    assert cache.render("*a*", is_open=True) == render_blocks("*a*", is_open=True)
    assert cache.render("a", is_open=False, in_reasoning=True) != cache.render("a", is_open=False)


def test_the_cache_never_grows_beyond_its_limit() -> None:
    cache = RenderCache(max_chars=500)
    first = cache.render("first", is_open=False)
    for number in range(50):
        cache.render(f"text {number}", is_open=False)
        assert cache.render("first", is_open=False) is first  # used again and again, so it stays
        assert cache.num_chars <= 500
    cache.render("x" * 1000, is_open=False)
    assert cache.num_chars == 0


def test_threads_do_not_disturb_each_other() -> None:
    """The finder of bare links keeps notes of the text it is in; shared, it put links of one text into another."""
    texts = [f"see www.number{number}.org and *that* " * 20 for number in range(40)]
    cache = RenderCache()
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda text: cache.render(text, is_open=False), texts))
    assert found == [render_blocks(text, is_open=False) for text in texts]
