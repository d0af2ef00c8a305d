"""The step loop: launch the next step, then commit the one before it."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tpu_infer.engine.blocks import BlockTables
from tpu_infer.engine.scheduler import Plan, Scheduler
from tpu_infer.engine.sequence import Sequence
from tpu_infer.messages import Failed, FromEngine, Submit, Tokens
from tpu_infer.metrics import Metrics
from tpu_infer.step import Future, OpenSlots, Runner, StepInputs, StepOutputs, buffer_size
from tpu_infer.types import FinishReason


@dataclass(frozen=True, slots=True)
class _Flight:
    """A launched step whose result has not been fetched."""

    future: Future
    plan: Plan
    launched: float  # time.perf_counter() at launch


@dataclass(frozen=True, slots=True)
class _Logprobs:
    """A step's log-probabilities as Python lists, by row: converted once, which is faster than row by row."""

    chosen: list[float]
    top_ids: list[list[int]]
    top: list[list[float]]

    @classmethod
    def of(cls, outputs: StepOutputs) -> "_Logprobs":
        assert outputs.logprobs is not None
        assert outputs.top_ids is not None
        assert outputs.top_logprobs is not None
        return cls(outputs.logprobs.tolist(), outputs.top_ids.tolist(), outputs.top_logprobs.tolist())

    def message(self, sequence_id: str, token: int, finish: FinishReason | None, row: int, best: int) -> Tokens:
        return Tokens(
            id=sequence_id,
            token_ids=[token],
            logprobs=[self.chosen[row]],
            top_ids=[self.top_ids[row][:best]],
            top_logprobs=[self.top[row][:best]],
            finish=finish,
        )


class Engine:
    """Runs sequences on a runner, one step in flight while the next is planned. For one thread only.

    `send` is called once for each commit, with what it produced, and must not block.
    """

    def __init__(
        self,
        runner: Runner,
        send: Callable[[list[FromEngine]], None],
        metrics: Metrics,
        *,
        prefill_chunk: int | None = None,
    ) -> None:
        self.scheduler = Scheduler(runner.limits, prefill_chunk)
        self._limits = runner.limits
        self._runner = runner
        self._send = send
        self._metrics = metrics
        self._live: dict[str, Sequence] = {}
        self._flights: deque[_Flight] = deque()
        self._steps = 0
        self._arrivals = 0
        self._pages_used = [metrics.pages_used.labels(group=str(g)) for g in range(len(runner.limits.pages))]
        for group, pages in enumerate(runner.limits.pages):
            metrics.pages_total.labels(group=str(group)).set(pages)

    def submit(self, message: Submit) -> None:
        """Queue a sequence, or answer Failed(code="capacity") if it could never run."""
        assert message.id not in self._live, f"sequence {message.id} is live already"
        refusal = self.scheduler.refusal(message)
        if refusal is not None:
            self._send([Failed(id=message.id, code="capacity", message=refusal)])
            return
        sequence = Sequence(message, self._arrivals, self.scheduler.final_tokens(message))
        self._arrivals += 1
        self._live[message.id] = sequence
        self.scheduler.add(sequence)

    def cancel(self, sequence_id: str) -> None:
        """Forget a sequence and free its slot and pages; an unknown id is ignored."""
        sequence = self._live.get(sequence_id)
        if sequence is not None:
            self._retire(sequence)

    def step(self) -> bool:
        """Launch the next step if there is one, then commit the oldest if another is in flight behind it or none
        could be launched. Returns whether there is work left."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.launch(plan)
        ready = len(self._flights) > (plan is not None)
        if ready:
            self.commit()
        assert ready or plan is not None or not self.scheduler.has_work, "work is left and none can be done"
        self._gauge()
        return bool(self._flights) or self.scheduler.has_work

    def fail_all(self, message: str) -> None:
        """Answer every live sequence with Failed(code="engine") and forget what is in flight."""
        failures: list[FromEngine] = [Failed(id=live, code="engine", message=message) for live in self._live]
        self._live.clear()
        self._flights.clear()
        if failures:
            self._send(failures)

    def launch(self, plan: Plan) -> None:
        """Start a planned step; its result is fetched by a later `commit`."""
        if plan.opened:
            self._runner.open_slots(_open_slots(plan.opened))
        rows, queries = len(plan.slots), int(plan.counts.sum())
        pages = self.scheduler.blocks.pages_for(int(plan.ends.max()))
        shape = self._runner.shape_for(plan.kind, rows, queries, (pages,) * len(self._limits.pages))
        inputs = StepInputs(
            step=self._steps, shape=shape, sampler=plan.sampler, buffer=np.zeros(buffer_size(shape), np.int32)
        )
        pack(inputs, plan, self.scheduler.blocks, pages)
        future = self._runner.sample(self._runner.forward(inputs))
        self._flights.append(_Flight(future, plan, time.perf_counter()))
        self._steps += 1
        self._count(plan)

    def commit(self) -> None:
        """Wait for the oldest step in flight; hand on its tokens and free what ended with them."""
        flight = self._flights.popleft()
        plan, outputs = flight.plan, flight.future.result()
        self._metrics.step_seconds.labels(kind=plan.kind).observe(time.perf_counter() - flight.launched)
        failures = self._fail_rows(plan, outputs.finite)
        tokens = self._commit_rows(plan, outputs)
        self._metrics.output_tokens.inc(len(tokens))
        if tokens or failures:
            self._send([*tokens, *failures])

    def _fail_rows(self, plan: Plan, finite: np.ndarray) -> list[Failed]:
        """End the sequences whose logits were not finite, each alone."""
        rows = len(plan.slots)
        failures: list[Failed] = []
        for row in np.flatnonzero((plan.sample == 1) & ~finite[:rows]).tolist():
            sequence = plan.sequences[row]
            if not sequence.done:
                self._retire(sequence)
                failures.append(Failed(id=sequence.submit.id, code="non_finite", message=_NON_FINITE))
        return failures

    def _commit_rows(self, plan: Plan, outputs: StepOutputs) -> list[Tokens]:
        """Append each sampled row's token to its sequence, and end those that it ends."""
        logprobs = _Logprobs.of(outputs) if plan.sampler.logprobs else None
        messages: list[Tokens] = []
        rows = zip(plan.sequences, outputs.token_ids.tolist(), plan.sample.tolist(), plan.final.tolist(), strict=False)
        for row, (sequence, token, sampled, final) in enumerate(rows):
            if not sampled or sequence.done:
                continue
            sequence.output_ids.append(token)
            finish = FinishReason.LENGTH if final else None
            if token in sequence.stop_ids:
                finish = FinishReason.STOP
            if finish is not None:
                self._retire(sequence)
            best = sequence.submit.logprobs
            if logprobs is None or best is None:
                messages.append(Tokens(id=sequence.submit.id, token_ids=[token], finish=finish))
            else:
                messages.append(logprobs.message(sequence.submit.id, token, finish, row, best))
        return messages

    def _retire(self, sequence: Sequence) -> None:
        sequence.done = True
        del self._live[sequence.submit.id]
        self.scheduler.remove(sequence)

    def _count(self, plan: Plan) -> None:
        self._metrics.steps.labels(kind=plan.kind).inc()
        if plan.chunks:
            self._metrics.prompt_tokens.inc(sum(len(chunk.token_ids) for chunk in plan.chunks))
        if plan.preempted:
            self._metrics.preemptions.inc(plan.preempted)

    def _gauge(self) -> None:
        self._metrics.running.set(len(self.scheduler.running))
        self._metrics.waiting.set(len(self.scheduler.waiting))
        for gauge, allocator in zip(self._pages_used, self.scheduler.blocks.allocators, strict=True):
            gauge.set(allocator.pages - allocator.free)


