"""What must hold on a CUDA machine: `benchmarks/gpu_acceptance.py` runs these checks and records them."""

from __future__ import annotations

from gpu_checks.common import Check
from gpu_checks.gpu_tests import run_marked_tests
from gpu_checks.loops import amp_with_grad_scaler, cuda_graph_on_and_off, own_loop
from gpu_checks.runs import checkpoint_and_resume, command_line_with_meter, two_processes_on_one_gpu
from gpu_checks.settings import torch_settings
from gpu_checks.tracing import trace_networks

CHECKS = (
    Check("tests", "tests marked `gpu`", run_marked_tests, limit_seconds=180, measures_energy=True),
    Check("command_line", "`ecc profile`, `fit`, `compress` with the NVML meter", command_line_with_meter, 180, True),
    Check("tracing", "channel groups on CUDA and on the CPU", trace_networks, limit_seconds=270, processes=13),
    Check("settings", "channel groups under torch settings", torch_settings, limit_seconds=200, processes=5),
    Check("resume", "checkpoint, kill and resume", checkpoint_and_resume, limit_seconds=150),
    Check("cuda_graph", "training with and without a CUDA graph", cuda_graph_on_and_off, limit_seconds=120),
    Check("two_processes", "two processes on one GPU", two_processes_on_one_gpu, limit_seconds=120),
    Check("own_loop", "the README's own loop", own_loop, limit_seconds=90),
    Check("amp", "AMP with GradScaler and EccSolver", amp_with_grad_scaler, limit_seconds=90),
)
"""All checks in the order in which they start: those that measure energy run first and alone."""
