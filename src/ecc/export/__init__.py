"""Room 7: the slim network as files for other programs, outputs compared before they are kept."""

from .job import Exported, ExportedRun, export_model, export_run
from .latency import Latency, compare_latency
from .loading import load_slim, save_slim
from .verification import TOLERANCE, ExportVerification

__all__ = [
    "TOLERANCE",
    "ExportVerification",
    "Exported",
    "ExportedRun",
    "Latency",
    "compare_latency",
    "export_model",
    "export_run",
    "load_slim",
    "save_slim",
]
