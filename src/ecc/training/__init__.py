"""Room 4: the one counted loop over batches; run folders; resuming."""

from .batches import BatchStream
from .checkpoint import load_state, save_state
from .distill import Teacher, distillation_loss
from .distributed import DistributedContext, find_distributed
from .loggers import Logger, Loggers, TensorBoardLogger
from .loop import Diverged, OnStep, OptimizerLike, TrainResult, train, train_steps
from .progress import Histories, History
from .random_state import derived_seed, fork_rng, rng_state, seed_everything, set_rng_state
from .run_dir import RunDir, RunInUse, open_run
from .schedules import PAPER_FINE_TUNING_LR, Constant, Cosine, LRSchedule
from .settings import DistillSettings, TrainSettings
from .signals import Interrupted, StopRequests

__all__ = [
    "PAPER_FINE_TUNING_LR",
    "BatchStream",
    "Constant",
    "Cosine",
    "DistillSettings",
    "DistributedContext",
    "Diverged",
    "Histories",
    "History",
    "Interrupted",
    "LRSchedule",
    "Logger",
    "Loggers",
    "OnStep",
    "OptimizerLike",
    "RunDir",
    "RunInUse",
    "StopRequests",
    "Teacher",
    "TensorBoardLogger",
    "TrainResult",
    "TrainSettings",
    "derived_seed",
    "distillation_loss",
    "find_distributed",
    "fork_rng",
    "load_state",
    "open_run",
    "rng_state",
    "save_state",
    "seed_everything",
    "set_rng_state",
    "train",
    "train_steps",
]
