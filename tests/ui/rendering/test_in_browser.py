"""What a real browser makes of hostile texts."""

from playwright.sync_api import sync_playwright

from chatpage_ui.rendering import render_blocks
from tests.ui.rendering.test_sanitizing import HOSTILE

FORMS = (
    "{}",
    "a {} b",
    "- {}",
    "> {}",
    "|{}|\n|-|\n|{}|",
    "```html\n{}\n```",
    "`{}`",
    "[{}](http://127.0.0.1/a)",
    "![{}](http://127.0.0.1/b)",
)
LATEX = ("$\\text{{{}}}$", "$$\n\\mathrm{{{}}}\n$$", "\\[ {} \\]", "<think>{}</think>{}")


def test_hostile_texts_run_nothing_load_nothing_and_read_back_the_same() -> None:
    """A filter and a browser may read the same markup in two ways; what counts is what the browser does."""
    texts = [form.format(*[hostile] * form.count("{}")) for hostile in HOSTILE for form in (*FORMS, *LATEX)]
    pages = ["".join(block.html for block in render_blocks(text, is_open=False)) for text in texts]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        requests: list[str] = []
        page.on("request", lambda request: requests.append(request.url))
        page.on("dialog", lambda dialog: requests.append(f"dialog {dialog.message}"))
        found = page.evaluate(
            """pages => {
                const problems = []
                for (const html of pages) {
                    const host = document.createElement("div")
                    document.body.append(host)
                    host.innerHTML = html
                    const again = document.createElement("div")
                    again.innerHTML = host.innerHTML
                    if (again.innerHTML !== host.innerHTML) problems.push(`changes: ${html}`)
                    for (const element of host.querySelectorAll("*")) {
                        const name = element.localName
                        if (["script", "img", "svg", "style", "iframe", "object", "form", "link", "base"].includes(name))
                            problems.push(`${name}: ${html}`)
                        for (const attribute of element.attributes)
                            if (/^on|^style$|^src/.test(attribute.name)) problems.push(`${attribute.name}: ${html}`)
                    }
                }
                return problems
            }""",
            pages,
        )
        page.wait_for_timeout(200)
        browser.close()
    assert found == []
    assert requests == []