_NON_FINITE = "The model's output for this sequence was not finite; the request is lost, others are not affected."


def pack(inputs: StepInputs, plan: Plan, blocks: BlockTables, pages: int) -> None:
    """Fill a step's zeroed buffer; `pages` is how many block-table columns the longest row needs."""
    rows = len(plan.slots)
    slots = inputs.view("slots")
    slots[:rows] = plan.slots
    slots[rows:] = len(blocks.capacity)
    inputs.view("starts")[:rows] = plan.starts
    # Up to the end of the page that the row's last token goes to: the row holds it, and the table shows it.
    inputs.view("limits")[:rows] = -(-plan.ends // blocks.page_size) * blocks.page_size
    inputs.view("sample")[:rows] = plan.sample
    offsets = inputs.view("query_offsets")
    np.cumsum(plan.counts, out=offsets[1 : rows + 1])
    offsets[rows + 1 :] = offsets[rows]
    if plan.chunks:
        begin = int(offsets[rows - len(plan.chunks)])
        chunks = np.concatenate([chunk.token_ids for chunk in plan.chunks])
        inputs.view("tokens")[begin : begin + len(chunks)] = chunks
    for group, table in enumerate(blocks.tables):
        inputs.view(f"tables_{group}")[:rows, :pages] = table[plan.slots, :pages]


def _open_slots(sequences: list[Sequence]) -> OpenSlots:
    submits = [sequence.submit for sequence in sequences]
    slots = [sequence.slot for sequence in sequences if sequence.slot is not None]
    return OpenSlots(
        slots=slots,
        seeds=[submit.seed for submit in submits],
        choices=[submit.choice for submit in submits],
        temperature=[submit.temperature for submit in submits],
        top_k=[submit.top_k for submit in submits],
        top_p=[submit.top_p for submit in submits],
        min_p=[submit.min_p for submit in submits],
    )
