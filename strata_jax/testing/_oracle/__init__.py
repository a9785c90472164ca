"""NumPy oracle: the sampling chain, the draws and the verifiers, one row at a time.

It follows the written rules, not the JAX code, and uses loops where they are
clearer. It serves as the reference for the library's own parts and for a user's.
"""

from strata_jax.testing._oracle._chain import oracle_chain as oracle_chain
from strata_jax.testing._oracle._chain import oracle_chain_cuts as oracle_chain_cuts
from strata_jax.testing._oracle._draw import doubling_sum as doubling_sum
from strata_jax.testing._oracle._draw import halving_sum as halving_sum
from strata_jax.testing._oracle._draw import oracle_draw as oracle_draw
from strata_jax.testing._oracle._laws import oracle_row_law as oracle_row_law
from strata_jax.testing._oracle._laws import (
    oracle_unaccounted_row_law as oracle_unaccounted_row_law,
)
from strata_jax.testing._oracle._random import (
    oracle_position_uniforms as oracle_position_uniforms,
)
from strata_jax.testing._oracle._random import (
    oracle_window_uniforms as oracle_window_uniforms,
)
from strata_jax.testing._oracle._suffix import oracle_suffix as oracle_suffix
from strata_jax.testing._oracle._verify import OracleVerdict as OracleVerdict
from strata_jax.testing._oracle._verify import (
    oracle_verify_exact_match as oracle_verify_exact_match,
)
from strata_jax.testing._oracle._verify import (
    oracle_verify_token as oracle_verify_token,
)
