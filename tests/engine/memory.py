"""A block memory for tests: pool, tree and their tables; and the last sentence of every test: the pool is whole again."""

from collections.abc import Sequence

from chatpage.engine.accounting import check_integrity
from chatpage.engine.block_pool import BlockCopy, BlockId, BlockPool
from chatpage.engine.block_table import BlockTable, pin
from chatpage.engine.prefix_tree import PrefixTree, RootKey

ALICE = RootKey("model", "alice")
BOB = RootKey("model", "bob")


class BlockMemory:
    """Pool and tree with every live table remembered, so that integrity can be checked at any time."""

    def __init__(self, num_blocks: int = 16, block_size: int = 4) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.tree = PrefixTree(self.pool)
        self.tables: list[BlockTable] = []
        self.copies: list[BlockCopy] = []

    def start(self, tokens: Sequence[int], root: RootKey = ALICE, limit: int | None = None) -> BlockTable:
        """Begin a sequence on what is cached of `tokens`."""
        table = self.track(BlockTable(self.pool, self.tree, root))
        table.adopt(self.tree.match(root, tokens, limit))
        return table

    def compute(self, table: BlockTable, tokens: Sequence[int]) -> list[BlockCopy]:
        """Run one step that brings `table` to `tokens`; return the copies it took."""
        copies = table.prepare(len(tokens))
        for copy in copies:
            self.pool.release(copy.src)
        table.commit(tokens, len(tokens))
        self.check()
        return copies

    def run(self, tokens: Sequence[int], root: RootKey = ALICE) -> BlockTable:
        """Begin a sequence and compute all of it."""
        table = self.start(tokens, root)
        self.compute(table, tokens)
        return table

    def cache(self, tokens: Sequence[int], root: RootKey = ALICE) -> tuple[BlockId, ...]:
        """Compute `tokens` and let them go: they stay cached, in the blocks returned."""
        table = self.run(tokens, root)
        block_ids = table.block_ids
        self.free(table)
        return block_ids

    def fork(self, table: BlockTable, num_tokens: int) -> BlockTable:
        return self.track(table.fork(num_tokens))

    def pin(self, tokens: Sequence[int], root: RootKey = ALICE) -> BlockTable:
        return self.track(pin(self.pool, self.tree, root, tokens))

    def free(self, *tables: BlockTable) -> None:
        for table in tables:
            table.free()
            self.tables.remove(table)
        self.check()

    def num_found(self, tokens: Sequence[int], root: RootKey = ALICE) -> int:
        return self.tree.match(root, tokens).num_tokens

    def track(self, table: BlockTable) -> BlockTable:
        self.tables.append(table)
        return table

    def check(self) -> None:
        check_integrity(self.pool, self.tree, self.tables, self.copies)

    def assert_the_pool_is_whole_again(self) -> None:
        """Free what lives, then everything must be available, and after a clear every block is blank."""
        self.free(*self.tables)
        assert self.pool.num_used == 0
        assert self.pool.num_available == self.pool.num_blocks
        self.tree.clear()
        self.check()
        assert self.pool.num_blank == self.pool.num_blocks
        assert self.tree.num_nodes == 0
