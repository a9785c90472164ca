"""Experts: one expert on one token, jobs, tiers and formats."""

from strata_jax.experts._weights import ExpertMatrices as ExpertMatrices
from strata_jax.experts._weights import ExpertWeights as ExpertWeights
