"""Diagnostics: acceptance, divergences between laws, row parity, trace and replay.

`diagnostics.cost` measures and predicts speed.
"""

from strata_jax.diagnostics import cost as cost
from strata_jax.diagnostics._acceptance import AcceptanceSummary as AcceptanceSummary
from strata_jax.diagnostics._acceptance import RowMasses as RowMasses
from strata_jax.diagnostics._acceptance import row_masses as row_masses
from strata_jax.diagnostics._acceptance import (
    summarize_acceptance as summarize_acceptance,
)
from strata_jax.diagnostics._divergence import ChiSquare as ChiSquare
from strata_jax.diagnostics._divergence import chi_square as chi_square
from strata_jax.diagnostics._divergence import kl_divergence as kl_divergence
from strata_jax.diagnostics._divergence import total_variation as total_variation
from strata_jax.diagnostics._parity import RowParity as RowParity
from strata_jax.diagnostics._parity import (
    compare_with_singleton as compare_with_singleton,
)
from strata_jax.diagnostics._replay import Replay as Replay
from strata_jax.diagnostics._replay import TraceDifference as TraceDifference
from strata_jax.diagnostics._replay import replay as replay
from strata_jax.diagnostics._trace import Trace as Trace
from strata_jax.diagnostics._trace import begin_trace as begin_trace
from strata_jax.diagnostics._trace import extend_trace as extend_trace
from strata_jax.diagnostics._trace import record_trace as record_trace
from strata_jax.diagnostics._trace_file import load_trace as load_trace
from strata_jax.diagnostics._trace_file import save_trace as save_trace
