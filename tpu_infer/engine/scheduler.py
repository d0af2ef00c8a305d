"""What the next step computes: continuous batching with chunked prefill, a plain state machine.

Decode rows come first, then chunks of sequences whose prefill has begun, then waiting sequences as slots and pages
allow, all oldest first. A sequence gets the pages of all its known tokens when it gets a slot; only decode rows ask for
more. When none are free the youngest running sequence gives all of its own back and waits, at the front, to be computed
again; if the one that asks is itself the youngest it skips steps until pages are free or an older one takes its own.

Pages and slots may go to others at once although a step in flight still names them: commands take effect in order, so
a later owner writes them after that step and reads only what it wrote.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpu_infer.engine.blocks import BlockTables
from tpu_infer.engine.sequence import Sequence
from tpu_infer.messages import Submit
from tpu_infer.step import FROM_STATE, Limits, SamplerFlags, StepKind


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a sequence's known tokens to compute; `last` when the next token is to be sampled after it."""

    sequence: Sequence
    slot: int
    start: int
    token_ids: np.ndarray  # int32 [chunk tokens]
    last: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One step, row by row: decode rows, then chunks. Arrays are int32 [rows]."""

    kind: StepKind
    opened: list[Sequence]  # sequences whose slot must be opened before the step
    sequences: list[Sequence]
    slots: np.ndarray
    starts: np.ndarray  # first position, or FROM_STATE
    counts: np.ndarray  # query tokens
    ends: np.ndarray  # tokens with K and V in the cache after the step
    sample: np.ndarray  # 1 where the row gets a token
    final: np.ndarray  # bool [rows]: where that token is the sequence's last by length
    chunks: list[Chunk]
    sampler: SamplerFlags
    preempted: int  # sequences that lost their slot to make room


class Scheduler:
    """Sequences waiting and running, and the plan of the next step; knows nothing of tokens' values.

    Progress is kept as planned, not as committed, in arrays by slot, so that a step of decode rows costs a few array
    operations. A decode row has length + 1 tokens: the last one's K and V are not computed yet.
    """

    def __init__(self, limits: Limits, prefill_chunk: int | None = None) -> None:
        """`prefill_chunk`: query tokens of one sequence in one step at most; None: up to the token budget."""
        self.limits = limits
        self.blocks = BlockTables(limits)
        self.waiting: deque[Sequence] = deque()  # oldest first
        self.running: dict[Sequence, None] = {}  # an ordered set, oldest first
        self.prefilling: dict[
            Sequence, np.ndarray
        ] = {}  # running ones with tokens left to prefill, and all their tokens
        self._chunk = prefill_chunk if prefill_chunk is not None else limits.token_budget
        self._free_slots = list(range(limits.slots - 1, -1, -1))
        self._by_slot: Any = np.full(limits.slots, None, np.object_)  # the slot's sequence, or None
        self._length = np.zeros(limits.slots, np.int32)  # tokens with K and V in the cache, as planned
        self._final = np.zeros(limits.slots, np.int32)  # Sequence.final_tokens
        self._arrival = np.zeros(limits.slots, np.int64)
        self._decoding = np.zeros(limits.slots, np.bool_)  # prefill is planned to its end
        self._random = np.zeros(limits.slots, np.bool_)
        self._filtered = np.zeros(limits.slots, np.bool_)
        self._logprobs = np.zeros(limits.slots, np.bool_)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def final_tokens(self, submit: Submit) -> int:
        """Prompt and answer tokens at which the sequence ends by length."""
        return min(len(submit.prompt_ids) + submit.max_tokens, self.limits.max_model_len)

    def refusal(self, submit: Submit) -> str | None:
        """Why the sequence can never run here, or None."""
        prompt, final = len(submit.prompt_ids), self.final_tokens(submit)
        if not 0 < prompt < self.limits.max_model_len:
            return f"A prompt must have 1 to {self.limits.max_model_len - 1} tokens; this one has {prompt}."
        needed, pages = self.blocks.pages_for(final - 1), min(self.limits.pages)  # the last token's K and V: never
        if needed > pages:
            return (
                f"{final} tokens need {needed} pages of {self.limits.page_size} tokens and the cache has {pages}: "
                "shorten the prompt, lower max_tokens or give the cache more pages."
            )
        return None

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence for which `refusal` had nothing to say."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence that finished, failed or was cancelled, and free what it holds."""
        if sequence.slot is None:
            self.waiting.remove(sequence)
        else:
            self._release_slot(sequence, sequence.slot)

    def plan(self) -> Plan | None:
        """Plan a step, and count it as done; None when nothing can be computed before a commit."""
        preempted = self._grow_decode_rows()
        decode_slots = self._decode_slots()
        budget = self.limits.token_budget - len(decode_slots)
        chunks = self._continue_prefills(budget)
        admitted = self._admit(budget - sum(len(chunk.token_ids) for chunk in chunks))
        opened = [chunk.sequence for chunk in admitted]
        chunks += admitted
        if not len(decode_slots) and not chunks:
            return None
        return self._plan_rows(decode_slots, chunks, opened, preempted)

    def _plan_rows(self, decode_slots: np.ndarray, chunks: list[Chunk], opened: list[Sequence], preempted: int) -> Plan:
        decodes = len(decode_slots)
        self._length[decode_slots] += 1
        slots = np.concatenate([decode_slots, [chunk.slot for chunk in chunks]]).astype(np.int32)
        starts = np.full(len(slots), FROM_STATE, np.int32)
        counts = np.ones(len(slots), np.int32)
        sample = np.ones(len(slots), np.int32)
        starts[decodes:] = [chunk.start for chunk in chunks]
        counts[decodes:] = [len(chunk.token_ids) for chunk in chunks]
        sample[decodes:] = [chunk.last for chunk in chunks]
        ends = self._length[slots]
        return Plan(
            kind="prefill" if chunks else "decode",
            opened=opened,
            sequences=self._by_slot[slots].tolist(),
            slots=slots,
            starts=starts,
            counts=counts,
            ends=ends,
            sample=sample,
            final=ends + 1 == self._final[slots],
            chunks=chunks,
            sampler=self._sampler_flags(slots[sample == 1]),
            preempted=preempted,
        )

    def _sampler_flags(self, slots: np.ndarray) -> SamplerFlags:
        return SamplerFlags(
            random=bool(self._random[slots].any()),
            filtered=bool(self._filtered[slots].any()),
            logprobs=bool(self._logprobs[slots].any()),
        )

    def _unfinished(self) -> np.ndarray:
        """Decode rows that have tokens left to sample, bool [slots]."""
        return self._decoding & (self._length + 1 < self._final)

    def _decode_slots(self) -> np.ndarray:
        """Slots of decode rows that have a page to write to.

        Never more than the token budget: whoever gets a slot has a token of a budget that all others took theirs from.
        """
        return np.flatnonzero(self._unfinished() & (self._length < self.blocks.capacity))

    def _grow_decode_rows(self) -> int:
        """Give a page to each decode row that needs one, oldest first; returns how many sequences were preempted."""
        short = np.flatnonzero(self._unfinished() & (self._length >= self.blocks.capacity))
        if not len(short):
            return 0
        preempted = 0
        grow: list[int] = []
        for slot in short[np.argsort(self._arrival[short])].tolist():
            sequence = self._by_slot[slot]
            if sequence is None:  # preempted for an older one, just now
                continue
            while not self.blocks.fits(len(grow) + 1) and self._preempt_younger_than(sequence):
                preempted += 1
            if self.blocks.fits(len(grow) + 1):
                grow.append(slot)
        self.blocks.extend_each(grow)
        return preempted

    def _preempt_younger_than(self, sequence: Sequence) -> bool:
        """Preempt the youngest running sequence, if there is one younger than this."""
        for victim in reversed(self.running):
            if victim is sequence:
                return False
            slot = victim.slot
            assert slot is not None
            # One whose last token is in flight ends at the next commit: recomputing it would be waste.
            if not self._decoding[slot] or self._length[slot] + 1 < self._final[slot]:
                self._preempt(victim, slot)
                return True
        return False

    def _preempt(self, sequence: Sequence, slot: int) -> None:
        if self._decoding[slot]:
            sequence.expected_tokens = int(self._length[slot]) + 1
        self._release_slot(sequence, slot)
        self.waiting.appendleft(sequence)

    def _continue_prefills(self, budget: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        for sequence in list(self.prefilling):
            if budget <= 0:
                break
            chunks.append(self._take_chunk(sequence, budget))
            budget -= len(chunks[-1].token_ids)
        return chunks

    def _admit(self, budget: int) -> list[Chunk]:
        """Give slots and pages to waiting sequences while they fit; returns their first chunks."""
        chunks: list[Chunk] = []
        while budget > 0 and self._head_fits():
            sequence = self.waiting.popleft()
            self._take_slot(sequence)
            chunks.append(self._take_chunk(sequence, budget))
            budget -= len(chunks[-1].token_ids)
        return chunks

    def _head_fits(self) -> bool:
        """Whether the oldest waiting sequence can run and leave each running one room for one more page."""
        if not self.waiting or not self._free_slots or not self.waiting[0].settled:
            return False
        return self.blocks.fits(self.blocks.pages_for(self.waiting[0].num_tokens) + len(self.running))

    def _take_chunk(self, sequence: Sequence, budget: int) -> Chunk:
        slot, token_ids = sequence.slot, self.prefilling[sequence]
        assert slot is not None
        start = int(self._length[slot])
        end = min(start + budget, start + self._chunk, len(token_ids))
        last = end == len(token_ids)
        self._length[slot] = end
        if last:
            del self.prefilling[sequence]
            self._decoding[slot] = True
        return Chunk(sequence, slot, start, token_ids[start:end], last)

    def _take_slot(self, sequence: Sequence) -> None:
        slot = self._free_slots.pop()
        sequence.slot = slot
        self.running[sequence] = None
        self.prefilling[sequence] = sequence.token_ids()
        self.blocks.extend(slot, self.blocks.pages_for(sequence.num_tokens))
        submit = sequence.submit
        self._by_slot[slot] = sequence
        self._length[slot] = 0
        self._final[slot] = sequence.final_tokens
        self._arrival[slot] = sequence.arrival
        self._random[slot] = submit.temperature > 0
        cut = submit.top_k > 0 or submit.top_p < 1 or submit.min_p > 0
        self._filtered[slot] = submit.temperature > 0 and cut
        self._logprobs[slot] = submit.logprobs is not None

    def _release_slot(self, sequence: Sequence, slot: int) -> None:
        self.blocks.release(slot)
        del self.running[sequence]
        self.prefilling.pop(sequence, None)
        sequence.slot = None
        self._by_slot[slot] = None
        self._decoding[slot] = False
        self._free_slots.append(slot)
