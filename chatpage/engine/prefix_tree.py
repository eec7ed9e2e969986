"""Where computed tokens are found again: a tree whose nodes are blocks.

Invariant: the path from a root to a node spells the tokens whose KV the node's block holds. Only committed tokens are in the
tree, only full nodes have children. Who holds a block holds the path to it and frees the tail first: leaves are evicted first.

    block size 4          root ── [5 6 7 8] block 2 ─┬─ [9 9 1 2] block 7
                                                     └─ [9 9 3]   block 4    a partial tail, live or cached

    match of 5 6 7 8 9 9 1 5:  block 2 whole, then the child with the longest common prefix: block 7, of which 3 rows are used

Children are looked up by their exact tokens. The dict hashes them, but equality decides, so a hash collision cannot show one
user what another one wrote. Roots are keyed by model identity and cache salt; nothing is ever found across roots.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

from chatpage.engine.block_pool import BlockId, BlockPool, BlockState

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RootKey:
    """What must agree before two sequences may share a block.

    Args:
        model_id: Identity of the weights and their dtype, not only their name.
        cache_salt: Separates users; equal prompts under different salts never meet.
    """

    model_id: str
    cache_salt: str


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The longest cached prefix of a prompt: `num_tokens` tokens, in `block_ids`. The last block may be used only in part.

    It is true until the next change of the pool: adopt it at once.
    """

    block_ids: tuple[BlockId, ...]
    num_tokens: int


NO_MATCH = PrefixMatch((), 0)


class Node:
    """A root (it has no block), or a block with the committed tokens it holds."""

    __slots__ = ("__weakref__", "block_id", "children", "is_attached", "ordered", "parent", "tokens")

    def __init__(self, parent: "Node | None", block_id: BlockId, tokens: Tokens) -> None:
        self.parent = parent
        self.block_id = block_id
        self.tokens = tokens
        self.children: dict[Tokens, Node] = {}
        self.ordered: list[Tokens] = []  # the keys of `children`, sorted
        self.is_attached = True  # False once no lookup can reach it


_NO_BLOCK = BlockId(-1)


