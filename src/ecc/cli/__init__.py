"""The command line: verbs to functions, nothing else."""

from . import comparing, compressing, exporting, learning, looking, measuring, reporting
from .app import app, main

__all__ = ["app", "comparing", "compressing", "exporting", "learning", "looking", "main", "measuring", "reporting"]
