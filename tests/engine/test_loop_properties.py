"""The loop under any order of submits, cancels and steps."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tpu_infer.messages import Submit
from tpu_infer.types import FinishReason

from .fake_runner import FakeRunner, continuation, limits
from .harness import Harness, submit


class LoopMachine(RuleBasedStateMachine):
    """Answers are the oracle's; FakeRunner asserts that each token is computed once per computation."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: dict[str, Submit] = {}
        self.cancelled: set[str] = set()
        self.poison: dict[int, int] = {}
        self.harness = Harness(FakeRunner(limits()))

    @initialize(
        slots=st.integers(1, 5),
        pages=st.integers(6, 20),
        budget=st.integers(2, 24),
        groups=st.integers(1, 2),
        chunk=st.none() | st.integers(1, 16),
    )
    def build(self, slots: int, pages: int, budget: int, groups: int, chunk: int | None) -> None:
        bounds = limits(slots=slots, token_budget=budget, pages=pages, groups=groups, max_model_len=32)
        self.harness = Harness(FakeRunner(bounds, poison=self.poison), prefill_chunk=chunk)

    @rule(prompt=st.integers(1, 28), most=st.integers(1, 30), stop=st.none() | st.integers(0, 6), bad=st.booleans())
    def submit(self, prompt: int, most: int, stop: int | None, bad: bool) -> None:
        name = f"s{len(self.sent)}"
        message = submit(name, prompt, most, seed=len(self.sent))
        answer = continuation(message, self.harness.runner.limits)
        if stop is not None:
            message = submit(name, prompt, most, seed=len(self.sent), stop_ids=(answer[stop % len(answer)],))
        if bad and most % 5 == 0:
            self.poison[message.seed] = prompt + most // 2
        self.sent[name] = message
        self.harness.submit(message)

    @rule(which=st.integers(0, 30))
    def cancel(self, which: int) -> None:
        name = f"s{which}"
        self.harness.engine.cancel(name)
        self.cancelled.add(name) if name in self.sent else None

    @rule(times=st.integers(1, 6))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.harness.engine.step()
            self.harness.check()

    @invariant()
    def adds_up(self) -> None:
        self.harness.check()

    def teardown(self) -> None:
        self.harness.drain()
        for name, message in self.sent.items():
            self.check_answer(name, message)

    def check_answer(self, name: str, message: Submit) -> None:
        harness, said = self.harness, self.harness.tokens.get(name, [])
        answer = continuation(message, harness.runner.limits)
        if name in harness.finish:
            assert said == answer
            stopped = answer[-1] in message.stop_ids
            assert harness.finish[name] is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        elif harness.failed.get(name) == "non_finite":
            assert said == answer[: self.poison[message.seed] - len(message.prompt_ids)]
        elif harness.failed.get(name) == "capacity":
            assert not said
        else:
            assert name in self.cancelled
            assert said == answer[: len(said)]


TestLoop = LoopMachine.TestCase
TestLoop.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
