"""What comes out of the loop, whatever the schedule: tokens, finishes, failures, and the order of it all."""

import numpy as np
import pytest

from tpu_infer.messages import Failed, Submit, Tokens
from tpu_infer.step import SamplerFlags, decode_command
from tpu_infer.types import FinishReason

from .fake_runner import FakeRunner, continuation, limits
from .harness import Harness, submit

MIXED = [
    submit("a", 5, 9),
    submit("b", 23, 12, seed=3, temperature=0.7),
    submit("c", 1, 20),
    submit("d", 40, 3, seed=-(2**63), temperature=1.0, top_k=4),
    submit("e", 17, 1),
    submit("f", 8, 30),
    submit("g", 16, 16, seed=2**63 - 1),
]


def expected(messages: list[Submit], runner: FakeRunner) -> dict[str, list[int]]:
    return {message.id: continuation(message, runner.limits) for message in messages}


def test_alone_each_sequence_gets_the_oracles_tokens():
    for message in MIXED:
        harness = Harness(FakeRunner(limits()))
        assert harness.run(message) == expected([message], harness.runner)
        assert harness.finish == {message.id: FinishReason.LENGTH}
        computed = len(message.prompt_ids) + len(harness.tokens[message.id]) - 1
        assert harness.runner.written == computed, "no overshoot where the length is known"


@pytest.mark.parametrize("chunk", [None, 1, 3, 16])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_batched_and_in_chunks_tokens_are_those_of_alone(chunk: int | None, groups: int, slots: int):
    harness = Harness(FakeRunner(limits(slots=slots, groups=groups, token_budget=32)), prefill_chunk=chunk)
    assert harness.run(*MIXED) == expected(MIXED, harness.runner)
    assert harness.value("tpu_infer_preemptions_total") == 0
    if chunk is not None:
        assert all(np.diff(step.view("query_offsets")).max() <= chunk for step in harness.runner.steps)


def test_preempted_tokens_are_those_of_alone():
    harness = Harness(FakeRunner(limits(pages=14, token_budget=32)), prefill_chunk=16)
    messages = [*MIXED, *(submit(f"long{i}", 3 + i, 40, seed=i, temperature=0.5) for i in range(4))]
    assert harness.run(*messages) == expected(messages, harness.runner)
    assert harness.value("tpu_infer_preemptions_total") > 0
    assert harness.runner.opened > len(messages), "a sequence that resumes opens a slot again"
    assert set(harness.finish.values()) == {FinishReason.LENGTH}


def test_late_submits_join_a_running_batch():
    harness = Harness(FakeRunner(limits(pages=20)))
    for message in MIXED:
        harness.submit(message)
        harness.engine.step()
        harness.engine.step()
    harness.drain()
    assert harness.tokens == expected(MIXED, harness.runner)


def test_a_stop_id_ends_a_sequence_and_is_its_last_token():
    answer = continuation(submit("a", 5, 10), limits())
    stopped = submit("a", 5, 10, stop_ids=(96, answer[3]))
    harness = Harness(FakeRunner(limits()))
    harness.run(stopped, submit("b", 5, 10))
    assert harness.tokens["a"] == answer[: answer.index(answer[3]) + 1]
    assert harness.finish == {"a": FinishReason.STOP, "b": FinishReason.LENGTH}


def test_a_stop_id_on_the_last_token_is_a_stop():
    answer = continuation(submit("a", 5, 4), limits())
    harness = Harness(FakeRunner(limits()))
    harness.run(submit("a", 5, 4, stop_ids=(answer[-1],)))
    assert harness.finish["a"] is FinishReason.STOP


def test_the_token_computed_past_a_stop_is_not_reported():
    answer = continuation(submit("a", 5, 10), limits())
    harness = Harness(FakeRunner(limits()))
    harness.run(submit("a", 5, 10, stop_ids=(answer[0],)))
    assert harness.tokens["a"] == answer[:1]
    assert len(harness.runner.steps) == 2, "the second step was in flight when the first was read"
    assert harness.value("tpu_infer_output_tokens_total") == 1


@pytest.mark.parametrize("max_tokens", [1, 2, 7])
def test_max_tokens_costs_no_step_too_many(max_tokens: int):
    harness = Harness(FakeRunner(limits()))
    harness.run(submit("a", 5, max_tokens))
    assert len(harness.tokens["a"]) == max_tokens == len(harness.runner.steps)


@pytest.mark.parametrize(("prompt", "tokens"), [(63, 1), (62, 2), (60, 4), (33, 31)])
def test_the_models_length_bounds_an_answer(prompt: int, tokens: int):
    harness = Harness(FakeRunner(limits(max_model_len=64)))
    harness.run(submit("a", prompt, 1000))
    assert len(harness.tokens["a"]) == tokens
    assert harness.finish["a"] is FinishReason.LENGTH


@pytest.mark.parametrize("prompt", [0, 64, 65])
def test_a_prompt_that_leaves_no_room_is_refused(prompt: int):
    harness = Harness(FakeRunner(limits(max_model_len=64)))
    harness.run(submit("a", prompt))
    assert harness.failed == {"a": "capacity"}


def test_what_could_never_fit_the_cache_is_refused_and_what_just_fits_runs():
    harness = Harness(FakeRunner(limits(pages=5, page_size=4)))
    harness.run(submit("fits", 11, 10), submit("not", 11, 11))
    assert harness.failed == {"not": "capacity"}
    assert len(harness.tokens["fits"]) == 10
    (refusal,) = [m for batch in harness.batches for m in batch if isinstance(m, Failed)]
    assert "needs" not in refusal.message
    assert "6 pages" in refusal.message


