"""The engine: sequences, pages, the scheduler and the step loop. Knows no JAX: `step.py` is all it sees."""

from tpu_infer.engine.engine import Engine
from tpu_infer.engine.thread import EngineThread

__all__ = ["Engine", "EngineThread"]
