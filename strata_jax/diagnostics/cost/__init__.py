"""What does a window cost on this machine, and which exact policy is the fastest?

A window without drafts takes v0 seconds, each draft call c more, each offered row v1
more. `measure` finds these numbers by timing, `record` finds how sure the drafter is
and how often its drafts are accepted, and `predict` puts the two together for any gate,
threshold and number of drafts; `choose` looks for the best, plain decoding included.

  costs = diagnostics.cost.measure(target, drafter, params, prompt)
  records = diagnostics.cost.record(target, drafter, params, prompts, max_new_tokens=64)
  best = diagnostics.cost.choose(costs, records)[0]

Every policy is exact, so that none of these numbers can bias an output.
"""

from strata_jax.diagnostics.cost._drafts import DraftRecords as DraftRecords
from strata_jax.diagnostics.cost._drafts import record as record
from strata_jax.diagnostics.cost._policies import GATES as GATES
from strata_jax.diagnostics.cost._policies import Policy as Policy
from strata_jax.diagnostics.cost._policies import Prediction as Prediction
from strata_jax.diagnostics.cost._policies import choose as choose
from strata_jax.diagnostics.cost._policies import predict as predict
from strata_jax.diagnostics.cost._windows import WindowCosts as WindowCosts
from strata_jax.diagnostics.cost._windows import measure as measure
