"""The Python face, over a tiny random model in a directory: shapes of calls and results, limits, and wrong input."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_directory import CONTEXT, EOS, write_tiny_directory
from tpu_infer import LLM, FinishReason, SamplingParams
from tpu_infer.errors import (
    CacheDirectoryError,
    CapacityError,
    ConfigError,
    ContextLengthError,
    MeshError,
    ModelNotFoundError,
    RequestError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
OPTIONS: dict[str, Any] = {"layers": "scan", "max_num_seqs": 2, "max_num_batched_tokens": 32, "forbid_compiles": True}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_directory(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(directory, **OPTIONS) as llm:
        yield llm


def test_a_text_a_list_of_texts_ids_and_lists_of_ids(llm: LLM) -> None:
    (from_text,) = llm.generate("hello", GREEDY)
    (from_ids,) = llm.generate(from_text.prompt_token_ids, GREEDY)
    mixed: Any = ["hello", from_text.prompt_token_ids]
    both = llm.generate(mixed, GREEDY)
    assert from_text.prompt == "hello"
    assert from_ids.prompt is None
    assert [output.outputs for output in both] == [from_text.outputs, from_ids.outputs]
    assert from_text.outputs == from_ids.outputs
    (choice,) = from_text.outputs
    assert len(choice.token_ids) == 5
    assert choice.finish_reason is FinishReason.LENGTH
    assert choice.logprobs is None


def test_params_for_each_prompt(llm: LLM) -> None:
    each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 3)]
    assert [len(output.outputs[0].token_ids) for output in llm.generate(["a", "b"], each)] == [1, 3]
    with pytest.raises(ConfigError, match="2 for 3 prompts"):
        llm.generate(["a", "b", "c"], each)


def test_more_prompts_than_slots(llm: LLM) -> None:
    prompts = [f"prompt {number}" for number in range(7)]
    together = llm.generate(prompts, GREEDY)
    assert [output.outputs for output in together] == [llm.generate(prompt, GREEDY)[0].outputs for prompt in prompts]


def test_a_stop_token_ends_the_answer(llm: LLM) -> None:
    (free,) = llm.generate("stop", GREEDY)
    third = free.outputs[0].token_ids[2]
    (stopped,) = llm.generate("stop", SamplingParams(temperature=0, max_tokens=5, stop_token_ids=[third]))
    choice = stopped.outputs[0]
    assert choice.token_ids == free.outputs[0].token_ids[: free.outputs[0].token_ids.index(third) + 1]
    assert (choice.finish_reason, choice.stop_reason) == (FinishReason.STOP, third)


def test_prompt_one_under_the_limit_gives_one_token(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (output,) = llm.generate([1] * (CONTEXT - 1), params)
    assert len(output.outputs[0].token_ids) == 1
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1, 10 * CONTEXT])
def test_prompt_at_or_over_the_limit(llm: LLM, length: int) -> None:
    with pytest.raises(ContextLengthError, match=f"maximum context length is {CONTEXT} tokens"):
        llm.generate([1] * length, GREEDY)


@pytest.mark.parametrize("prompt", ["", [[]], [[1, -1]], [[257]], [[2**40]], [[2**31]], "\ud800", [["text"]], [[True]]])
def test_a_wrong_prompt_is_refused_and_the_engine_unharmed(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, GREEDY)
    assert len(llm.generate("fine", GREEDY)) == 1


def test_one_wrong_prompt_starts_none(llm: LLM) -> None:
    wrong: Any = ["fine", [999]]
    steps = llm.service.metrics.registry.get_sample_value("tpu_infer_prompt_tokens_total")
    with pytest.raises(RequestError):
        llm.generate(wrong, GREEDY)
    assert llm.service.metrics.registry.get_sample_value("tpu_infer_prompt_tokens_total") == steps


def test_end_of_sequence_is_known_from_the_configuration(llm: LLM) -> None:
    assert EOS in llm.tokenizer.eos_ids


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dtype": "float16"}, ConfigError, "model.dtype"),
        ({"max_num_seqs": 0}, ConfigError, "scheduler.max_num_seqs"),
        ({"max_model_len": CONTEXT + 1}, ConfigError, "scheduler.max_model_len"),
        ({"no_such_option": 1}, ConfigError, "no_such_option"),
        ({"tensor_parallel_size": 3}, MeshError, "does not divide"),
        ({"tensor_parallel_size": 16}, MeshError, "16 devices"),
        ({"cache_bytes": 1}, CapacityError, "--max-model-len"),
        ({"cache_pages": 2**31 - 1}, CapacityError, "--cache-pages"),
    ],
)
def test_a_wrong_option_names_itself(
    directory: Path, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LLM(directory, **{**OPTIONS, **options})


def test_no_room_for_the_cache_tells_both_numbers(directory: Path) -> None:
    with pytest.raises(CapacityError) as caught:
        LLM(directory, **OPTIONS, cache_bytes=1000)
    assert caught.value.available_bytes == 1000
    assert f"{caught.value.needed_bytes:,}" in str(caught.value)


def test_a_missing_model_and_an_unusable_cache_directory(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(tmp_path / "nothing.gguf")
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    with pytest.raises(CacheDirectoryError, match="--cache-dir"):
        LLM(directory, cache_dir=str(in_the_way / "cache"))
