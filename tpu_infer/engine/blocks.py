"""Pages of the KV cache: who holds which, and the block tables that steps are packed from."""

import numpy as np

from tpu_infer.errors import EngineError
from tpu_infer.step import Limits


class OutOfPagesError(EngineError):
    """More pages were asked for than are free; nothing was taken."""


class PageAllocator:
    """The pages of one KV group, ids 0 to pages - 1. An owner is the slot of a running sequence."""

    def __init__(self, pages: int) -> None:
        self.pages = pages
        self._free = list(range(pages - 1, -1, -1))
        self._owned: dict[int, list[int]] = {}

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def owned(self, owner: int) -> tuple[int, ...]:
        """The owner's pages, in the order in which it got them."""
        return tuple(self._owned.get(owner, ()))

    def allocate(self, owner: int, count: int) -> list[int]:
        """Give `count` more pages to the owner and return their ids. Raises OutOfPagesError, taking none."""
        if count > len(self._free):
            raise OutOfPagesError(f"{count} pages asked for, {len(self._free)} of {self.pages} free")
        pages = [self._free.pop() for _ in range(count)]
        self._owned.setdefault(owner, []).extend(pages)
        return pages

    def release(self, owner: int) -> None:
        """Take back all of the owner's pages."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def check(self) -> None:
        """Assert that every page is either free or held by one owner."""
        held = [page for pages in self._owned.values() for page in pages]
        assert sorted(self._free + held) == list(range(self.pages)), "a page is lost or held twice"


class BlockTables:
    """Block tables by slot, one table and one allocator for each KV group.

    `tables[g]` is int32 [slots, pages of the longest sequence]; entries past a slot's pages are 0. A slot holds
    equally many pages in every group; `capacity` (int32 [slots]) is how many tokens they hold.
    """

    def __init__(self, limits: Limits) -> None:
        self.page_size = limits.page_size
        self.allocators = tuple(PageAllocator(pages) for pages in limits.pages)
        width = self.pages_for(limits.max_model_len)
        self.tables = tuple(np.zeros((limits.slots, min(width, pages)), np.int32) for pages in limits.pages)
        self.capacity = np.zeros(limits.slots, np.int32)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def fits(self, pages: int) -> bool:
        """Whether every group has so many free pages."""
        return all(allocator.free >= pages for allocator in self.allocators)

    def extend(self, slot: int, pages: int) -> None:
        """Append pages to a slot's table in every group; ask `fits` first."""
        held = int(self.capacity[slot]) // self.page_size
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            table[slot, held : held + pages] = allocator.allocate(slot, pages)
        self.capacity[slot] += pages * self.page_size

    def extend_each(self, slots: list[int]) -> None:
        """Append one page to each of several slots' tables in every group; ask `fits` first."""
        held = self.capacity[slots] // self.page_size
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            table[slots, held] = [allocator.allocate(slot, 1)[0] for slot in slots]
        self.capacity[slots] += self.page_size

    def release(self, slot: int) -> None:
        """Free a slot's pages."""
        held = int(self.capacity[slot]) // self.page_size
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            allocator.release(slot)
            table[slot, :held] = 0
        self.capacity[slot] = 0

    def check(self) -> None:
        """Assert that allocators, tables and capacities agree."""
        for allocator, table in zip(self.allocators, self.tables, strict=True):
            allocator.check()
            for slot, capacity in enumerate(self.capacity.tolist()):
                held = capacity // self.page_size
                assert allocator.owned(slot) == tuple(table[slot, :held].tolist()), "table and allocator differ"
                assert not table[slot, held:].any(), "a table names a page past the slot's own"
