"""Registry: which rule applies to which torch operator.

Names are those of ATen without overload and without the trailing underscore of in-place variants. Operators that torch
tags as pointwise need no entry. To support a new operator, add its name to the rule that fits, and a case to
`tests/graph/test_operators.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from ecc.graph.labels import PERMUTES, Labels
from ecc.graph.ops import attention, elementwise, linear, recurrent, reduce, shape, sums

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer

Rule = Callable[["Tracer", "Call"], "Labels | list[Labels]"]

UNKNOWN: Rule = reduce.unknown
POINTWISE: Rule = elementwise.pointwise
CONSTANT: Rule = reduce.constant
RESHAPE: Rule = shape.reshape

_MOVES = PERMUTES.union(
    "expand expand_as unsqueeze squeeze select unbind unfold diagonal repeat tile narrow repeat_interleave "
    "broadcast_to adjoint".split()
)

_FAMILIES: dict[Rule, Iterable[str]] = {
    linear.convolution: ("conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d".split()),
    linear.linear: ["linear"],
    linear.matmul: ["matmul", "mm", "bmm"],
    linear.addmm: ["addmm"],
    linear.grouped_mm: ["_grouped_mm"],
    attention.baddbmm: ["baddbmm"],
    attention.attention: ["scaled_dot_product_attention"],
    linear.embedding: ["embedding"],
    linear.bilinear: ["bilinear"],
    recurrent.layers: ["lstm", "gru", "rnn_tanh", "rnn_relu"],
    recurrent.cell: ["lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"],
    recurrent.pack: ["_pack_padded_sequence", "_pad_packed_sequence"],
    elementwise.channel_norm: (
        "batch_norm instance_norm native_batch_norm _native_batch_norm_legit "
        "_native_batch_norm_legit_no_training cudnn_batch_norm".split()
    ),
    elementwise.layer_norm: ["layer_norm", "native_layer_norm"],
    sums.rms_norm: ["rms_norm"],
    elementwise.group_norm: ["group_norm", "native_group_norm"],
    elementwise.prelu: ["prelu", "_prelu_kernel"],
    elementwise.copy_into: ["copy"],
    elementwise.pointwise: (
        "hardswish hardsigmoid hardtanh mish silu celu selu elu rrelu relu6 leaky_relu log_sigmoid where clamp_min "
        "clamp_max clamp masked_fill addcmul addcdiv lerp threshold softplus".split()
    ),
    reduce.reduction: (
        "mean sum amax amin max min prod var std var_mean std_mean norm linalg_vector_norm logsumexp any all argmax "
        "argmin count_nonzero median nanmean".split()
    ),
    reduce.along_axis: (
        "softmax _softmax log_softmax _log_softmax cumsum cumprod sort argsort topk logcumsumexp _safe_softmax "
        "_fft_r2c _fft_c2r _fft_c2c".split()
    ),
    reduce.spatial: (
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
        "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _adaptive_avg_pool2d "
        "_adaptive_avg_pool3d max_pool2d_with_indices max_pool3d_with_indices max_pool1d_with_indices "
        "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_bilinear2d upsample_bicubic2d upsample_linear1d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d grid_sampler_2d grid_sampler_3d".split()
    ),
    reduce.same: (
        "clone contiguous detach alias lift_fresh to _to_copy type_as dropout feature_dropout "
        "alpha_dropout feature_alpha_dropout native_dropout positive requires_grad zero fill bernoulli "
        "normal uniform zeros_like ones_like full_like empty_like rand_like randn_like resolve_conj "
        "resolve_neg".split()
    ),
    reduce.constant: (
        "zeros ones full empty new_zeros new_ones new_full new_empty "
        "rand randn scalar_tensor empty_strided new_empty_strided empty_permuted".split()
    ),
    reduce.regions: ["torchvision::roi_align", "torchvision::roi_pool"],
    reduce.positions: ["affine_grid_generator", "torchvision::nms"],
    reduce.unknown: ["fill_diagonal", "triu", "tril"],
    shape.move: _MOVES,
    shape.roll: ["roll", "flip"],
    shape.slice_axis: ["slice"],
    shape.split: ["split", "split_with_sizes", "chunk", "tensor_split", "unsafe_chunk", "unsafe_split"],
    shape.reshape: ["view", "reshape", "flatten", "unflatten", "_unsafe_view", "view_as", "reshape_as"],
    shape.pixel_shuffle: ["pixel_shuffle"],
    shape.pixel_unshuffle: ["pixel_unshuffle"],
    shape.channel_shuffle: ["channel_shuffle", "native_channel_shuffle"],
    shape.cat: ["cat", "concat", "concatenate"],
    shape.stack: ["stack"],
    shape.pad: ["constant_pad_nd"],
    shape.index: ["index", "_unsafe_index"],
    shape.glu: ["glu"],
    shape.im2col: ["im2col"],
    shape.col2im: ["col2im"],
    shape.to_complex: ["view_as_complex"],
    shape.to_real: ["view_as_real"],
    shape.add_at: ["index_add", "scatter_add"],
    shape.write_at: ["index_put"],
    shape.gather: ["gather", "index_select", "take_along_dim"],
}

_RULES: dict[str, Rule] = {name: rule for rule, names in _FAMILIES.items() for name in names}

MOVING = frozenset({shape.move, shape.roll, shape.slice_axis, shape.split, shape.reshape})
"""Rules of operators that only rearrange their argument."""
FOLLOWING = MOVING | {reduce.same, shape.index}
"""Rules that keep the elements of a parameter, so that each can be followed."""


LAYERS = frozenset({linear.convolution, linear.linear, linear.matmul, linear.addmm, linear.grouped_mm})
"""Rules of layers with a weight."""

_POSITIONS = torch.ops.aten.where.default

_CREATING = frozenset(
    "zero fill bernoulli normal uniform zeros_like ones_like full_like empty_like rand_like randn_like".split()
)


def keeps_values(rule: Rule, name: str) -> bool:
    """Whether an operator moves or copies the values of its argument."""
    return rule in FOLLOWING and name not in _CREATING


USES_WEIGHTS = FOLLOWING | {
    linear.convolution,
    linear.linear,
    linear.matmul,
    linear.addmm,
    linear.grouped_mm,
    linear.embedding,
    linear.bilinear,
    recurrent.layers,
    recurrent.cell,
    attention.attention,
    elementwise.pointwise,
    elementwise.layer_norm,
    elementwise.group_norm,
    sums.rms_norm,
}
"""Rules that handle parameters with several axes."""

KEEPS_SCORES = frozenset({elementwise.pointwise, reduce.along_axis, reduce.same})
"""Rules of operators between the scores of attention and their product with the values, besides `MOVING`."""

WEIGHTED = USES_WEIGHTS - FOLLOWING - {elementwise.pointwise}
"""Rules of layers, norms and attention, which have parameters or may have them."""


def rule_for(func: OpOverload, name: str) -> Rule | None:
    """The rule of an operator; None if torch should decompose it."""
    rule = _RULES.get(name) or _RULES.get(name.rstrip("_"))
    pointwise = torch.Tag.pointwise in func.tags
    if pointwise and (rule is None or rule is reduce.reduction):  # torch.max of two tensors
        return elementwise.pointwise
    return rule


def selects_by_value(func: OpOverload) -> bool:
    """Whether the size of the results of an operator depends on values. It may for operators of other libraries."""
    return torch.Tag.dynamic_output_shape in func.tags or func.namespace != "aten" or func is _POSITIONS


def is_moving(line: str) -> bool:
    """Whether an operator, or that of an `operator@file:line`, only moves data."""
    return _RULES.get(line.partition("@")[0]) in MOVING


def mixes_devices(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether arguments are on meta and real devices. Index buffers and constants keep their values in a meta trace."""
    real = meta = False
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor):
                meta |= item.device.type == "meta"
                real |= item.device.type != "meta"
    return real and meta
