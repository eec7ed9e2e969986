"""The last step before HTML leaves: only tags, attributes and addresses that are listed here pass.

Invariant: nothing that passes can run, load anything, or look like a part of the page that it is not. The renderer writes
no other HTML anyway; this holds when it is wrong.
"""

import html
import re

import nh3
from pygments.token import STANDARD_TYPES


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


MATHML_TAGS = _names("""
    math menclose mfrac mi mn mo mover mpadded mphantom mroot mrow mspace msqrt mstyle msub msubsup msup mtable mtd mtext mtr
    munder munderover
""")
_MATHML_ATTRIBUTES = _names("""
    accent accentunder columnalign columnlines columnspacing depth display displaystyle fence form height largeop linethickness
    lspace mathbackground mathcolor mathsize mathvariant maxsize minsize movablelimits notation rowlines rowspacing rspace
    scriptlevel separator stretchy voffset width
""")
_TAGS = MATHML_TAGS | _names("""
    a blockquote br button code details div em figcaption figure h1 h2 h3 h4 h5 h6 hr input li ol p pre s span strong summary
    table tbody td th thead tr ul
""")
_ATTRIBUTES: dict[str, set[str]] = {
    "a": {"href", "title"},
    "button": {"aria-label"},
    "figure": {"data-lang"},
    "ol": {"start"},
} | {tag: set(_MATHML_ATTRIBUTES) for tag in MATHML_TAGS}
_ATTRIBUTE_VALUES: dict[str, dict[str, set[str]]] = {
    "button": {"type": {"button"}},
    "input": {"type": {"checkbox"}, "checked": {"checked"}},
    "pre": {"tabindex": {"0"}},
}
_CLASSES: dict[str, set[str]] = {
    "a": {"image"},
    "button": {"copy"},
    "code": {"latex"},
    "details": {"reasoning"},
    "div": {"latex", "math", "plain"},
    "figure": {"code"},
    "input": {"task-list-item-checkbox"},
    "li": {"task-list-item"},
    "ol": {"contains-task-list"},
    "pre": {"highlight"},
    "span": {"lang", *filter(None, STANDARD_TYPES.values())},  # of colours
    "td": {"left", "center", "right"},
    "th": {"left", "center", "right"},
    "ul": {"contains-task-list"},
}
_FORCED: dict[str, dict[str, str]] = {
    "a": {"target": "_blank"},
    "button": {"type": "button"},
    "input": {"type": "checkbox", "disabled": "disabled"},
}
SCHEMES = frozenset({"http", "https", "mailto"})
_ADDRESS = re.compile(r"(?:https?://|mailto:)[^\s]", re.IGNORECASE)

_cleaner = nh3.Cleaner(
    tags=_TAGS,
    attributes=_ATTRIBUTES,
    tag_attribute_values=_ATTRIBUTE_VALUES,
    set_tag_attribute_values=_FORCED,
    allowed_classes=_CLASSES,
    url_schemes=SCHEMES,
    url_relative="deny",
    link_rel="noopener noreferrer nofollow",
)


def sanitize(markup: str) -> str:
    """Return HTML with whatever is not allowed taken out."""
    return _cleaner.clean(markup)


def is_safe_address(url: str) -> bool:
    """Whether a link may go there: to the web or to a mailbox; never to this server, where a click could do something."""
    return _ADDRESS.match(url) is not None


def plain_html(text: str) -> str:
    """Return text as it is, for what is too large or too deep to be rendered."""
    return f'<div class="plain">{html.escape(text.replace(chr(0), chr(0xFFFD)))}</div>'
