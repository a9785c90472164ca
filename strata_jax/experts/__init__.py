"""Experts: one expert on one token, jobs, tiers and formats."""

from strata_jax.experts._cache import ExpertCache as ExpertCache
from strata_jax.experts._cache import adapt as adapt
from strata_jax.experts._cache import count_uses as count_uses
from strata_jax.experts._cache import empty_expert_cache as empty_expert_cache
from strata_jax.experts._cold import ColdExperts as ColdExperts
from strata_jax.experts._cold import ExpertFile as ExpertFile
from strata_jax.experts._cold import write_expert_file as write_expert_file
from strata_jax.experts._jobs import MODES as MODES
from strata_jax.experts._jobs import ExpertBank as ExpertBank
from strata_jax.experts._jobs import Folding as Folding
from strata_jax.experts._jobs import Jobs as Jobs
from strata_jax.experts._jobs import Prepared as Prepared
from strata_jax.experts._jobs import group_by_expert as group_by_expert
from strata_jax.experts._jobs import run_expert as run_expert
from strata_jax.experts._jobs import run_jobs as run_jobs
from strata_jax.experts._layout import ExpertLayout as ExpertLayout
from strata_jax.experts._layout import uniform_layout as uniform_layout
from strata_jax.experts._matrices import ExpertMatrices as ExpertMatrices
from strata_jax.experts._packed import PackedExperts as PackedExperts
from strata_jax.experts._packed import PackedShape as PackedShape
from strata_jax.experts._packed import Stored as Stored
from strata_jax.experts._packed import pack_experts as pack_experts
from strata_jax.experts._packed import to_host as to_host
from strata_jax.experts._packed import unpack_experts as unpack_experts
from strata_jax.experts._weights import ExpertWeights as ExpertWeights
