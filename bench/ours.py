"""The service's own child of the CPU benchmark: the public Python API, as a user calls it."""

from bench.child import ChildArgs, Generate, serve
from tpu_infer import LLM, SamplingParams


def load(args: ChildArgs) -> Generate:
    llm = LLM(model=args.model, dtype=args.dtype, max_num_seqs=args.max_rows, max_model_len=args.max_model_len)

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        results = llm.generate(prompts, SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0))
        return [result.outputs[0].token_ids for result in results]

    return generate


if __name__ == "__main__":
    serve(load)
