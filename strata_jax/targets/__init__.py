"""Adapters that present a model as a target."""

from strata_jax.targets._batched import batched as batched
from strata_jax.targets._guard import guard as guard
from strata_jax.targets._singleton import singleton as singleton
from strata_jax.targets._tabular import TabularParams as TabularParams
from strata_jax.targets._tabular import tabular as tabular
