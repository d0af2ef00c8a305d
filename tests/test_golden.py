"""The real model gives transformers' own tokens: alone, together, in chunks, preempted, sharded."""

from collections.abc import Callable
from typing import Any

import pytest

from tpu_infer import LLM, RequestOutput, SamplingParams
from tpu_infer.engine.thread import EngineThread
from tpu_infer.frontend import Frontend
from tpu_infer.metrics import Metrics

TOLERANCE = 1e-3

type Cases = list[dict[str, Any]]


def params_of(case: dict[str, Any]) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=len(case["greedy_ids"]), ignore_eos=True, logprobs=0)


def assert_golden(outputs: list[RequestOutput], cases: Cases) -> None:
    assert len(outputs) == len(cases)
    for output, case in zip(outputs, cases, strict=True):
        (choice,) = output.outputs
        assert output.prompt_token_ids == case["prompt_ids"]
        assert choice.token_ids == case["greedy_ids"]
        assert choice.logprobs is not None
        assert [entry.chosen.logprob for entry in choice.logprobs] == pytest.approx(case["logprobs"], abs=TOLERANCE)


def generate(llm: LLM, cases: Cases) -> list[RequestOutput]:
    return llm.generate([case["prompt_ids"] for case in cases], [params_of(case) for case in cases])


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(max_num_seqs=24, max_num_batched_tokens=64, max_model_len=512)


def test_alone(llm: LLM, golden: Cases) -> None:
    for case in golden:
        assert_golden(generate(llm, [case]), [case])


def test_all_at_once(llm: LLM, golden: Cases) -> None:
    assert_golden(generate(llm, golden), golden)


def test_text_prompts_and_text(llm: LLM, golden: Cases) -> None:
    cases = [case for case in golden if "prompt" in case][:4]
    texts = [case["prompt"] for case in cases]
    each = [
        SamplingParams(temperature=0, max_tokens=len(case["greedy_ids"]), ignore_eos=True, skip_special_tokens=False)
        for case in cases
    ]
    outputs = llm.generate(texts, each)
    assert [output.prompt for output in outputs] == texts
    assert [output.outputs[0].text for output in outputs] == [case["text"] for case in cases]


def test_chunks_of_16(llm: LLM, golden: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same compiled programs under an engine that computes prompts 16 tokens at a time."""
    service = llm.service
    limits = service.executor.limits
    engine = EngineThread(service.executor, Metrics(), prefill_chunk=16)
    frontend = Frontend(engine, service.tokenizer, max_model_len=limits.max_model_len, vocab_size=limits.vocab_size)
    monkeypatch.setattr(service, "frontend", frontend)
    engine.start()
    assert max(len(case["prompt_ids"]) for case in golden) > 32, "no prompt would be cut twice"
    assert_golden(generate(llm, golden), golden)
    engine.close()


def test_preempted_for_want_of_pages(make_llm: Callable[..., LLM], golden: Cases) -> None:
    llm = make_llm(
        max_num_seqs=8, max_num_batched_tokens=64, max_model_len=384, page_size=8, cache_pages=48, layers="scan"
    )
    assert_golden(generate(llm, golden), golden)
    preemptions = llm.service.metrics.registry.get_sample_value("tpu_infer_preemptions_total")
    assert preemptions is not None
    assert preemptions > 0


@pytest.fixture(scope="module")
def sharded_llm(make_llm: Callable[..., LLM]) -> LLM:
    return make_llm(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=384, layers="scan", tensor_parallel_size=3)


def test_three_tensor_shards(sharded_llm: LLM, golden: Cases) -> None:
    cases = golden[::4]  # devices that take turns on two cores are slow; all cases are the slow test's
    assert_golden(generate(sharded_llm, cases), cases)


@pytest.mark.slow
def test_three_tensor_shards_on_all_cases(sharded_llm: LLM, golden: Cases) -> None:
    assert_golden(generate(sharded_llm, golden), golden)


def test_logprobs_of_the_best(llm: LLM, golden: Cases) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, logprobs=5)
    (output,) = llm.generate(golden[0]["prompt_ids"], params)
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    for entry in logprobs:
        assert len(entry.top) == 5
        assert entry.top[0] == entry.chosen
        assert [item.logprob for item in entry.top] == sorted((item.logprob for item in entry.top), reverse=True)


def test_seeded_choices_repeat_and_differ(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.95, top_k=50, seed=7, n=3, max_tokens=8)
    first, second = (llm.generate("Once upon a time", params)[0] for _ in range(2))
    assert first.outputs == second.outputs
    assert len({tuple(choice.token_ids) for choice in first.outputs}) == 3
