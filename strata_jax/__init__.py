"""Exact speculative decoding in pure JAX.

Whatever is drafted and however it is gated, the samples are the target's.
"""

__version__ = "0.1.0"

from strata_jax import audit as audit
from strata_jax import checkpoints as checkpoints
from strata_jax import diagnostics as diagnostics
from strata_jax import drafters as drafters
from strata_jax import experts as experts
from strata_jax import gates as gates
from strata_jax import measures as measures
from strata_jax import models as models
from strata_jax import sampling as sampling
from strata_jax import targets as targets
from strata_jax import testing as testing
from strata_jax import training as training
from strata_jax import verifiers as verifiers
from strata_jax._decode import ancestral_decoder as ancestral_decoder
from strata_jax._decode import decode as decode
from strata_jax._decode import output_tokens as output_tokens
from strata_jax._decode import speculative_decoder as speculative_decoder
from strata_jax._generate import Generation as Generation
from strata_jax._generate import generate as generate
from strata_jax._request import DecoderState as DecoderState
from strata_jax._request import Settings as Settings
from strata_jax._status import DecodingError as DecodingError
from strata_jax._status import Status as Status
from strata_jax._status import raise_if_failed as raise_if_failed
from strata_jax._types import Committed as Committed
from strata_jax._types import Context as Context
from strata_jax._types import Drafter as Drafter
from strata_jax._types import DraftRow as DraftRow
from strata_jax._types import DraftStep as DraftStep
from strata_jax._types import Draws as Draws
from strata_jax._types import FinishReason as FinishReason
from strata_jax._types import Gate as Gate
from strata_jax._types import GateContext as GateContext
from strata_jax._types import GateDecision as GateDecision
from strata_jax._types import GateSetting as GateSetting
from strata_jax._types import Params as Params
from strata_jax._types import Proposal as Proposal
from strata_jax._types import RowKind as RowKind
from strata_jax._types import Source as Source
from strata_jax._types import SpeculativeDecoder as SpeculativeDecoder
from strata_jax._types import TargetModel as TargetModel
from strata_jax._types import TargetRows as TargetRows
from strata_jax._types import Verdict as Verdict
from strata_jax._types import Verifier as Verifier
from strata_jax._types import Window as Window
from strata_jax.checkpoints import load_bundled as load_bundled
