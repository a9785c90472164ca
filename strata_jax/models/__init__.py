"""Model families as pure functions over frozen pytrees of weights."""

from strata_jax.models._llama_params import LlamaConfig as LlamaConfig
from strata_jax.models._llama_params import LlamaLayer as LlamaLayer
from strata_jax.models._llama_params import LlamaParams as LlamaParams
