"""Text of a model or a person as HTML that is safe to put into a page, block by block, while it is still being written."""

from chatpage_ui.rendering.blocks import Block, render_blocks
from chatpage_ui.rendering.cache import RenderCache
from chatpage_ui.rendering.code import code_css

__all__ = ["Block", "RenderCache", "code_css", "render_blocks"]
