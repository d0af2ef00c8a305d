"""The engine on real programs: the same tokens, whatever else is in the batch and however it is compiled."""

import numpy as np
import pytest

from tests.models import reference
from tpu_infer.errors import ConfigError
from tpu_infer.messages import Submit
from tpu_infer.models.decoder import LayerForm
from tpu_infer.programs.executor import FILTERED, GREEDY, RANDOM, Executor, sampler_variants, slot_values
from tpu_infer.step import FROM_STATE, OpenSlots, SamplerFlags, StepInputs

from .build import (
    CONFIG,
    POISON,
    SIZES,
    SLOTS,
    TENSORS,
    VOCAB,
    Recorded,
    RowInput,
    drive,
    make_executor,
    step_inputs,
    submit,
)
from .conftest import MASKED, Told

RANDOM_PROMPTS = np.random.default_rng(11)
LENGTHS = {"a": 5, "b": 23, "c": 1, "d": 70, "e": 17, "f": 8}
PROMPTS = {name: RANDOM_PROMPTS.integers(0, VOCAB, length).tolist() for name, length in LENGTHS.items()}
COUNT = 24  # tokens of each answer: some pages more than the prompt
GREEDY_ONES = [submit(name, prompt, COUNT) for name, prompt in PROMPTS.items()]
MARGIN = 1e-3  # between the two best logits, below which rounding might choose


@pytest.fixture(scope="session")
def expected() -> dict[str, list[int]]:
    """numpy's own greedy tokens, none of them a close call."""
    tokens = {name: reference.greedy(CONFIG, TENSORS, prompt, COUNT, VOCAB) for name, prompt in PROMPTS.items()}
    for name, prompt in PROMPTS.items():
        logits = reference.logits(CONFIG, TENSORS, prompt + tokens[name][:-1])[len(prompt) - 1 :, :VOCAB]
        best = np.sort(logits, axis=-1)
        assert (best[:, -1] - best[:, -2]).min() > MARGIN
    return tokens


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_alone_the_tokens_are_numpys(executor: Executor, expected: dict[str, list[int]]):
    for message in GREEDY_ONES:
        assert drive(executor, message).tokens == {message.id: expected[message.id]}


@pytest.mark.parametrize("chunk", [None, 16, 7])
@pytest.mark.parametrize("late", [0, 2])
def test_together(executor: Executor, expected: dict[str, list[int]], chunk: int | None, late: int):
    runner = Recorded(executor)
    answers = drive(runner, *GREEDY_ONES, chunk=chunk, late=late)
    assert answers.tokens == expected
    assert runner.mixed > 0, "decode rows and prompt chunks in one step"
    assert answers.value("tpu_infer_preemptions_total") == 0


def test_preempted_for_want_of_pages(executor: Executor, expected: dict[str, list[int]]):
    answers = drive(Recorded(executor, pages=12), *GREEDY_ONES)
    assert answers.tokens == expected
    assert answers.value("tpu_infer_preemptions_total") > 0


def test_logprobs_are_numpys(executor: Executor, expected: dict[str, list[int]]):
    answers = drive(executor, *(submit(name, prompt, COUNT, logprobs=3) for name, prompt in PROMPTS.items()))
    for name, prompt in PROMPTS.items():
        tokens = expected[name]
        logits = reference.logits(CONFIG, TENSORS, prompt + tokens[:-1])[len(prompt) - 1 :, :VOCAB]
        wanted = log_softmax(logits)
        np.testing.assert_allclose(answers.logprobs[name], wanted[np.arange(COUNT), tokens], atol=1e-4)
        assert answers.top[name] == np.argsort(-logits, axis=-1)[:, :3].tolist()


@pytest.mark.parametrize(("form", "tensor"), [("unroll", 1), ("scan", 2), ("scan", 8)])
def test_forms_and_meshes_give_the_same_tokens(form: LayerForm, tensor: int, expected: dict[str, list[int]]):
    executor = make_executor(form=form, tensor=tensor)
    assert drive(executor, *GREEDY_ONES, chunk=16).tokens == expected
    executor.watch.close()


