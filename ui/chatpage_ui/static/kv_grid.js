/**
 * The block pool as a picture: one cell per block, in the order of their ids.
 *
 * Invariant: the picture is drawn from `cells` alone, at most once per frame; its colours are those of the legend's swatches,
 * so they are defined once, in the style.
 */

import { perFrame } from "./dom.js";

export const KINDS = [
  ["blank", "Free"],
  ["cached", "Cached"],
  ["here", "This conversation"],
  ["used", "Used by 1"],
  ["shared2", "Shared by 2"],
  ["shared3", "Shared by 3 or more"],
];
const [LARGEST, SMALLEST] = [16, 5];
const DIMMED = 0.22;

export class KvGrid {
  #geometry = { size: LARGEST, columns: 1, gap: 2 };

  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Element} frame the place that the picture should fit into
   * @param {Map<string, Element>} swatches the legend's, by kind
   */
  constructor(canvas, frame, swatches) {
    this.canvas = canvas;
    this.frame = frame;
    this.swatches = swatches;
    this.cells = []; // {kind, fill}; fill: the share of its rows that hold a token
    this.lit = new Set(); // indices; if there are any, the others are dimmed
    this.cursor = null; // index
    this.draw = perFrame(() => this.#draw());
    new ResizeObserver(() => this.draw()).observe(frame);
    new MutationObserver(() => this.draw()).observe(document.body, { attributes: true, attributeFilter: ["class"] });
  }

  get columns() {
    return this.#geometry.columns;
  }

  /** Return the index of the cell at a point of the picture, or null. */
  cellAt(x, y) {
    const { size, columns } = this.#geometry;
    const column = Math.floor(x / size);
    const index = Math.floor(y / size) * columns + column;
    return x >= 0 && y >= 0 && column < columns && index < this.cells.length ? index : null;
  }

  /** Return where a cell is, in the picture. */
  rectOf(index) {
    const { size, columns } = this.#geometry;
    return { x: (index % columns) * size, y: Math.floor(index / columns) * size, size };
  }

  /** The largest cells that show all without scrolling, else the smallest. */
  #fit(width, height) {
    let size = LARGEST;
    const columnsAt = (of) => Math.max(1, Math.floor(width / of));
    while (size > SMALLEST && Math.ceil(this.cells.length / columnsAt(size)) * size > height) size -= 1;
    this.#geometry = { size, columns: columnsAt(size), gap: size >= 8 ? 2 : 1 };
  }

  #draw() {
    const { canvas, frame } = this;
    const width = frame.clientWidth;
    if (!width) return;
    this.#fit(width, frame.clientHeight);
    const { size, columns } = this.#geometry;
    const height = Math.max(1, Math.ceil(this.cells.length / columns)) * size;
    const ratio = devicePixelRatio || 1;
    const [deviceWidth, deviceHeight] = [Math.round(columns * size * ratio), Math.round(height * ratio)];
    if (canvas.width !== deviceWidth) canvas.width = deviceWidth;
    if (canvas.height !== deviceHeight) canvas.height = deviceHeight;
    canvas.style.width = `${columns * size}px`;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, columns * size, height);
    for (const [kind] of KINDS) this.#drawKind(context, kind);
    if (this.cursor !== null && this.cursor < this.cells.length) this.#drawCursor(context);
  }

  #drawKind(context, kind) {
    const { size, gap } = this.#geometry;
    const style = getComputedStyle(this.swatches.get(kind));
    const inner = size - gap;
    context.strokeStyle = style.borderTopColor;
    context.fillStyle = style.backgroundColor;
    context.lineWidth = 1;
    this.cells.forEach((cell, index) => {
      if (cell.kind !== kind) return;
      const { x, y } = this.rectOf(index);
      context.globalAlpha = this.lit.size && !this.lit.has(index) ? DIMMED : 1;
      if (kind === "blank" || cell.fill < 1) context.strokeRect(x + 0.5, y + 0.5, inner - 1, inner - 1);
      if (kind === "blank") return;
      const filled = size < 8 ? inner : Math.max(2, Math.round(inner * cell.fill));
      context.fillRect(x, y + inner - filled, inner, filled);
    });
    context.globalAlpha = 1;
  }

  #drawCursor(context) {
    const { gap } = this.#geometry;
    const { x, y, size } = this.rectOf(this.cursor);
    context.strokeStyle = getComputedStyle(this.canvas).color;
    context.lineWidth = 2;
    context.strokeRect(x, y, size - gap, size - gap);
  }
}
