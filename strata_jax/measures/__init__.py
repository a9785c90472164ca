"""One row's mathematics: retained measure, residual, overlap, NULL mass."""

from strata_jax.measures._row import acceptance as acceptance
from strata_jax.measures._row import null_mass as null_mass
from strata_jax.measures._row import overlap as overlap
from strata_jax.measures._row import residual as residual
from strata_jax.measures._row import residual_weights as residual_weights
from strata_jax.measures._row import retain as retain
