"""Drives an Engine on a FakeRunner and keeps what it says."""

from tpu_infer.engine import Engine
from tpu_infer.messages import Died, Failed, FromEngine, Submit, Tokens
from tpu_infer.metrics import Metrics
from tpu_infer.types import FinishReason

from .fake_runner import FakeRunner


def submit(
    sequence_id: str,
    prompt: int | list[int] = 5,
    max_tokens: int = 8,
    *,
    stop_ids: tuple[int, ...] = (),
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    logprobs: int | None = None,
) -> Submit:
    """A Submit; a prompt given as a length is made up from the id and is the same each time."""
    if isinstance(prompt, int):
        prompt = [(sum(sequence_id.encode()) * 31 + i * i + 7 * i) % 97 for i in range(prompt)]
    return Submit(
        id=sequence_id,
        prompt_ids=prompt,
        max_tokens=max_tokens,
        stop_ids=list(stop_ids),
        temperature=temperature,
        top_k=top_k,
        top_p=1.0,
        min_p=0.0,
        seed=seed,
        logprobs=logprobs,
    )


class Harness:
    """An engine, its runner and its answers by sequence id."""

    def __init__(self, runner: FakeRunner, *, prefill_chunk: int | None = None) -> None:
        self.runner = runner
        self.metrics = Metrics()
        self.engine = Engine(runner, self.receive, self.metrics, prefill_chunk=prefill_chunk)
        self.batches: list[list[FromEngine]] = []
        self.tokens: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.failed: dict[str, str] = {}

    def receive(self, messages: list[FromEngine]) -> None:
        assert messages
        self.batches.append(messages)
        for message in messages:
            assert not isinstance(message, Died)
            assert message.id not in self.finish, "a message after the last"
            assert message.id not in self.failed, "a message after the last"
            if isinstance(message, Failed):
                self.failed[message.id] = message.code
            else:
                self._take(message)

    def _take(self, message: Tokens) -> None:
        self.tokens.setdefault(message.id, []).extend(message.token_ids)
        if message.finish is not None:
            self.finish[message.id] = message.finish

    def submit(self, *messages: Submit) -> None:
        for message in messages:
            self.engine.submit(message)

    def check(self) -> None:
        """Pages and slots add up, and who is where is in order of arrival."""
        scheduler = self.engine.scheduler
        scheduler.blocks.check()
        held = [sequence.slot for sequence in scheduler.running]
        assert None not in held
        assert len(set(held)) == len(held) <= self.runner.limits.slots
        order = [sequence.arrival for sequence in [*scheduler.running, *scheduler.waiting]]
        assert order == sorted(order)
        owned = [allocator.pages - allocator.free for allocator in scheduler.blocks.allocators]
        assert owned == [int(scheduler.blocks.capacity.sum()) // self.runner.limits.page_size] * len(owned)
        for slot, capacity in enumerate(scheduler.blocks.capacity.tolist()):
            assert (capacity > 0) == (slot in held)

    def drain(self, most: int = 3000) -> None:
        """Step until there is no work; then nothing is held."""
        while self.engine.step():
            self.check()
            most -= 1
            assert most > 0, "no end of work"
        self.check()
        assert not self.engine.scheduler.running
        assert not self.engine.scheduler.waiting
        assert self.runner.outstanding == 0

    def run(self, *messages: Submit) -> dict[str, list[int]]:
        """Submit, run to the end, and return the tokens by id."""
        self.submit(*messages)
        self.drain()
        return self.tokens

    def value(self, name: str, **labels: str) -> float:
        """A sample of the metrics."""
        value = self.metrics.registry.get_sample_value(name, labels)
        assert value is not None
        return value
