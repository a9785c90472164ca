"""Exact laws of windows and loops, by enumeration through the real `step`."""

from strata_jax.audit._enumerate import LawDifference as LawDifference
from strata_jax.audit._enumerate import WindowCells as WindowCells
from strata_jax.audit._enumerate import WindowEnumerator as WindowEnumerator
from strata_jax.audit._enumerate import compare_laws as compare_laws
from strata_jax.audit._enumerate import host_states as host_states
from strata_jax.audit._enumerate import markov_law as markov_law
from strata_jax.audit._enumerate import sequence_law as sequence_law
from strata_jax.audit._enumerate import sequence_laws as sequence_laws
from strata_jax.audit._enumerate import stack as stack
