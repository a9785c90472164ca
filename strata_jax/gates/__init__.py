"""Gates: rules that admit draft tokens without seeing the draw."""

from strata_jax.gates._gates import all_of as all_of
from strata_jax.gates._gates import always as always
from strata_jax.gates._gates import entropy as entropy
from strata_jax.gates._gates import gate as gate
from strata_jax.gates._gates import include_then_stop as include_then_stop
from strata_jax.gates._gates import picked as picked
from strata_jax.gates._gates import soft as soft
from strata_jax.gates._gates import top as top
