"""Platforms: energy computed from published constants and the counts of a channel graph.

    platform:jetson-tx2                          NVIDIA Jetson TX2, GPU rail
    platform:gtx-1080-ti                         NVIDIA GeForce GTX 1080 Ti, board
    platform:eyeriss                             an Eyeriss-like accelerator, chip and DRAM
    platform:jetson-orin-nano, jetson-orin-nx,   NVIDIA Jetson Orin modules, whole module; jetson-orin is the AGX Orin
      jetson-agx-orin, jetson-orin
    platform:raspberry-pi-5                      Raspberry Pi 5, four Cortex-A76 cores, whole board
    platform:a100, platform:h100                 NVIDIA A100 80GB SXM and H100 SXM, board
    platform:jetson-tx2,tile=8                   widths are rounded up to multiples of 8
    platform:jetson-tx2,noise=0.03,seed=1        3 % random noise on joules and seconds, seeded

Each layer of the graph is one kernel:

    seconds = max(launch, FLOPs / (share of peak * peak), bytes / (share of bandwidth * bandwidth))
    joules  = pJ per MAC * MACs + pJ per byte * bytes + joules per kernel + static watts * seconds

The cost at any widths takes a fraction of a millisecond, and no network is built. The numbers are estimates and are
labelled so. Because the exact values are known (`Platform.truth`), platforms also test designs, fits and compression.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from ecc.errors import NoMeter, did_you_mean
from ecc.graph import ChannelGraph
from ecc.measure.meter import Estimated, MeterInfo, Reading

# --- constants ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Energy and speed of a device."""

    device: str
    scope: str
    """What the joules cover."""
    joules_per_mac: float
    joules_per_weight_byte: float
    joules_per_activation_byte: float
    joules_per_kernel: float
    static_watts: float
    """Power that does not depend on the work."""
    peak_flops: float
    """Per second; a multiply-accumulate counts as two."""
    peak_share: float
    """Fraction of the peak that a layer reaches."""
    bandwidth: float
    """Bytes per second."""
    bandwidth_share: float
    """Fraction of the bandwidth that a layer reaches."""
    launch_seconds: float
    """Minimum time per kernel."""
    value_bytes: int | None = None
    """Size of a stored number; None for the size in the traced network."""
    skips_zeros: bool = False
    """Whether a multiplication by a zero weight costs nothing."""
    folded: tuple[str, ...] = ()
    """Kinds of layers that cost nothing, because they are fused with the previous layer."""
    source: str
    """Where the constants were published, or what they were derived from."""


# Energy per MAC, byte and kernel of the two GPUs are solved from what Yang, Zhu and Liu, "ECC" (CVPR 2019),
# measured at batch 1 in fp32: dense AlexNet, MobileNet v1 and ERFNet (512 x 1024). They include the overhead of that
# software. `tests/measure/meters/test_platform.py` has the comparison.
#
# Eyeriss counts in the energy of one 16-bit MAC, to which one access of a register file is 1, of the global
# buffer 6 and of DRAM 200 (Chen et al., ISCA 2016). On the chip a MAC takes itself, four accesses of
# the register file (weight, input, sum in and out) and about 1/6 access of the buffer, together 6. The chip
# draws 278 mW at 34.7 frames/s of AlexNet's 666 M convolution MACs (JSSC 2017): 12 pJ a MAC, so the unit is 2 pJ.
_EYERISS_UNIT = 0.278 / 34.7 / 666e6 / (1 + 4 * 1 + 6 / 6)
_EYERISS_BYTE = (200 + 6) * _EYERISS_UNIT / 2  # from DRAM through the buffer, 16 bits at a time