def test_a_cancel_at_any_moment_frees_everything_and_disturbs_nobody():
    others = [submit("b", 20, 12), submit("c", 9, 20), submit("d", 6, 9)]
    for moment in range(24):
        harness = Harness(FakeRunner(limits(pages=16)), prefill_chunk=8)
        harness.submit(submit("a", 21, 12), *others)
        for _ in range(moment):
            harness.engine.step()
            harness.check()
        said = len(harness.tokens.get("a", []))
        harness.engine.cancel("a")
        harness.check()
        harness.drain()
        assert len(harness.tokens.get("a", [])) == said, "a cancelled sequence spoke"
        assert {k: v for k, v in harness.tokens.items() if k != "a"} == expected(others, harness.runner)


def test_a_cancelled_id_can_be_used_again_while_its_old_result_is_in_flight():
    harness = Harness(FakeRunner(limits()))
    harness.submit(submit("a", 5, 9))
    harness.engine.step()
    harness.engine.cancel("a")
    again = submit("a", 7, 4)
    assert harness.run(again) == expected([again], harness.runner)


def test_cancelling_an_unknown_id_is_nothing():
    harness = Harness(FakeRunner(limits()))
    harness.engine.cancel("nobody")
    assert not harness.engine.step()


def test_a_row_that_is_not_finite_fails_alone():
    harness = Harness(FakeRunner(limits(), poison={13: 8}))
    others = [submit("b", 9, 6), submit("c", 3, 9)]
    bad = submit("a", 5, 9, seed=13)
    harness.run(bad, *others)
    assert harness.failed == {"a": "non_finite"}
    assert harness.tokens.pop("a") == continuation(bad, harness.runner.limits)[:3]
    assert harness.tokens == expected(others, harness.runner)


def test_a_chunk_in_the_middle_of_a_prompt_has_no_logits_to_judge():
    harness = Harness(FakeRunner(limits(token_budget=4), poison={13: 4}))
    message = submit("a", 10, 3, seed=13)
    assert harness.run(message) == expected([message], harness.runner)


def test_the_next_step_is_launched_before_a_result_is_waited_on():
    harness = Harness(FakeRunner(limits()))
    harness.run(submit("a", 5, 6), submit("b", 20, 5))
    calls, steps = harness.runner.calls, len(harness.runner.steps)
    assert steps > 5
    for step in range(steps - 1):
        assert calls.index(("sample", step + 1)) < calls.index(("result", step))
    assert [step for name, step in calls if name == "result"] == list(range(steps))


def test_one_list_for_each_commit_with_rows_in_order():
    harness = Harness(FakeRunner(limits()))
    harness.run(submit("a", 2, 3), submit("b", 2, 3))
    assert [[message.id for message in batch if isinstance(message, Tokens)] for batch in harness.batches] == [
        ["a", "b"]
    ] * 3


def test_log_probabilities_are_as_many_as_each_asked_for():
    harness = Harness(FakeRunner(limits()))
    asked = {"none": None, "zero": 0, "three": 3}
    harness.run(*(submit(name, 4, 2, logprobs=n) for name, n in asked.items()))
    for message in (m for batch in harness.batches for m in batch if isinstance(m, Tokens)):
        n, token = asked[message.id], message.token_ids[0]
        if n is None:
            assert message.logprobs is message.top_ids is message.top_logprobs is None
        else:
            assert message.logprobs == [-token]
            assert message.top_ids == [[token + i for i in range(n)]]
            assert message.top_logprobs == [[-token - i for i in range(n)]]


@pytest.mark.parametrize(
    ("message", "flags"),
    [
        (submit("a"), SamplerFlags()),
        (submit("a", top_k=5), SamplerFlags()),
        (submit("a", temperature=1.0), SamplerFlags(random=True)),
        (submit("a", temperature=1.0, top_k=5), SamplerFlags(random=True, filtered=True)),
        (submit("a", logprobs=0), SamplerFlags(logprobs=True)),
    ],
)
def test_a_step_asks_of_the_sampler_what_its_rows_need(message: Submit, flags: SamplerFlags):
    harness = Harness(FakeRunner(limits(token_budget=4)))
    harness.run(message)
    first, *_, last = harness.runner.steps
    assert first.sampler == SamplerFlags(), "no row of the first chunk is sampled"
    assert last.sampler == flags


def test_the_recorded_stream_of_commands_gives_the_same_on_another_runner():
    harness = Harness(FakeRunner(limits(pages=14, token_budget=32)))
    harness.run(*MIXED)
    twin = FakeRunner(harness.runner.limits)
    for command in harness.runner.stream:
        twin.apply(decode_command(command))
    assert twin.answers == harness.runner.answers
    assert twin.stream == harness.runner.stream


def test_metrics_count_steps_tokens_and_pages():
    harness = Harness(FakeRunner(limits(pages=64)))
    harness.submit(submit("a", 5, 4))
    harness.engine.step()
    assert harness.value("tpu_infer_running") == 1
    assert harness.value("tpu_infer_pages_used", group="0") == 2
    assert harness.value("tpu_infer_pages_total", group="0") == 64
    harness.drain()
    assert harness.value("tpu_infer_steps_total", kind="prefill") == 1
    assert harness.value("tpu_infer_steps_total", kind="decode") == 3
    assert harness.value("tpu_infer_prompt_tokens_total") == 5
    assert harness.value("tpu_infer_output_tokens_total") == 4
    assert harness.value("tpu_infer_step_seconds_count", kind="decode") == 3
    assert harness.value("tpu_infer_pages_used", group="0") == 0
    assert harness.value("tpu_infer_running") == 0
