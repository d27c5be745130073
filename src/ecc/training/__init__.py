"""Training: the loop of all methods, counted batches, run folders that can be resumed."""

from ecc.settings import Cosine, DistillSettings, TrainSettings

from .batches import BatchStream, to_device
from .checkpoint import load_state, save_state, weights_checksum
from .distill import Teacher, training_loss
from .distributed import DistributedContext, find_distributed
from .history import Histories, History, Logger, Loggers, TensorBoardLogger
from .loop import Diverged, OnStep, OptimizerLike, StepInfo, Training, TrainResult, fused_on_gpu, train
from .rng import derived_seed, fork_rng, rng_state, seed_everything, set_rng_state
from .run_dir import RunDir, RunInUse, history_lines, open_run
from .signals import Interrupted, StopRequests

__all__ = [
    "BatchStream",
    "Cosine",
    "DistillSettings",
    "DistributedContext",
    "Diverged",
    "Histories",
    "History",
    "Interrupted",
    "Logger",
    "Loggers",
    "OnStep",
    "OptimizerLike",
    "RunDir",
    "RunInUse",
    "StepInfo",
    "StopRequests",
    "Teacher",
    "TensorBoardLogger",
    "TrainResult",
    "TrainSettings",
    "Training",
    "derived_seed",
    "find_distributed",
    "fork_rng",
    "fused_on_gpu",
    "history_lines",
    "load_state",
    "open_run",
    "rng_state",
    "save_state",
    "seed_everything",
    "set_rng_state",
    "to_device",
    "train",
    "training_loss",
    "weights_checksum",
]
