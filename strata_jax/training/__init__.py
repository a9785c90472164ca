"""Training: byte corpora, the optimisation loop, and checkpoints of a run."""

from strata_jax.training._checkpoints import load_trained_params as load_trained_params
from strata_jax.training._checkpoints import load_training as load_training
from strata_jax.training._checkpoints import save_training as save_training
from strata_jax.training._corpus import cut_windows as cut_windows
from strata_jax.training._corpus import join_documents as join_documents
from strata_jax.training._corpus import sample_batches as sample_batches
from strata_jax.training._loop import Trainer as Trainer
from strata_jax.training._loop import TrainingState as TrainingState
from strata_jax.training._loop import evaluate as evaluate
from strata_jax.training._loop import train as train
from strata_jax.training._loop import trainer as trainer
from strata_jax.training._objective import OBJECTIVES as OBJECTIVES
from strata_jax.training._objective import DraftTables as DraftTables
from strata_jax.training._objective import TargetStates as TargetStates
from strata_jax.training._objective import distillation_loss as distillation_loss
from strata_jax.training._objective import joint_loss as joint_loss
from strata_jax.training._optimizers import adamw as adamw
from strata_jax.training._optimizers import muon as muon