def _from_specification(
    device: str,
    scope: str,
    *,
    watts: float,
    idle_watts: float,
    peak_flops: float,
    bandwidth: float,
    pj_per_byte: float,
    launch_seconds: float,
    source: str,
    unchecked: str,
) -> Constants:
    """Constants of a device of which only the specification is published.

    At its power limit a device can at best run at its peak, so the power that is left after the idle power and the
    memory traffic of a busy memory gives the energy of a MAC: joules_per_mac = (watts - idle - pJ/byte * bandwidth) /
    (peak / 2). Half of the peak and 70 % of the bandwidth are assumed to be reached, as for the TX2, at which the power
    limit is still the power. These are estimates: compare networks with them, not devices.
    """
    memory_watts = pj_per_byte * 1e-12 * bandwidth
    return Constants(
        device=device,
        scope=scope,
        joules_per_mac=max(0.1, watts - idle_watts - memory_watts) / (0.5 * peak_flops),
        joules_per_weight_byte=pj_per_byte * 1e-12,
        joules_per_activation_byte=pj_per_byte * 1e-12,
        joules_per_kernel=0.0,
        static_watts=idle_watts,
        peak_flops=peak_flops,
        peak_share=0.5,  # assumed
        bandwidth=bandwidth,
        bandwidth_share=0.7,  # assumed
        launch_seconds=launch_seconds,
        source=f"{source}. Assumed, without a document: {unchecked}, shares of peak and bandwidth, launch time",
    )


# Current devices, from their specifications: fp32 without tensor cores, as the default precision runs. The document
# that a number was checked against stands beside it; "assumed" marks a number for which none was found.
# A byte of HBM takes 31 pJ (3.9 pJ per bit: O'Connor et al., Fine-Grained DRAM, MICRO 2017); a byte of LPDDR with its
# controller is assumed to take as much.
_LPDDR_PJ, _HBM_PJ = 32.0, 31.0

