"""Model families as pure functions over frozen pytrees of weights."""

from strata_jax.models._attention import CACHE_BLOCK as CACHE_BLOCK
from strata_jax.models._expert_placement import attach_expert_file as attach_expert_file
from strata_jax.models._expert_placement import experts_on_disk as experts_on_disk
from strata_jax.models._expert_placement import experts_on_host as experts_on_host
from strata_jax.models._expert_placement import pack_model_experts as pack_model_experts
from strata_jax.models._expert_placement import (
    unpack_model_experts as unpack_model_experts,
)
from strata_jax.models._llama import LlamaCache as LlamaCache
from strata_jax.models._llama import empty_cache as empty_cache
from strata_jax.models._llama import score_rows as score_rows
from strata_jax.models._llama import select_layers as select_layers
from strata_jax.models._llama_batched import batched_rows as batched_rows
from strata_jax.models._llama_batched import forward as forward
from strata_jax.models._llama_params import LlamaConfig as LlamaConfig
from strata_jax.models._llama_params import LlamaLayer as LlamaLayer
from strata_jax.models._llama_params import LlamaParams as LlamaParams
from strata_jax.models._llama_params import check_params as check_params
from strata_jax.models._llama_params import random_params as random_params
from strata_jax.models._llama_tiled import TiledLlamaParams as TiledLlamaParams
from strata_jax.models._llama_tiled import check_tiled_params as check_tiled_params
from strata_jax.models._llama_tiled import score_tiled_rows as score_tiled_rows
from strata_jax.models._llama_tiled import tile_params as tile_params
from strata_jax.models._moe import MoeCache as MoeCache
from strata_jax.models._moe import adapt_experts as adapt_experts
from strata_jax.models._moe import commit_experts as commit_experts
from strata_jax.models._moe import empty_moe_cache as empty_moe_cache
from strata_jax.models._moe import score_moe_rows as score_moe_rows
from strata_jax.models._moe_batched import MoeOutputs as MoeOutputs
from strata_jax.models._moe_batched import batched_moe_rows as batched_moe_rows
from strata_jax.models._moe_batched import moe_forward as moe_forward
from strata_jax.models._moe_batched import mtp_forward as mtp_forward
from strata_jax.models._moe_layer_params import MoeConfig as MoeConfig
from strata_jax.models._moe_layer_params import MoeLayer as MoeLayer
from strata_jax.models._moe_layer_params import SharedExpert as SharedExpert
from strata_jax.models._moe_params import MoeParams as MoeParams
from strata_jax.models._moe_params import check_moe_params as check_moe_params
from strata_jax.models._moe_params import random_moe_params as random_moe_params
from strata_jax.models._moe_params import with_draft_vocabulary as with_draft_vocabulary
from strata_jax.models._mtp import MtpCache as MtpCache
from strata_jax.models._mtp import draft_logits as draft_logits
from strata_jax.models._mtp import empty_mtp_cache as empty_mtp_cache
from strata_jax.models._mtp import run_cell as run_cell
from strata_jax.models._mtp import run_cells as run_cells
from strata_jax.models._mtp import with_shared_tables as with_shared_tables
from strata_jax.models._mtp_params import MtpParams as MtpParams
from strata_jax.models._mtp_params import check_mtp_params as check_mtp_params
from strata_jax.models._mtp_params import random_mtp_params as random_mtp_params
from strata_jax.models._mtp_tiled import TiledMtpParams as TiledMtpParams
from strata_jax.models._mtp_tiled import (
    check_tiled_mtp_params as check_tiled_mtp_params,
)
from strata_jax.models._mtp_tiled import draft_from as draft_from
from strata_jax.models._mtp_tiled import tile_mtp as tile_mtp
from strata_jax.models._tiled_layer import TiledLlamaCache as TiledLlamaCache
from strata_jax.models._tiled_layer import empty_tiled_cache as empty_tiled_cache
from strata_jax.models._tiles import Tiles as Tiles
from strata_jax.models._tiles import cut_packed_tiles as cut_packed_tiles
from strata_jax.models._tiles import cut_tiles as cut_tiles
from strata_jax.models._tiles import quantize as quantize
from strata_jax.models._tiles import read_matrix as read_matrix
