"""What must hold on a CUDA machine: `benchmarks/gpu_acceptance.py` runs these checks and records them."""

from __future__ import annotations

from gpu_checks.common import Check
from gpu_checks.gpu_tests import run_marked_tests
from gpu_checks.loops import amp_with_grad_scaler, cuda_graph_on_and_off, own_loop
from gpu_checks.runs import checkpoint_and_resume, command_line_with_meter, two_processes_on_one_gpu
from gpu_checks.settings import torch_settings
from gpu_checks.tracing import trace_networks, trace_on_cpu

CHECKS = (
    Check("tests", "tests marked `gpu`", run_marked_tests, 180, phase=0),
    Check("command_line", "`ecc profile`, `fit`, `compress` with the NVML meter", command_line_with_meter, 180, 1, 2),
    Check("cpu_groups", "channel groups on the CPU", trace_on_cpu, 160, phase=1, processes=12),
    Check("tracing", "channel groups on CUDA and on the CPU", trace_networks, 175, processes=13, needs="cpu_groups"),
    Check("settings", "channel groups under torch settings", torch_settings, 120, processes=5),
    Check("resume", "checkpoint, kill and resume", checkpoint_and_resume, 140),
    Check("cuda_graph", "training with and without a CUDA graph", cuda_graph_on_and_off, 120),
    Check("two_processes", "two processes on one GPU", two_processes_on_one_gpu, 120, processes=2),
    Check("own_loop", "the README's own loop", own_loop, 100),
    Check("amp", "AMP with GradScaler and EccSolver", amp_with_grad_scaler, 100),
)
"""All checks, by phase."""
