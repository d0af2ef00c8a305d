"""How the CPU benchmark talks to an engine: a child process that loads once, then answers JSON lines.

    child:   {"ready": true}
    parent:  {"prompts": [[1, 2, ...], ...], "new": 128}
    child:   {"seconds": 1.23, "tokens": [[7, 8, ...], ...]}

Standard library only, and no newer than Python 3.11: a peer may live in an environment of its own.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class ChildArgs:
    """What a child is told at its start: `dtype` is float32 or bfloat16, the rest are the largest sizes to come."""

    model: str
    dtype: str
    max_rows: int
    max_model_len: int
    threads: int


Generate = Callable[[list[list[int]], int], list[list[int]]]


def parse_args() -> ChildArgs:
    """The command line of a child."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True, choices=["float32", "bfloat16"])
    parser.add_argument("--max-rows", type=int, required=True)
    parser.add_argument("--max-model-len", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    return ChildArgs(**vars(parser.parse_args()))


def serve(load: Callable[[ChildArgs], Generate]) -> None:
    """Load, then answer the requests on stdin. A `Generate` takes prompts of one length and gives the new ids."""
    # Libraries print to stdout as they like: keep the real one for answers, and send theirs to stderr.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    generate = load(parse_args())
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        tokens = generate(request["prompts"], request["new"])
        seconds = time.perf_counter() - start
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers)
