"""Models: what they are, where their weights come from, and the step that runs them."""

from leadframe.models.checkpoint import Checkpoint, open_checkpoint
from leadframe.models.info import GenerationDefaults, ModelInfo, Parameter
from leadframe.models.loading import load_weights
from leadframe.models.model import Model
from leadframe.models.open_model import check_backend, describe_impl, open_model
from leadframe.models.ranks import check_ranks
from leadframe.models.sources import StoredWeight

__all__ = [
    "Checkpoint",
    "GenerationDefaults",
    "Model",
    "ModelInfo",
    "Parameter",
    "StoredWeight",
    "check_backend",
    "check_ranks",
    "describe_impl",
    "load_weights",
    "open_checkpoint",
    "open_model",
]
