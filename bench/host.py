"""Host time of a decode step: how long the engine takes to schedule, pack and commit it, with instant results.

    python -m bench.host [--rows 256] [--steps 200] [--prompt 1024] [--page-size 16] [--logprobs N]

A device step of a small model takes about a millisecond; the host works beside it, so its time must stay below that.
"""

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np

from tpu_infer.engine import Engine
from tpu_infer.messages import Submit
from tpu_infer.metrics import Metrics
from tpu_infer.step import Limits, OpenSlots, Pending, StepInputs, StepKind, StepOutputs, StepShape

LIMIT_US = 1000.0


@dataclass(frozen=True)
class InstantStep:
    """A launched step that is done already."""

    step: int
    outputs: StepOutputs

    def done(self) -> bool:
        return True

    def result(self) -> StepOutputs:
        return self.outputs


class InstantRunner:
    """Answers every row with token 1, at once."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        rows, best = limits.slots, 20
        self._outputs = StepOutputs(
            token_ids=np.ones(rows, np.int32),
            finite=np.ones(rows, np.bool_),
            logprobs=np.zeros(rows, np.float32),
            top_ids=np.ones((rows, best), np.int32),
            top_logprobs=np.zeros((rows, best), np.float32),
        )

    def shape_for(self, kind: StepKind, rows: int, tokens: int, pages: tuple[int, ...]) -> StepShape:
        width = tuple(1 << (need - 1).bit_length() for need in pages)
        return StepShape(kind, self.limits.slots, self.limits.slots if kind == "decode" else tokens, width)

    def open_slots(self, command: OpenSlots) -> None:
        """There is no state to write."""

    def forward(self, inputs: StepInputs) -> InstantStep:
        return InstantStep(inputs.step, self._outputs)

    def sample(self, pending: Pending, masks: np.ndarray | None = None) -> InstantStep:
        return InstantStep(pending.step, self._outputs)


def build_engine(args: argparse.Namespace) -> Engine:
    """An engine with all rows decoding and one step in flight."""
    length = args.prompt + args.steps + 64
    limits = Limits(
        slots=args.rows,
        token_budget=max(8192, args.rows),
        page_size=args.page_size,
        pages=(args.rows * (-(-length // args.page_size) + 2),),
        max_model_len=length,
        vocab_size=2,
    )
    engine = Engine(InstantRunner(limits), lambda messages: None, Metrics())
    for row in range(args.rows):
        # Lengths differ, so that rows ask for their next page at different steps.
        engine.submit(_submit(row, args.prompt - row % args.page_size, args.steps + 64, args.logprobs))
    while engine.scheduler.waiting or engine.scheduler.prefilling:
        engine.step()
    return engine


def _submit(row: int, prompt: int, max_tokens: int, logprobs: int | None) -> Submit:
    return Submit(
        id=f"request-{row}",
        prompt_ids=[1] * prompt,
        max_tokens=max_tokens,
        stop_ids=[0],
        temperature=1.0,
        top_k=0,
        top_p=0.9,
        min_p=0.0,
        seed=row,
        logprobs=logprobs,
    )


def measure(engine: Engine, steps: int) -> dict[str, list[float]]:
    """Microseconds of each part of each step."""
    times: dict[str, list[float]] = {"schedule": [], "pack": [], "commit": [], "sum": []}
    for _ in range(steps):
        t0 = time.perf_counter()
        plan = engine.scheduler.plan()
        assert plan is not None
        assert plan.kind == "decode"
        t1 = time.perf_counter()
        engine.launch(plan)
        t2 = time.perf_counter()
        engine.commit()
        t3 = time.perf_counter()
        for name, seconds in zip(times, (t1 - t0, t2 - t1, t3 - t2, t3 - t0), strict=True):
            times[name].append(seconds * 1e6)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.host", description="Host time of a decode step, with instant results."
    )
    parser.add_argument("--rows", type=int, default=256, help="sequences that decode together")
    parser.add_argument("--steps", type=int, default=200, help="steps measured")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each prompt, less a few")
    parser.add_argument("--page-size", type=int, default=16, help="tokens in a page")
    parser.add_argument("--logprobs", type=int, help="log-probabilities that each row asks for")
    args = parser.parse_args()
    times = measure(build_engine(args), args.steps)
    print(f"{args.rows} rows, {args.steps} steps, microseconds per step")
    print(f"{'part':10}{'median':>9}{'p99':>9}")
    for name, values in times.items():
        print(f"{name:10}{statistics.median(values):9.0f}{np.percentile(values, 99):9.0f}")
    print(f"{'limit':10}{LIMIT_US:9.0f}")


if __name__ == "__main__":
    main()
