"""Conformance checks for users' own parts, and a NumPy oracle."""

from strata_jax.testing._broken import ConformanceError as ConformanceError
from strata_jax.testing._conformance import check_drafter as check_drafter
from strata_jax.testing._conformance import check_gate as check_gate
from strata_jax.testing._conformance import check_law as check_law
from strata_jax.testing._conformance import check_verifier as check_verifier
from strata_jax.testing._oracle import OracleVerdict as OracleVerdict
from strata_jax.testing._oracle import oracle_chain as oracle_chain
from strata_jax.testing._oracle import oracle_chain_cuts as oracle_chain_cuts
from strata_jax.testing._oracle import oracle_draw as oracle_draw
from strata_jax.testing._oracle import (
    oracle_position_uniforms as oracle_position_uniforms,
)
from strata_jax.testing._oracle import oracle_row_law as oracle_row_law
from strata_jax.testing._oracle import oracle_suffix as oracle_suffix
from strata_jax.testing._oracle import (
    oracle_unaccounted_row_law as oracle_unaccounted_row_law,
)
from strata_jax.testing._oracle import (
    oracle_verify_exact_match as oracle_verify_exact_match,
)
from strata_jax.testing._oracle import oracle_verify_token as oracle_verify_token
from strata_jax.testing._oracle import (
    oracle_window_uniforms as oracle_window_uniforms,
)
from strata_jax.testing._target_bits import check_target as check_target
from strata_jax.testing._target_bits import poison_cache as poison_cache
