"""The lattice of step shapes. Pure Python: which buckets exist, and which one holds a given step."""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import product

from tpu_infer.step import StepKind, StepShape

FULL_ROWS = 8  # up to here a decode step takes as long as reading the weights does; a TPU's sublanes hold as many
TOKENS_FACTOR = 4


def ladder(low: int, high: int, factor: int = 2) -> tuple[int, ...]:
    """low, low * factor, ... and at last exactly `high`, whatever number it is; `high` alone when low exceeds it."""
    steps: list[int] = []
    size = low
    while size < high:
        steps.append(size)
        size *= factor
    return (*steps, high)


@dataclass(frozen=True)
class Lattice:
    """Ascending bucket sizes; the last of each is the most that is ever asked for, so nothing is padded past it."""

    decode_rows: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    prefill_tokens: tuple[int, ...]
    pages: tuple[tuple[int, ...], ...]  # block-table columns, a ladder for each KV group

    def shape_for(self, kind: StepKind, rows: int, tokens: int, pages: tuple[int, ...]) -> StepShape:
        """The smallest bucket that holds this much."""
        columns = tuple(_at_least(sizes, count) for sizes, count in zip(self.pages, pages, strict=True))
        if kind == "decode":
            rows = _at_least(self.decode_rows, rows)
            return StepShape("decode", rows, rows, columns)
        return StepShape("prefill", _at_least(self.prefill_rows, rows), _at_least(self.prefill_tokens, tokens), columns)

    def shapes(self) -> list[StepShape]:
        """Every bucket that `shape_for` can return, smallest first."""
        columns = list(product(*self.pages))
        decode = [StepShape("decode", rows, rows, pages) for rows in self.decode_rows for pages in columns]
        prefill = [
            StepShape("prefill", rows, tokens, pages)
            for tokens in self.prefill_tokens
            for position, rows in enumerate(self.prefill_rows)
            # A bucket of more rows than another that already holds as many rows as tokens is never the smallest.
            if position == 0 or self.prefill_rows[position - 1] < tokens
            for pages in columns
        ]
        return decode + prefill

    def row_counts(self) -> list[int]:
        """Every number of rows that a step can have."""
        return sorted({*self.decode_rows, *self.prefill_rows})


def make_lattice(
    *, slots: int, token_budget: int, pages_per_row: int, min_rows: int = 1, min_tokens: int = 32, pages_factor: int = 0
) -> Lattice:
    """A lattice for up to `slots` rows and `token_budget` tokens a step.

    Few rows cost what reading the weights costs, so between `min_rows` and 8 there is no bucket. `pages_factor` is the
    ratio of neighbouring block-table widths; 0 gives one width, which is right where the attention's cost follows the
    rows' real lengths and not the table's width.
    """
    most_rows = max(slots, min_rows)
    pages = ladder(1, pages_per_row, pages_factor) if pages_factor else (pages_per_row,)
    return Lattice(
        decode_rows=tuple(sorted({min_rows, *ladder(min(FULL_ROWS, most_rows), most_rows)})),
        prefill_rows=tuple(sorted({min_rows, most_rows})),
        prefill_tokens=ladder(min(max(min_tokens, min_rows), token_budget), token_budget, TOKENS_FACTOR),
        pages=(pages,),
    )


def _at_least(sizes: tuple[int, ...], count: int) -> int:
    assert count <= sizes[-1], f"{count} is more than the largest bucket, {sizes[-1]}"
    return sizes[bisect_left(sizes, count)]
