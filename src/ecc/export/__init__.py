"""The slim network as files for deployment, verified before they are kept."""

from .formats import TOLERANCE, ExportVerification
from .onnx_tools import Latency, compare_latency
from .run_export import Exported, ExportedRun, export_model, export_run
from .slim_file import load_slim, save_slim

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
