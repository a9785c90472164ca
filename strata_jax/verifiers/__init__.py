"""Verifiers: rules that turn target rows and a proposal into emitted tokens."""

from strata_jax.verifiers._exact_match import ExactMatchDraws as ExactMatchDraws
from strata_jax.verifiers._exact_match import exact_match as exact_match
from strata_jax.verifiers._token import TokenDraws as TokenDraws
from strata_jax.verifiers._token import token as token
