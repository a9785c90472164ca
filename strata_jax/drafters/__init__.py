"""Drafters: sources of proposals, all built by one packet builder."""

from strata_jax.drafters._model import ModelDrafterState as ModelDrafterState
from strata_jax.drafters._model import layer_skip as layer_skip
from strata_jax.drafters._model import model as model
from strata_jax.drafters._mtp import MtpDrafterState as MtpDrafterState
from strata_jax.drafters._mtp import mtp as mtp
from strata_jax.drafters._none import none as none
from strata_jax.drafters._packet import build_proposal as build_proposal
from strata_jax.drafters._scripted import scripted as scripted
from strata_jax.drafters._stateless import stateless as stateless
from strata_jax.drafters._suffix import suffix as suffix
from strata_jax.drafters._suffix_first import suffix_first as suffix_first
from strata_jax.drafters._suffix_root import suffix_root as suffix_root
