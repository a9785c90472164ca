"""Writes qwen3_moe_tiny_{untied,tied}/: random models and their logits in float32.

    pip install torch transformers
    python tests/testdata/make_qwen3_moe_tiny_golden.py

Each folder has `config.json` and `model.safetensors` as `transformers` saves them,
and `golden.npz`: `prompt_ids` [24] int32 and `logits` [24, 97] float32. The untied
model divides the weights of a token's experts by their sum, the tied one does not.
"""

import pathlib

import numpy as np
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

PROMPT_LENGTH = 24
FILES = ("config.json", "model.safetensors", "golden.npz")


def main() -> None:
    """Writes the folders beside this script."""
    for name, tied in (("untied", False), ("tied", True)):
        torch.manual_seed(13 + tied)
        config = Qwen3MoeConfig(
            vocab_size=97,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            moe_intermediate_size=16,
            num_experts=8,
            num_experts_per_tok=3,
            norm_topk_prob=not tied,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            # Large enough that attention and routing are far from uniform.
            initializer_range=0.15,
        )
        model = Qwen3MoeForCausalLM(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter.uniform_(0.5, 1.5)
        prompt_ids = torch.randint(0, config.vocab_size, (PROMPT_LENGTH,))
        with torch.no_grad():
            output = model(prompt_ids[None], output_router_logits=True)
        folder = pathlib.Path(__file__).with_name(f"qwen3_moe_tiny_{name}")
        model.save_pretrained(folder)
        np.savez_compressed(
            folder / "golden.npz",
            prompt_ids=prompt_ids.numpy().astype(np.int32),
            logits=output.logits[0].numpy(),
        )
        for file in folder.iterdir():
            if file.name not in FILES:
                file.unlink()
        for file in FILES:
            print(f"{folder.name}/{file}: {(folder / file).stat().st_size} bytes")
        # A choice that rounding could turn would make the logits useless.
        for router_logits in output.router_logits:
            top = router_logits.sort(dim=-1, descending=True).values
            num_chosen = config.num_experts_per_tok
            gap = (top[:, num_chosen - 1] - top[:, num_chosen]).min()
            if gap < 0.01:
                raise ValueError(f"{name}: experts are only {gap:.1e} apart")


if __name__ == "__main__":
    main()
