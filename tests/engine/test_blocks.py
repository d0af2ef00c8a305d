import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tpu_infer.engine.blocks import BlockTables, OutOfPagesError, PageAllocator

from .fake_runner import limits


def test_every_page_can_be_given_and_then_no_more():
    allocator = PageAllocator(3)
    assert sorted(allocator.allocate(0, 2) + allocator.allocate(1, 1)) == [0, 1, 2]
    with pytest.raises(OutOfPagesError, match="1 pages asked for, 0 of 3 free"):
        allocator.allocate(1, 1)


def test_a_shortage_takes_nothing():
    allocator = PageAllocator(3)
    with pytest.raises(OutOfPagesError):
        allocator.allocate(0, 4)
    assert allocator.free == 3
    assert allocator.owned(0) == ()


def test_check_notices_a_page_held_twice():
    allocator = PageAllocator(4)
    page = allocator.allocate(0, 1)
    allocator._free.extend(page)
    with pytest.raises(AssertionError, match="held twice"):
        allocator.check()


def test_tables_list_pages_in_order_and_are_cleared():
    tables = BlockTables(limits(pages=8, groups=2))
    tables.extend(1, 2)
    tables.extend(0, 1)
    tables.extend_each([1])
    for allocator, table in zip(tables.allocators, tables.tables, strict=True):
        assert tuple(table[1, :3].tolist()) == allocator.owned(1)
    assert tables.capacity.tolist() == [4, 12, 0, 0]
    tables.release(1)
    assert not any(table[1].any() for table in tables.tables)
    assert tables.capacity.tolist() == [4, 0, 0, 0]


class AllocatorMachine(RuleBasedStateMachine):
    """Against a model: page counts by owner."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = PageAllocator(11)
        self.held: dict[int, list[int]] = {}

    @rule(owner=st.integers(0, 3), count=st.integers(0, 5))
    def allocate(self, owner: int, count: int) -> None:
        if count > 11 - sum(map(len, self.held.values())):
            with pytest.raises(OutOfPagesError):
                self.allocator.allocate(owner, count)
        else:
            self.held.setdefault(owner, []).extend(self.allocator.allocate(owner, count))

    @rule(owner=st.integers(0, 3))
    def release(self, owner: int) -> None:
        self.allocator.release(owner)
        self.held.pop(owner, None)

    @invariant()
    def adds_up(self) -> None:
        self.allocator.check()
        assert self.allocator.free == 11 - sum(map(len, self.held.values()))
        for owner in range(4):
            assert list(self.allocator.owned(owner)) == self.held.get(owner, [])


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, deadline=None)
