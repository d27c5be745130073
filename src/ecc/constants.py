"""Names and default values that the command line shows in its help. This module imports nothing, so help is fast."""

from __future__ import annotations

BUNDLED_TASKS = ("digits", "alexnet", "mobilenet_v1", "erfnet", "resnet20", "resnet56")
"""The tasks that need no file and no other package; `ecc.zoo.image_task` has the networks."""

COMPARED_METHODS = ("ecc", "netadapt", "amc", "eap", "lcp", "legr", "uniform", "greedy", "greedy_taylor")
"""The methods of `ecc compare` by default, for any network."""

PEER_METHODS = ("tp_magnitude", "tp_taylor", "tp_group_norm")
"""Methods of other packages, which are optional extras."""

TRANSFORMER_METHODS = ("one_shot", "wanda_sp", "flap", "llm_pruner", "shortgpt", "2ssp")
"""Methods without training, for transformers."""

METHOD_NAMES = (*COMPARED_METHODS, "isomorphic", "halp", *PEER_METHODS, *TRANSFORMER_METHODS)
"""The methods of `ecc compress`; `ecc.methods.registry` has the classes."""

PROTOCOLS = ("equal", "published")
"""What is equal in a comparison: the number of batches in all; or that of fine-tuning, after a search as published."""

SCRATCH = "scratch"
"""In a comparison: the widths that ECC found, trained from random weights."""

ATTENTION_UNITS = ("heads", "width")
"""What is pruned of attention layers: whole heads, or the width inside heads."""

EXPORT_FORMATS = ("safetensors", "pt2", "onnx", "torchscript")
"""What `ecc export` writes; the first is the default."""

RUN_PROFILE = "network.profile"
"""The profile in a run folder."""

WORKLOAD_PROFILES = ("decode.profile", "prefill.profile")
"""Profiles of a language model in a run folder."""

PRESETS = ("default", "paper")
"""Presets of `ecc compress`: `paper` is the published algorithm with its energy model, design and settings."""

MIN_WIDTH_RATIO = 0.1
"""Default of `min_width_ratio`. The paper's minimum of one channel lets whole layers collapse."""

PHASES = ("pretrain", "prune", "finetune")
"""Phases of a run, in order. Pretrain trains the dense network, prune removes channels while training continues, and
finetune trains the slim network."""

TRANSFORMERS_DEFAULTS = {"kd_temperature": 1.0}
"""Settings of `ecc compress hf:...`, for models of transformers; typed options win."""
