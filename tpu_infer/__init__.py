"""LLM inference on Cloud TPU: `from tpu_infer import LLM, SamplingParams`.

Importing the package imports no JAX; `LLM` brings it in when it is first asked for (PEP 562).
"""

import importlib
from typing import TYPE_CHECKING, Any

from tpu_infer.types import FinishReason, RequestOutput, SamplingParams

if TYPE_CHECKING:
    from tpu_infer.llm import LLM

__all__ = ["LLM", "FinishReason", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        return importlib.import_module("tpu_infer.llm").LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
