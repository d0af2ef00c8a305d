"""Who runs, who waits, and who gives way."""

from tpu_infer.engine.scheduler import Plan, Scheduler
from tpu_infer.engine.sequence import Sequence

from .fake_runner import limits
from .harness import submit


def add(scheduler: Scheduler, name: str, prompt: int, max_tokens: int = 30) -> Sequence:
    message = submit(name, prompt, max_tokens)
    arrival = len(scheduler.waiting) + len(scheduler.running)
    sequence = Sequence(message, arrival, scheduler.final_tokens(message))
    scheduler.add(sequence)
    return sequence


def rows(plan: Plan | None) -> list[tuple[str, int]]:
    assert plan is not None
    return [(s.submit.id, n) for s, n in zip(plan.sequences, plan.counts.tolist(), strict=True)]


def settle(*plans: Plan | None) -> None:
    """Commit a token to each sampled row."""
    for plan in plans:
        assert plan is not None
        for sequence, sampled in zip(plan.sequences, plan.sample.tolist(), strict=True):
            if sampled:
                sequence.output_ids.append(1)


def test_decode_rows_first_then_begun_prefills_then_waiting_ones_within_the_budget():
    scheduler = Scheduler(limits(token_budget=16))
    add(scheduler, "a", 3)
    assert rows(scheduler.plan()) == [("a", 3)]
    add(scheduler, "b", 20)
    assert rows(scheduler.plan()) == [("a", 1), ("b", 15)]
    add(scheduler, "c", 30)
    plan = scheduler.plan()
    assert rows(plan) == [("a", 1), ("b", 5), ("c", 10)]
    assert plan is not None
    assert plan.kind == "prefill"
    assert plan.sample.tolist() == [1, 1, 0]
    assert [sequence.submit.id for sequence in plan.opened] == ["c"]


def test_only_decode_rows_make_a_decode_step():
    scheduler = Scheduler(limits())
    add(scheduler, "a", 3)
    scheduler.plan()
    plan = scheduler.plan()
    assert plan is not None
    assert plan.kind == "decode"
    assert plan.ends.tolist() == [4]


def test_a_short_budget_admits_no_more_rows_than_it_can_decode():
    scheduler = Scheduler(limits(token_budget=2, slots=4))
    for name in "abc":
        add(scheduler, name, 1)
    assert rows(scheduler.plan()) == [("a", 1), ("b", 1)]
    assert rows(scheduler.plan()) == [("a", 1), ("b", 1)]


def test_slots_bound_the_rows_and_a_freed_one_goes_to_the_oldest_waiting():
    scheduler = Scheduler(limits(slots=2))
    first = add(scheduler, "a", 2)
    for name in "bcd":
        add(scheduler, name, 2)
    assert rows(scheduler.plan()) == [("a", 2), ("b", 2)]
    scheduler.remove(first)
    assert rows(scheduler.plan()) == [("b", 1), ("c", 2)]


def test_a_waiting_sequence_leaves_each_running_one_a_page():
    scheduler = Scheduler(limits(pages=6, page_size=4, max_model_len=24))
    add(scheduler, "a", 8, 8)
    add(scheduler, "b", 16, 4)
    assert rows(scheduler.plan()) == [("a", 8)], "b's four pages would leave a none to grow into"
    scheduler.remove(next(iter(scheduler.running)))
    assert rows(scheduler.plan()) == [("b", 16)]


def test_a_waiting_sequence_may_have_every_page_when_nothing_runs():
    scheduler = Scheduler(limits(pages=4, page_size=4))
    add(scheduler, "a", 16, 1)
    assert rows(scheduler.plan()) == [("a", 16)]


def test_nobody_overtakes_the_oldest_waiting():
    scheduler = Scheduler(limits(pages=6, page_size=4))
    add(scheduler, "a", 8, 8)
    add(scheduler, "big", 16, 4)
    add(scheduler, "small", 1, 1)
    assert rows(scheduler.plan()) == [("a", 8)]


def test_the_youngest_gives_way_and_waits_in_front_until_its_token_is_known():
    scheduler = Scheduler(limits(pages=6, page_size=4))
    old, young = add(scheduler, "old", 7, 16), add(scheduler, "young", 7, 16)
    settle(scheduler.plan(), scheduler.plan())  # old and young hold two full pages each
    settle(scheduler.plan())  # and a third
    late = add(scheduler, "late", 1, 1)
    settle(scheduler.plan(), scheduler.plan())
    in_flight = scheduler.plan()  # old and young at 12 tokens
    plan = scheduler.plan()
    assert rows(plan) == [("old", 1)]
    assert plan is not None
    assert plan.preempted == 1
    assert list(scheduler.waiting) == [young, late]
    assert list(scheduler.running) == [old]
    assert young.slot is None
    assert not young.settled
    settle(in_flight)
    assert young.settled


def test_a_preempted_sequence_is_not_resumed_before_its_token_is_committed():
    scheduler = Scheduler(limits(pages=6, page_size=4))
    old, young = add(scheduler, "old", 7, 16), add(scheduler, "young", 7, 16)
    plans = [scheduler.plan() for _ in range(7)]
    assert list(scheduler.waiting) == [young]
    scheduler.remove(old)
    assert scheduler.plan() is None
    settle(*plans)
    plan = scheduler.plan()
    assert rows(plan) == [("young", 13)], "prompt and answer so far are computed again"
    assert plan is not None
    assert plan.opened == [young]


def test_the_youngest_skips_a_step_rather_than_take_a_page_from_an_older_one():
    scheduler = Scheduler(limits(pages=4, page_size=4))
    old, young = add(scheduler, "old", 1, 4), add(scheduler, "young", 8, 5)
    assert rows(scheduler.plan()) == [("old", 1), ("young", 8)]
    scheduler.blocks.allocators[0].allocate(owner=2, count=1)  # the last free page
    assert [rows(scheduler.plan()) for _ in range(3)] == [[("old", 1)]] * 3
    assert scheduler.plan() is None, "old's last token is in flight, and it is not taken for young"
    assert list(scheduler.running) == [old, young]
    scheduler.remove(old)
    assert rows(scheduler.plan()) == [("young", 1)]


def test_a_sequence_whose_last_token_is_in_flight_is_not_preempted():
    scheduler = Scheduler(limits(pages=4, page_size=4))
    old, young = add(scheduler, "old", 4, 5), add(scheduler, "young", 8, 1)
    assert rows(scheduler.plan()) == [("old", 4), ("young", 8)]
    scheduler.blocks.allocators[0].allocate(owner=2, count=1)  # the last free page
    assert scheduler.plan() is None, "young's pages are free at the next commit"
    scheduler.remove(young)
    assert rows(scheduler.plan()) == [("old", 1)]
    assert list(scheduler.running) == [old]
