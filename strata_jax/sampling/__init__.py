"""The request's sampling chain (p and q from logits) and draws from a row."""

from strata_jax.sampling._chain import TokenCounts as TokenCounts
from strata_jax.sampling._chain import chain_probs as chain_probs
from strata_jax.sampling._chain import count_tokens as count_tokens
from strata_jax.sampling._draw import BLOCK_SIZE as BLOCK_SIZE
from strata_jax.sampling._draw import draw_token as draw_token
from strata_jax.sampling._settings import MAX_EOS_IDS as MAX_EOS_IDS
from strata_jax.sampling._settings import SamplingSettings as SamplingSettings
from strata_jax.sampling._settings import sampling_settings as sampling_settings