SEEDED: list[Submit] = [
    submit("plain", PROMPTS["a"], COUNT, seed=7, temperature=1.0),
    submit("plain again", PROMPTS["a"], COUNT, seed=7, temperature=1.0),
    submit("another choice", PROMPTS["a"], COUNT, seed=7, temperature=1.0, choice=1),
    submit("another seed", PROMPTS["a"], COUNT, seed=-(2**63), temperature=1.0),
    submit("filtered", PROMPTS["b"], COUNT, seed=7, temperature=1.5, top_k=5, top_p=0.9, min_p=0.05),
    submit("greedy", PROMPTS["e"], COUNT),
]


def test_seeds_repeat_whatever_the_batch(executor: Executor, expected: dict[str, list[int]]):
    alone = {message.id: drive(executor, message).tokens[message.id] for message in SEEDED}
    assert alone["plain"] == alone["plain again"]
    assert len({tuple(alone[name]) for name in ("plain", "another choice", "another seed")}) == 3
    assert alone["greedy"] == expected["e"]
    assert drive(executor, *SEEDED).tokens == alone
    assert drive(executor, *reversed(SEEDED), chunk=16, late=1).tokens == alone
    preempted = drive(Recorded(executor, pages=11), *SEEDED)
    assert preempted.value("tpu_infer_preemptions_total") > 0
    assert preempted.tokens == alone
    assert all(token < VOCAB for tokens in alone.values() for token in tokens)


def test_a_row_that_is_not_finite_fails_alone(executor: Executor, expected: dict[str, list[int]]):
    """A fault in the middle of a prompt reaches its last token through the cache, and no other sequence."""
    poison = [submit(f"poison {i}", [3, POISON, *range(20)], COUNT) for i in range(2)]
    answers = drive(executor, poison[0], *GREEDY_ONES, poison[1], late=1)
    assert answers.failed == {"poison 0": "non_finite", "poison 1": "non_finite"}
    assert answers.tokens == expected
    assert drive(executor, *GREEDY_ONES).tokens == expected, "pages that held NaN are as good as others"


def open_greedy(executor: Executor, *slots: int) -> None:
    zeros = [0] * len(slots)
    executor.open_slots(
        OpenSlots(
            slots=list(slots),
            seeds=zeros,
            choices=zeros,
            temperature=[0.0] * len(slots),
            top_k=zeros,
            top_p=[1.0] * len(slots),
            min_p=[0.0] * len(slots),
        )
    )


def prompt_step(executor: Executor, *prompts: list[int], flags: SamplerFlags = GREEDY) -> StepInputs:
    """Prompts in slots 0, 1, ..., each to the end."""
    open_greedy(executor, *range(len(prompts)))
    shape = executor.shape_for("prefill", len(prompts), sum(map(len, prompts)), (1,))
    return step_inputs(shape, [RowInput(slot, 0, prompt) for slot, prompt in enumerate(prompts)], flags)


def decode_step(executor: Executor, *slots: int, flags: SamplerFlags = GREEDY) -> StepInputs:
    shape = executor.shape_for("decode", len(slots), len(slots), (1,))
    return step_inputs(shape, [RowInput(slot, FROM_STATE, []) for slot in slots], flags)