PLATFORMS: Mapping[str, Constants] = MappingProxyType(
    {
        "jetson-tx2": Constants(
            device="NVIDIA Jetson TX2",
            scope="GPU rail",
            # The bilinear fit that the authors publish for AlexNet amounts to 31.8 to 34.9 pJ a MAC in the
            # convolutions and 107 to 119 pJ a weight byte in the fully connected layers; so it does here, once
            # bytes, and time at static power, are added to the MACs.
            joules_per_mac=30.5e-12,
            joules_per_weight_byte=96e-12,
            joules_per_activation_byte=160e-12,
            joules_per_kernel=75e-6,
            static_watts=0.153,  # idle VDD_SYS_GPU in tegrastats
            peak_flops=256 * 2 * 1.30e9,  # cores, FLOPs of a fused multiply-add, clock
            peak_share=0.5,  # assumed
            bandwidth=58.4e9,  # TX2 datasheet
            bandwidth_share=0.7,  # assumed
            launch_seconds=100e-6,  # assumed: eager mode, launched by an Arm core
            source="solved from dense energies in ECC (CVPR 2019) and the authors' fit for AlexNet; TX2 datasheet",
        ),
        "gtx-1080-ti": Constants(
            device="NVIDIA GeForce GTX 1080 Ti",
            scope="board",
            joules_per_mac=30.5e-12,  # of the TX2, a chip of the same generation; the next three are solved for
            joules_per_weight_byte=595e-12,
            joules_per_activation_byte=167e-12,
            joules_per_kernel=2.31e-3,
            static_watts=13.0,  # idle board: Tom's Hardware, review of the GTX 1080 Ti
            peak_flops=3584 * 2 * 1.582e9,  # NVIDIA's specification, as the next
            peak_share=0.5,  # assumed
            bandwidth=484e9,
            bandwidth_share=0.75,  # assumed
            launch_seconds=30e-6,  # assumed: eager mode
            source="solved from dense energies in ECC (CVPR 2019); NVIDIA specification; Tom's Hardware review",
        ),
        "eyeriss": Constants(
            device="Eyeriss-like accelerator, 65 nm, 16 bit",
            scope="chip and DRAM",
            joules_per_mac=6 * _EYERISS_UNIT,
            joules_per_weight_byte=_EYERISS_BYTE,
            joules_per_activation_byte=_EYERISS_BYTE,
            joules_per_kernel=0.0,
            static_watts=0.0,  # within the energy of a MAC
            peak_flops=168 * 2 * 200e6,  # processing elements, clock
            peak_share=0.69,  # 34.7 frames/s of AlexNet's convolutions
            bandwidth=0.5e9,  # assumed
            bandwidth_share=1.0,
            launch_seconds=100e-6,  # assumed: the time to configure a layer
            value_bytes=2,
            skips_zeros=True,  # as its successor does: Chen et al., Eyeriss v2, JETCAS 2019
            folded=("norm", "elementwise"),
            source="coarse stand-in: Chen et al., Eyeriss, ISCA 2016 and JSSC 2017; one fetch of each value",
        ),
        "jetson-orin-nano": _from_specification(
            "NVIDIA Jetson Orin Nano 8GB",
            "module",
            watts=15.0,  # power mode "15W": NVIDIA, nvpmodel of the Orin Nano
            idle_watts=2.2,  # VDD_IN of an idle kit in tegrastats: NVIDIA developer forum, topic 348662
            peak_flops=1024 * 2 * 0.625e9,  # CUDA cores, FLOPs of a fused multiply-add, clock in the mode "15W"
            bandwidth=68e9,  # Orin Nano data sheet, before the update to "Super"
            pj_per_byte=_LPDDR_PJ,
            launch_seconds=50e-6,
            source="Jetson Orin Nano data sheet (15 W, 1024 cores at 625 MHz, 68 GB/s); idle: NVIDIA forum, 348662",
            unchecked="energy of a byte",
        ),
        "jetson-orin-nx": _from_specification(
            "NVIDIA Jetson Orin NX 16GB",
            "module",
            watts=25.0,  # Orin NX data sheet: 10 to 25 W
            idle_watts=2.2,  # assumed: that of the Orin Nano, the same chip
            peak_flops=1024 * 2 * 0.918e9,  # deviceQuery of an Orin NX 16GB: 1024 cores, 918 MHz
            bandwidth=102.4e9,  # assumed: 128 bits at 6400 MT/s, as the Orin Nano Super has
            pj_per_byte=_LPDDR_PJ,
            launch_seconds=50e-6,
            source="Jetson Orin NX data sheet (25 W); deviceQuery of an Orin NX 16GB (1024 cores at 918 MHz)",
            unchecked="bandwidth, idle power, energy of a byte",
        ),
        "jetson-agx-orin": _from_specification(
            "NVIDIA Jetson AGX Orin 64GB",
            "module",
            watts=60.0,  # AGX Orin data sheet: 15 to 60 W
            idle_watts=3.0,  # assumed
            peak_flops=2048 * 2 * 1.3e9,  # assumed, as the next: no document was at hand
            bandwidth=204.8e9,
            pj_per_byte=_LPDDR_PJ,
            launch_seconds=40e-6,
            source="Jetson AGX Orin data sheet (60 W)",
            unchecked="2048 cores at 1.3 GHz, 204.8 GB/s, idle power, energy of a byte",
        ),
        "raspberry-pi-5": _from_specification(
            "Raspberry Pi 5",
            "board",
            watts=9.8,  # all cores busy, 4 GB model: measured by J. Geerling, August 2024; as the next
            idle_watts=3.3,
            peak_flops=4 * 16 * 2.4e9,  # cores, FLOPs of two 128-bit fused multiply-adds, clock
            bandwidth=17.1e9,  # LPDDR4X-4267, 32 bits: Raspberry Pi 5 product brief
            pj_per_byte=_LPDDR_PJ,
            launch_seconds=5e-6,
            source="Raspberry Pi 5 product brief (BCM2712, 4 Cortex-A76 at 2.4 GHz); power: J. Geerling, 2024",
            unchecked="FLOPs per cycle, energy of a byte",
        ),
        "a100": _from_specification(
            "NVIDIA A100-SXM4-80GB",
            "board",
            watts=400.0,  # NVIDIA A100 data sheet, SXM 80GB, as the peak and the bandwidth
            idle_watts=55.0,  # assumed
            peak_flops=19.5e12,
            bandwidth=2039e9,
            pj_per_byte=_HBM_PJ,
            launch_seconds=5e-6,
            source="NVIDIA A100 data sheet (SXM 80GB: 400 W, 19.5 TFLOPS fp32, 2039 GB/s)",
            unchecked="idle power",
        ),
        "h100": _from_specification(
            "NVIDIA H100 SXM5 80GB",
            "board",
            watts=700.0,  # NVIDIA H100 data sheet, SXM, as the peak and the bandwidth
            idle_watts=70.0,  # assumed; 74 to 80 W were reported for the H200, the same chip
            peak_flops=66.9e12,
            bandwidth=3350e9,
            pj_per_byte=_HBM_PJ,
            launch_seconds=5e-6,
            source="NVIDIA H100 data sheet (SXM: 700 W, 66.9 TFLOPS fp32, 3350 GB/s)",
            unchecked="idle power",
        ),
    }
)


