"""Pruning methods that ECC is compared with, one per file."""
