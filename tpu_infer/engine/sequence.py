"""A sequence: one choice of one request, from its Submit to its last token."""

from dataclasses import dataclass, field

import numpy as np

from tpu_infer.messages import Submit


@dataclass(eq=False, slots=True)
class Sequence:
    """What the engine knows of one sequence, compared by identity.

    While it holds a slot, its planned progress and its pages stand in the scheduler's arrays, by slot.
    """

    submit: Submit
    arrival: int  # counts up; the lower, the older
    final_tokens: int  # prompt and answer tokens at which it ends by length
    output_ids: list[int] = field(default_factory=list)  # committed tokens
    slot: int | None = None
    expected_tokens: int = field(
        init=False
    )  # tokens it will have once the steps in flight when it lost its slot commit
    stop_ids: frozenset[int] = field(init=False)
    done: bool = False  # finished, failed or cancelled: results still in flight are dropped

    def __post_init__(self) -> None:
        self.expected_tokens = len(self.submit.prompt_ids)
        self.stop_ids = frozenset(self.submit.stop_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and committed tokens."""
        return len(self.submit.prompt_ids) + len(self.output_ids)

    @property
    def settled(self) -> bool:
        """Whether no token of it is in flight; meaningful while it waits for a slot."""
        return self.num_tokens == self.expected_tokens

    def token_ids(self) -> np.ndarray:
        """Prompt and committed tokens, int32 [num_tokens]."""
        return np.array(self.submit.prompt_ids + self.output_ids, dtype=np.int32)
