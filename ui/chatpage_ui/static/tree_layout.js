/**
 * Where the nodes of a conversation stand on its map: parents above their children, no two in one place.
 *
 *     ●                rows: one per node or pill, from the root down
 *     +12              a pill: a chain of single children, collapsed
 *     ●───┬───┐        columns: as narrow as whole subtrees can be pushed together (their contours are compared, Reingold
 *     ●   ●   ●        and Tilford 1981); a parent stands above the deepest of its subtrees, so a long branch is a straight line
 *
 * Invariant: a pure function of the tree and of what must stay visible, in time proportional to the nodes; nothing recurses.
 */

const SHORTEST_PILL = 6;

/**
 * @typedef {Object} Item a node, or a pill of several
 * @property {string} key
 * @property {string[]} ids the nodes it stands for, upper first
 * @property {boolean} isPill
 * @property {?Item} parent
 * @property {Item[]} children
 * @property {number} x column
 * @property {number} y row
 */

/**
 * Place a tree.
 * @param {{childrenOf: function(?string): string[]}} tree
 * @param {function(string): boolean} isShown whether a node must not vanish into a pill
 * @returns {{items: Item[], width: number, height: number}} parents before children; `width` and `height` in columns and rows
 */
export function layoutTree(tree, isShown) {
  const root = { key: "", ids: [], isPill: false, parent: null, children: [], x: 0, y: -1 };
  const items = collect(tree, root, isShown);
  for (let i = items.length - 1; i >= 0; i -= 1) placeChildren(items[i]);
  placeChildren(root);
  let [left, right, height] = [Infinity, -Infinity, 0];
  root.x = 0;
  for (const item of items) {
    item.x = item.parent.x + item.dx;
    left = Math.min(left, item.x);
    right = Math.max(right, item.x);
    height = Math.max(height, item.y + 1);
  }
  for (const item of items) {
    item.x -= left;
    if (item.parent === root) item.parent = null;
  }
  return { items, width: items.length ? right - left + 1 : 0, height };
}

function collect(tree, root, isShown) {
  const items = [];
  const open = [[root, tree.childrenOf(null)]];
  while (open.length) {
    const [parent, ids] = open.pop();
    for (const id of ids) {
      const chain = ids.length === 1 && parent !== root ? chainFrom(tree, id, isShown) : [];
      const isPill = chain.length >= SHORTEST_PILL;
      const item = { key: isPill ? `+${id}` : id, ids: isPill ? chain : [id], isPill, parent, children: [], y: parent.y + 1 };
      parent.children.push(item);
      items.push(item);
    }
    for (const child of parent.children) open.push([child, tree.childrenOf(child.ids.at(-1))]);
  }
  return items;
}

/** Return the nodes from `id` down that each have one child and may be left out. */
function chainFrom(tree, id, isShown) {
  const chain = [];
  for (let children = tree.childrenOf(id); children.length === 1 && !isShown(id); children = tree.childrenOf(id)) {
    chain.push(id);
    id = children[0];
  }
  return chain;
}

/**
 * Set the children's places beside each other, relative to their parent (`dx`), and the contours of the parent's subtree.
 * A contour is a list from the top down: {dx: from the one above, next}.
 */
function placeChildren(item) {
  const places = [];
  let [left, right, depth] = [null, null, 0];
  for (const child of item.children) {
    const place = left ? separation(right, places.at(-1), child.left) : 0;
    if (left) join({ left, right, depth, place: places.at(-1) }, child, place);
    left ??= child.left;
    right = child.right;
    depth = Math.max(depth, child.depth);
    places.push(place);
  }
  const deepest = places.filter((_, i) => item.children[i].depth === depth);
  const middle = places.length ? (deepest[0] + deepest.at(-1)) / 2 : 0;
  item.children.forEach((child, i) => (child.dx = places[i] - middle));
  if (left) [left.dx, right.dx] = [places[0] - middle, places.at(-1) - middle];
  item.left = { dx: 0, next: left };
  item.right = { dx: 0, next: right };
  item.depth = depth + 1;
}

/** Return where the next tree can stand, right of those whose right contour begins at `place`. */
function separation(right, place, left) {
  let [gap, a, b] = [0, place, 0];
  let [r, l] = [right, left];
  while (r && l) {
    gap = Math.max(gap, a + 1 - b);
    [r, l] = [r.next, l.next];
    a += r?.dx ?? 0;
    b += l?.dx ?? 0;
  }
  return gap;
}

/** Let the contours of the trees so far, and of the next one at `place`, go on in each other where one is deeper. */
function join(forest, child, place) {
  const levels = Math.min(forest.depth, child.depth);
  let [l, r, childL, childR] = [forest.left, forest.right, child.left, child.right];
  let [a, b, c, d] = [0, forest.place, place, place];
  for (let level = 1; level < levels; level += 1) {
    [l, r, childL, childR] = [l.next, r.next, childL.next, childR.next];
    a += l.dx;
    b += r.dx;
    c += childL.dx;
    d += childR.dx;
  }
  if (forest.depth > levels) {
    r.next.dx += b - d;
    childR.next = r.next;
  } else if (child.depth > levels) {
    childL.next.dx += c - a;
    l.next = childL.next;
  }
}