ALIASES = {"jetson-orin": "jetson-agx-orin"}
"""Other names of platforms."""


# --- device ------------------------------------------------------------------------------------------


class Platform:
    """An analytic device: an `Analytic`, never a meter.

    Without noise it gives the same bits on every machine. With noise it depends only on seed, widths and repeat, so a
    resumed run gets the same numbers as an uninterrupted one.

    Args:
        name: One of `PLATFORMS`.
        noise: Standard deviation of the logarithm of joules, and of seconds.
        seed: Random seed of the noise.
        tile: Widths are rounded up to a multiple of this, as on real devices.
    """

    def __init__(self, name: str, *, noise: float = 0.0, seed: int = 0, tile: int = 1) -> None:
        name = ALIASES.get(name, name)
        if name not in PLATFORMS:
            suggestion, known = did_you_mean(name.replace("_", "-"), PLATFORMS), ", ".join(PLATFORMS)
            raise NoMeter(f"platform {name!r} is unknown{suggestion}; known are {known}.")
        if not 0 <= noise <= 1:
            raise NoMeter(f"platform:{name}: noise={noise:g} is outside 0..1; 0.03 means 3 %.")
        if tile < 1:
            raise NoMeter(f"platform:{name}: tile={tile} is below 1; give 1 for no rounding.")
        self.name = name
        self.constants = PLATFORMS[name]
        self.noise = noise
        self.seed = seed
        self.tile = tile

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int], *, repeat: int = 0) -> Reading:
        """Joules and seconds of one inference of the graph's example input, with noise, if any.

        Groups that are not named keep their full width. Each repeat has its own noise.
        """
        vector = graph.widths(widths)
        truth = self._total(graph, vector)
        if not self.noise:
            return truth
        joules, seconds = self._deviations(vector, repeat)
        return Reading(truth.joules * math.exp(self.noise * joules), truth.seconds * math.exp(self.noise * seconds))

    def truth(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        """Cost without noise."""
        return self._total(graph, graph.widths(widths))

    def per_layer(self, graph: ChannelGraph, widths: Mapping[str, int]) -> tuple[Reading, ...]:
        """Cost of each layer without noise, in the order of `graph.layers`."""
        joules, seconds = self._layers(graph, graph.widths(widths))
        return tuple(Reading(*pair) for pair in zip(joules.tolist(), seconds.tolist(), strict=True))

    def describe(self) -> MeterInfo:
        """Provenance is `Estimated`, with the source of the constants."""
        constants, options = self.constants, []
        notes = ["computed, not measured: compare networks rather than absolute joules"]
        if self.tile > 1:
            options.append(f"tile={self.tile}")
            notes.append(f"widths are rounded up to multiples of {self.tile}")
        if self.noise:
            options.append(f"noise={self.noise:g},seed={self.seed}")
            notes.append(f"artificial noise of {self.noise:.3g}, seed {self.seed}")
        return MeterInfo(
            name="platform",
            device=constants.device,
            device_id=",".join([self.name, *options]),  # profiles with other options must not be mixed
            provenance=Estimated(constants.source),
            scope=constants.scope,
            reads="analytic model",
            notes=tuple(notes),
        )

    # --- arithmetic ----------------------------------------------------------------------------------

    def _total(self, graph: ChannelGraph, widths: Tensor) -> Reading:
        joules, seconds = self._layers(graph, widths)
        return Reading(math.fsum(joules.tolist()), math.fsum(seconds.tolist()))  # fsum does not depend on the order

    def _layers(self, graph: ChannelGraph, widths: Tensor) -> tuple[Tensor, Tensor]:
        """Joules and seconds of each layer."""
        c, costs = self.constants, graph.costs
        if self.tile > 1:
            widths = torch.ceil(widths / self.tile) * self.tile
        macs = costs.macs_per_layer(widths)
        weights, activations = costs.weight_bytes_per_layer(widths), costs.activation_bytes_per_layer(widths)
        if c.value_bytes is not None:
            scale = torch.tensor([c.value_bytes / layer.item_bytes for layer in graph.layers], dtype=torch.float64)
            weights, activations = scale * weights, scale * activations
        compute = 2 * macs / (c.peak_share * c.peak_flops)
        memory = (weights + activations) / (c.bandwidth_share * c.bandwidth)
        seconds = torch.maximum(compute, memory).clamp(min=c.launch_seconds)
        moved = c.joules_per_weight_byte * weights + c.joules_per_activation_byte * activations
        joules = c.joules_per_mac * macs + moved + c.joules_per_kernel + c.static_watts * seconds
        runs = costs.layers_on(widths)
        if c.folded:
            runs = runs * torch.tensor(
                [float(layer.kind not in c.folded) for layer in graph.layers], dtype=torch.float64
            )
        return runs * joules, runs * seconds

    def _deviations(self, widths: Tensor, repeat: int) -> tuple[float, float]:
        """Two standard normal numbers as a function of seed, widths and repeat."""
        key = f"{self.seed} {repeat} {[int(width) for width in widths.tolist()]}"
        digest = hashlib.sha256(key.encode()).digest()
        normal = statistics.NormalDist()
        shares = ((int.from_bytes(digest[k : k + 6], "big") + 0.5) / 2**48 for k in (0, 8))
        joules, seconds = (normal.inv_cdf(share) for share in shares)
        return joules, seconds


# --- command line ------------------------------------------------------------------------------------


def open_meter(argument: str) -> Platform:
    """Open `platform:NAME` or `platform:NAME,noise=0.03,seed=1,tile=8`."""
    name, *parts = [part.strip() for part in argument.split(",")]
    if not name:
        raise NoMeter(f"platform: no name given; give one of {', '.join(f'platform:{key}' for key in PLATFORMS)}.")
    options: dict[str, str] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        if option not in ("noise", "seed", "tile"):
            raise NoMeter(f"platform:{name}: option {part!r} is unknown; options are noise=0.03, seed=1 and tile=8.")
        if not equals or option in options:
            raise NoMeter(f"platform:{name}: give option {option} once, as {option}=NUMBER.")
        options[option] = value
    try:
        noise, seed, tile = float(options.get("noise", 0)), int(options.get("seed", 0)), int(options.get("tile", 1))
    except ValueError:
        raise NoMeter(
            f"platform:{name}: {','.join(parts)!r} is not valid; write, for example, noise=0.03,seed=1."
        ) from None
    return Platform(name, noise=noise, seed=seed, tile=tile)