class PrefixTree:
    """Finds the blocks that hold a prefix; decides nothing about who holds them."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._nodes: list[Node | None] = [None] * pool.num_blocks
        # A root lives as long as a node or a block table needs it, so salts that went out of use leave nothing behind.
        self._roots: WeakValueDictionary[RootKey, Node] = WeakValueDictionary()
        pool.attach(self)

    @property
    def num_nodes(self) -> int:
        return sum(node is not None for node in self._nodes)

    def root(self, key: RootKey) -> Node:
        """Return the root of `key`; the caller's reference keeps it alive."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Node(None, _NO_BLOCK, ())
        return root

    def node_of(self, block_id: BlockId) -> Node | None:
        """Return the node that names `block_id`, or None if no lookup can find the block."""
        return self._nodes[block_id]

    def num_rows(self, block_id: BlockId) -> int:
        """Count the rows of `block_id` that a lookup can find."""
        node = self._nodes[block_id]
        return 0 if node is None else len(node.tokens)

    def match(self, key: RootKey, token_ids: Sequence[int], limit: int | None = None) -> PrefixMatch:
        """Find the longest cached prefix of `token_ids`, of at most `limit` tokens, changing nothing.

        A limit inside a full block gives that block in part. Cost: O(tokens) to hash them, O(log children) for the last block.
        """
        node = self._roots.get(key)
        if node is None:
            return NO_MATCH
        tokens = tuple(token_ids) if limit is None else tuple(token_ids[: max(limit, 0)])
        size = self._pool.block_size
        block_ids: list[BlockId] = []
        for start in range(0, len(tokens), size):
            wanted = tokens[start : start + size]
            child = node.children.get(wanted)
            if child is None or len(wanted) < size:
                child, num_rows = _closest_child(node, wanted)
                if child is None:
                    return PrefixMatch(tuple(block_ids), start)
                return PrefixMatch((*block_ids, child.block_id), start + num_rows)
            block_ids.append(child.block_id)
            node = child
        return PrefixMatch(tuple(block_ids), len(tokens))

    def publish(self, parent: Node, block_id: BlockId, tokens: Tokens) -> Node | None:
        """Let `tokens` under `parent` be found in `block_id`, unless another block has them already.

        The block has no node yet, or one whose tokens `tokens` extend: that node is rekeyed. If some other node begins with
        `tokens`, a second block for them would only waste memory: `block_id` loses its node, and the other one is returned.

        Cost: O(log children) and O(block size), whatever the length of the sequence.

        Returns:
            The other node that begins with `tokens`, else None.
        """
        assert parent.is_attached, "a block is published under a node that nobody can find"
        ordered = parent.ordered
        node = self._nodes[block_id]
        at = bisect_left(ordered, tokens)
        if at < len(ordered) and ordered[at][: len(tokens)] == tokens:
            other = parent.children[ordered[at]]
            assert other is not node, f"block {block_id} is published twice with the same tokens"
            if node is not None:
                self._remove(node)
            return other
        if node is None:
            self._nodes[block_id] = node = Node(parent, block_id, tokens)
            ordered.insert(at, tokens)
        else:
            assert node.parent is parent, f"block {block_id} is published under another parent"
            del parent.children[node.tokens]
            # The shorter key sorts before the longer one, mostly right before it.
            if ordered[at - 1] == node.tokens:
                ordered[at - 1] = tokens
            else:
                del ordered[bisect_left(ordered, node.tokens)]
                insort(ordered, tokens)
            node.tokens = tokens
        parent.children[tokens] = node
        return None

    def trim(self, block_id: BlockId, num_rows: int) -> None:
        """Forget what a used block holds behind its first `num_rows` rows, and all that follows it in the tree.

        This is eviction of rows: the one holder of the block uses no more than `num_rows` of them.
        """
        node = self._nodes[block_id]
        assert node is not None, f"block {block_id} has no node to trim"
        assert node.parent is not None
        parent, tokens = node.parent, node.tokens[:num_rows]
        self._remove(node)
        self._detach_below(node)
        self.publish(parent, block_id, tokens)

    def keep(self, block_id: BlockId) -> bool:
        """Tell whether a node names the block; the pool asks as its last holder leaves.

        Only the source of a pending copy can outlive the holders of the blocks before it: its sequence was freed before the
        copy was given up. Those blocks would be evicted before it, so it is forgotten instead.
        """
        node = self._nodes[block_id]
        if node is None:
            return False
        parent = node.parent
        if parent is None or parent.parent is None or self._pool.ref_count(parent.block_id):
            return True
        self._remove(node)
        self._detach_below(node)
        return False

    def evict(self, block_id: BlockId) -> None:
        """Remove the node of a block that the pool is about to hand out."""
        node = self._nodes[block_id]
        assert node is not None, f"block {block_id} is evicted but has no node"
        for child in node.children.values():
            # Leaves go first. What is left can only be the source of a pending copy, see `keep`.
            assert self._pool.ref_count(child.block_id), f"block {block_id} is evicted before block {child.block_id} after it"
        self._remove(node)
        self._detach_below(node)

    def forget(self, key: RootKey) -> None:
        """Make everything under one root impossible to find; its cached free blocks become blank.

        Blocks in use stay with their holders until released, and what those holders compute later is not published either.
        """
        root = self._roots.pop(key, None)
        if root is not None:
            root.is_attached = False
            self._detach_below(root)

    def clear(self) -> None:
        """Forget every root."""
        for key in list(self._roots):
            self.forget(key)

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        del parent.ordered[bisect_left(parent.ordered, node.tokens)]
        self._nodes[node.block_id] = None
        node.is_attached = False

    def _detach_below(self, top: Node) -> None:
        pending = [top]
        while pending:
            node = pending.pop()
            for child in node.children.values():
                child.is_attached = False
                self._nodes[child.block_id] = None
                if not self._pool.ref_count(child.block_id):
                    self._pool.make_blank(child.block_id)
                pending.append(child)
            node.children, node.ordered = {}, []

    def check_integrity(self, copy_sources: Collection[BlockId] = ()) -> None:
        """Prove that links, keys, sorted indexes and the pool's states agree.

        Args:
            copy_sources: Blocks that a pending copy pins; only they may be used while the block before them is not.

        Raises:
            AssertionError: They disagree; the message names the block.
        """
        reached = set()
        for node in self._walk():
            reached.add(node.block_id)
            self._check_node(node, may_stand_alone=node.block_id in copy_sources)
        for i, node_or_none in enumerate(self._nodes):
            assert (node_or_none is not None) == (i in reached), (
                f"block {i} has a node that no root leads to, or the other way round"
            )
            is_cached = self._pool.state(BlockId(i)) is BlockState.CACHED
            assert not is_cached or i in reached, f"block {i} is cached free but cannot be found"

    def _walk(self) -> Iterator[Node]:
        pending = list(self._roots.values())
        while pending:
            node = pending.pop()
            for tokens, child in node.children.items():
                assert child.parent is node, f"block {child.block_id} is listed under a node that is not its parent"
                assert child.tokens == tokens, f"block {child.block_id} is listed under other tokens"
                yield child
                pending.append(child)
            assert node.ordered == sorted(node.children), f"the sorted children of block {node.block_id} are out of step"

    def _check_node(self, node: Node, *, may_stand_alone: bool) -> None:
        name, size = f"block {node.block_id}", self._pool.block_size
        assert self._nodes[node.block_id] is node, f"{name} is named by two nodes"
        assert node.is_attached, f"{name} can be found but is marked as detached"
        assert 0 < len(node.tokens) <= size, f"{name} has {len(node.tokens)} committed rows of {size}"
        assert not node.children or len(node.tokens) == size, f"{name} is partial and has children"
        assert self._pool.state(node.block_id) is not BlockState.BLANK, f"{name} is blank but can be found"
        parent = node.parent
        if parent is not None and parent.parent is not None and self._pool.ref_count(node.block_id) and not may_stand_alone:
            assert self._pool.ref_count(parent.block_id), f"{name} is used but block {parent.block_id} before it is not"


def _closest_child(node: Node, wanted: Tokens) -> tuple[Node | None, int]:
    """Find the child that shares the longest prefix with `wanted`, and its length: a neighbour of the insertion point."""
    ordered = node.ordered
    at = bisect_left(ordered, wanted)
    best, best_rows = None, 0
    for tokens in ordered[max(at - 1, 0) : at + 1]:
        num_rows = _num_common(tokens, wanted)
        if num_rows > best_rows:
            best, best_rows = node.children[tokens], num_rows
    # A child that ends right there can be continued in place; one that goes on has to be copied.
    return node.children.get(wanted[:best_rows], best), best_rows


def _num_common(a: Tokens, b: Tokens) -> int:
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return min(len(a), len(b))
