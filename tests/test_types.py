"""Sampling parameters: every value out of range is refused by name."""

import math
from typing import Any

import pytest

from tpu_infer import SamplingParams
from tpu_infer.errors import RequestError

build: Any = SamplingParams  # called with wrong types on purpose

BAD: list[tuple[str, Any]] = [
    *[("temperature", value) for value in (-0.1, 2.1, math.nan, math.inf, -math.inf, "1", None, True)],
    *[("top_p", value) for value in (0, -1, 1.01, math.nan, math.inf)],
    *[("min_p", value) for value in (-0.1, 1.1, math.nan)],
    *[("top_k", value) for value in (-2, 1.5, 2**31, "1")],
    *[("n", value) for value in (0, -1, 129, 1.0, True)],
    *[("seed", value) for value in (2**63, -(2**63) - 1, 1.5)],
    *[("max_tokens", value) for value in (0, -1, 2**31, 1.5)],
    *[("logprobs", value) for value in (-1, 21, 1_000_000)],
    *[("stop", value) for value in ("", [""], [1], ["x"] * 65, "\ud800")],
    *[("stop_token_ids", value) for value in ([-1], [2**31], ["1"], [1] * 65)],
    *[(name, 1) for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")],
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_out_of_range(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        build(**{name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


def test_edges_are_allowed() -> None:
    SamplingParams(n=128, temperature=2, top_p=1e-9, top_k=-1, min_p=1, seed=-(2**63), max_tokens=1, logprobs=20)
    SamplingParams(temperature=0, top_k=2**31 - 1, min_p=0, seed=2**63 - 1, max_tokens=None, stop=["x"] * 64)


def test_an_unknown_parameter_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="presence_penalty"):
        build(presence_penalty=1.0)
