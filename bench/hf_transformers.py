"""The transformers child of the CPU benchmark: `generate` as its users call it, greedy, with its default cache.

Runs in an environment of its own (see bench/cpu.py), so it imports torch, transformers and nothing of the service.
"""

import torch  # pyright: ignore[reportMissingImports]
from transformers import LlamaForCausalLM  # pyright: ignore[reportMissingImports]

from bench.child import ChildArgs, Generate, serve


def load(args: ChildArgs) -> Generate:
    torch.set_num_threads(args.threads)
    model = LlamaForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()

    def generate(prompts: list[list[int]], new: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, pad_token_id=0
            )
        return out[:, ids.shape[1] :].tolist()

    return generate


if __name__ == "__main__":
    serve(load)
