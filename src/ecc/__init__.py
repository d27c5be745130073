"""ECC: compress a PyTorch network to an energy budget."""

__version__ = "0.1.0"
