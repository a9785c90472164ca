"""Writes llama_tiny_{untied,tied}/: random llamas and their logits in float32.

    pip install torch transformers
    python tests/testdata/make_llama_tiny_golden.py

Each folder has `config.json` and `model.safetensors` as `transformers` saves them,
and `golden.npz`: `prompt_ids` [12] int32 and `logits` [12, 97] float32.
"""

import pathlib

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

PROMPT_LENGTH = 12
FILES = ("config.json", "model.safetensors", "golden.npz")


def main() -> None:
    """Writes the folders beside this script."""
    for name, tied in (("untied", False), ("tied", True)):
        torch.manual_seed(7 + tied)
        config = LlamaConfig(
            vocab_size=97,
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            rms_norm_eps=1e-5,
            tie_word_embeddings=tied,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
            # Large enough that attention is far from uniform.
            initializer_range=0.15,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(config).eval()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "norm" in parameter_name:
                    parameter.uniform_(0.5, 1.5)
        prompt_ids = torch.randint(0, config.vocab_size, (PROMPT_LENGTH,))
        with torch.no_grad():
            logits = model(prompt_ids[None]).logits[0]
        folder = pathlib.Path(__file__).with_name(f"llama_tiny_{name}")
        model.save_pretrained(folder)
        np.savez_compressed(
            folder / "golden.npz",
            prompt_ids=prompt_ids.numpy().astype(np.int32),
            logits=logits.numpy(),
        )
        for file in folder.iterdir():
            if file.name not in FILES:
                file.unlink()
        for file in FILES:
            print(f"{folder.name}/{file}: {(folder / file).stat().st_size} bytes")


if __name__ == "__main__":
    main()
