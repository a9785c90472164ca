"""Exact laws of windows and loops, by enumeration through the real `step`."""

from strata_jax.audit._cells import WindowCells as WindowCells
from strata_jax.audit._cells import WindowEnumerator as WindowEnumerator
from strata_jax.audit._cells import host_states as host_states
from strata_jax.audit._cells import stack as stack
from strata_jax.audit._laws import LawDifference as LawDifference
from strata_jax.audit._laws import compare_laws as compare_laws
from strata_jax.audit._laws import markov_law as markov_law
from strata_jax.audit._laws import sequence_law as sequence_law
from strata_jax.audit._laws import sequence_laws as sequence_laws
