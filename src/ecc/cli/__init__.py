"""The command line: verbs to functions, nothing else."""

from . import compressing, learning, looking, measuring
from .app import app, main

__all__ = ["app", "compressing", "learning", "looking", "main", "measuring"]
