/**
 * Editing a message in its place. Nothing is destroyed: an edit is another version beside the original.
 */

import { h } from "./dom.js";

/** Put an editor in the place of a message's text. */
export function editMessage(view) {
  const { app, nodeId, node } = view;
  if (view.element.querySelector(".cp-editor")) return;
  const area = h("textarea", { class: "cp-input", rows: 3, "aria-label": "Edit the message" });
  area.value = app.conversation.textOf(nodeId);
  const close = () => {
    editor.remove();
    view.body.element.hidden = false;
    view.element.focus({ preventScroll: true });
  };
  const run = async (work) => {
    const text = area.value;
    editor.inert = true;
    try {
      await work(text);
      close();
    } catch {
      editor.inert = false; // the text stays in the editor; what went wrong has been shown
      area.focus();
    }
  };
  const choices = {
    user: [["Send", (text) => app.answerEdited(nodeId, text)], ["Save only", (text) => app.saveEdited(nodeId, text)]],
    assistant: [["Save and continue", (text) => app.continueEdited(nodeId, text)], ["Save only", (text) => app.saveEdited(nodeId, text)]],
  };
  const buttons = (choices[node.role] ?? [["Save as a new version", (text) => app.saveEdited(nodeId, text)]]).map(([name, work], i) =>
    h("button", { type: "button", class: `cp-button ${i ? "" : "is-primary"}`, onclick: () => run(work) }, name),
  );
  const editor = h(
    "div",
    {
      class: "cp-editor",
      onkeydown: (event) => {
        if (event.isComposing) return;
        if (event.key === "Escape") close();
        else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) buttons[0].click();
        else return;
        event.preventDefault();
        event.stopPropagation();
      },
    },
    area,
    h("div", { class: "cp-editor-buttons" }, ...buttons, h("button", { type: "button", class: "cp-button", onclick: close }, "Cancel")),
  );
  view.body.element.hidden = true;
  view.body.element.after(editor);
  grow(area);
  area.addEventListener("input", () => grow(area));
  area.focus();
  area.setSelectionRange(area.value.length, area.value.length);
}

/** Make a text area as high as its text. */
export function grow(area, most = innerHeight * 0.5) {
  area.style.height = "auto";
  area.style.height = `${Math.min(area.scrollHeight + 2, most)}px`;
}
