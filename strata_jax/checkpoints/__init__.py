"""Checkpoints: GGUF and safetensors files to parameters, and their tokenizers."""

from strata_jax.checkpoints._bundled import bundled_path as bundled_path
from strata_jax.checkpoints._bundled import load_bundled as load_bundled
from strata_jax.checkpoints._bundled import load_bundled_config as load_bundled_config
from strata_jax.checkpoints._byte_tokenizer import ByteStream as ByteStream
from strata_jax.checkpoints._byte_tokenizer import ByteTokenizer as ByteTokenizer
from strata_jax.checkpoints._draft_head import load_draft_head as load_draft_head
from strata_jax.checkpoints._draft_head import save_draft_head as save_draft_head
from strata_jax.checkpoints._gguf import find_smollm2 as find_smollm2
from strata_jax.checkpoints._gguf import load_gguf as load_gguf
from strata_jax.checkpoints._gguf_tiled import load_gguf_tiled as load_gguf_tiled
from strata_jax.checkpoints._gguf_tokenizer import (
    load_gguf_tokenizer as load_gguf_tokenizer,
)
from strata_jax.checkpoints._hugging_face import load_safetensors as load_safetensors
from strata_jax.checkpoints._hugging_face import save_model as save_model
from strata_jax.checkpoints._packed_model import load_packed_model as load_packed_model
from strata_jax.checkpoints._packed_model import save_packed_model as save_packed_model
from strata_jax.checkpoints._safetensors import read_metadata as read_metadata
from strata_jax.checkpoints._safetensors import read_safetensors as read_safetensors
from strata_jax.checkpoints._safetensors import save_safetensors as save_safetensors
from strata_jax.checkpoints._smollm2 import load_smollm2 as load_smollm2
from strata_jax.checkpoints._smollm2 import (
    smollm2_draft_head_path as smollm2_draft_head_path,
)
from strata_jax.checkpoints._tokenizer import DecodeStream as DecodeStream
from strata_jax.checkpoints._tokenizer import Tokenizer as Tokenizer
from strata_jax.checkpoints._tokenizer_json import (
    load_tokenizer_json as load_tokenizer_json,
)