def test_a_masked_token_is_chosen_and_is_the_next_steps_input(executor: Executor):
    prompts = [PROMPTS["a"], PROMPTS["e"]]
    inputs = prompt_step(executor, *prompts, flags=MASKED)
    masks = np.zeros((inputs.shape.rows, CONFIG.vocab_size // 32), np.uint32)
    masks[0, 0] = (1 << 7) | (1 << 9)
    masks[1:] = 0xFFFFFFFF
    tokens = executor.sample(executor.forward(inputs), masks).result().token_ids.tolist()
    logits = [reference.logits(CONFIG, TENSORS, prompt)[-1, :VOCAB] for prompt in prompts]
    assert tokens[0] == max((7, 9), key=lambda token: logits[0][token]) != logits[0].argmax()
    assert tokens[1] == logits[1].argmax()
    after = executor.sample(executor.forward(decode_step(executor, 1, 0))).result().token_ids.tolist()
    wanted = [reference.greedy(CONFIG, TENSORS, prompts[row] + [tokens[row]], 1, VOCAB)[0] for row in (1, 0)]
    assert after[:2] == wanted


def test_masks_that_the_flags_do_not_announce_are_refused(executor: Executor):
    for flags, masks in ((GREEDY, np.zeros((1, 2), np.uint32)), (MASKED, None)):
        launched = executor.forward(prompt_step(executor, [1, 2], flags=flags))
        with pytest.raises(ConfigError, match="masks") as caught:
            executor.sample(launched, masks)
        assert caught.value.key == "masks"


def test_a_sampler_that_was_not_compiled_is_refused(executor: Executor):
    launched = executor.forward(prompt_step(executor, [1, 2], flags=SamplerFlags(random=True, logprobs=True)))
    with pytest.raises(ConfigError, match=r"random=True.* was not compiled; this runner has"):
        executor.sample(launched)


def test_nothing_is_compiled_after_ready(executor: Executor):
    """Every bucket and sampler is used; the watch would raise."""
    runner = Recorded(executor)
    for prompts in ([PROMPTS["a"]], [PROMPTS["d"]], list(PROMPTS.values())):
        for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"logprobs": 2}):
            drive(runner, *(submit(str(i), prompt, 3, **fields) for i, prompt in enumerate(prompts)))
    used = {(step.shape, step.sampler) for step in runner.steps}
    samplers = [flags for flags in executor.spec.samplers if not flags.masked]
    assert used == {(shape, flags) for shape in SIZES.shapes() for flags in samplers}
    assert executor.watch.count == 0


def test_results_are_futures(executor: Executor):
    future = executor.sample(executor.forward(prompt_step(executor, [1, 2])))
    outputs = future.result()
    assert future.done()
    assert outputs.finite[0]
    assert (outputs.logprobs, outputs.top_ids, outputs.top_logprobs) == (None, None, None)


def test_progress_counts_programs(executor: Executor, told: Told):
    count = len(executor.spec.programs())
    assert told == [("programs", done, count) for done in range(count + 1)]


def test_every_program_that_can_be_asked_for_is_listed(executor: Executor):
    spec = executor.spec
    programs = spec.programs()
    assert len(set(programs)) == len(programs)
    rows = {SIZES.shape_for(kind, n, n, (1,)).rows for kind in ("decode", "prefill") for n in range(1, SLOTS + 1)}
    for count in rows:
        for flags in spec.samplers:
            assert spec.sample_spec(count, flags) in programs


def test_sampler_variants():
    plain = (GREEDY, RANDOM, FILTERED)
    assert sampler_variants(logprobs=False) == plain
    assert sampler_variants()[:3] == plain
    assert [(flags.random, flags.filtered) for flags in sampler_variants()[3:]] == [
        (flags.random, flags.filtered) for flags in plain
    ]
    assert all(flags.logprobs for flags in sampler_variants()[3:])


def test_seeds_of_64_bits_become_two_words():
    seeds = [-1, 2**63 - 1, -(2**63), 5 << 32]
    command = OpenSlots(
        slots=[3, 1, 0, 2],
        seeds=seeds,
        choices=[1, 2, 3, 4],
        temperature=[0.5] * 4,
        top_k=[9] * 4,
        top_p=[0.9] * 4,
        min_p=[0.1] * 4,
    )
    values = slot_values(command, 6)
    assert np.asarray(values.seed_B2).tolist()[:4] == [
        [0xFFFFFFFF, 0xFFFFFFFF],
        [0x7FFFFFFF, 0xFFFFFFFF],
        [0x80000000, 0],
        [5, 0],
    ]
    assert np.asarray(values.slot_B).tolist() == [3, 1, 0, 2, 6, 6]
