"""The page of chatpage: a Gradio shell around a canvas of ES modules."""

from chatpage_ui.page import mount_page

__all__ = ["mount_page"]
