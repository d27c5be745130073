"""Read files that need much memory when they are read carelessly, in a process with little memory.

python bombs.py FOLDER     prints the answer of each loader to each bomb, as JSON
"""

from __future__ import annotations

import gzip
import json
import resource
import struct
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import fuzz

MORE_BYTES = 1536 << 20
"""Memory besides what the process uses when everything is imported."""

BOMBS: tuple[str, ...] = (
    *(*fuzz.bombs(), "gzip", "gzip of one line", "checkpoint header", "checkpoint tensor"),
    *("weights header", "weights tensor", "weights that overlap", "photo of many pixels"),
)


def _state(header: bytes, claimed: int | None = None) -> bytes:
    return (len(header) if claimed is None else claimed).to_bytes(8, "little") + header


def _png(width: int, height: int) -> bytes:
    """A picture with a header, and little else."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1 << 20)))


def contents(name: str) -> dict[str, bytes]:
    """The bomb as several kinds of files, by name."""
    if name == "gzip":
        return {"a.profile.gz": fuzz.gzip_bomb()}
    if name == "gzip of one line":
        return {"a.profile.gz": gzip.compress(b'{"header": ["' + b"x" * (200 << 20) + b'"]}\n')}
    if name == "checkpoint header":
        many = b'{"a":[' + b"[]," * 2_700_000 + b"[]]}"
        return {"a.safetensors": _state(many)}
    if name == "checkpoint tensor":
        entry = {"dtype": "F64", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 8 << 40]}
        metadata = {"format": "ecc state 2", "crc32": "00000000", "layout": '{"tensor":"a"}'}
        text = json.dumps({"__metadata__": {"ecc": json.dumps(metadata)}, "a": entry}).encode()
        return {"a.safetensors": _state(text) + bytes(64)}
    if name == "weights header":
        return {"a.weights": _state(b'{"a":[' + b"[]," * 30_000_000 + b"[]]}")}
    if name == "weights tensor":
        entry = {"dtype": "F64", "shape": [1 << 20, 1 << 20], "data_offsets": [0, 8 << 40]}
        return {"a.weights": _state(json.dumps({"a": entry}).encode()) + bytes(64)}
    if name == "weights that overlap":
        entry = {"dtype": "U8", "shape": [4 << 20], "data_offsets": [0, 4 << 20]}
        return {
            "a.weights": _state(json.dumps(dict.fromkeys(map(str, range(20_000)), entry)).encode()) + bytes(4 << 20)
        }
    if name == "photo of many pixels":
        return {"a.png": _png(60_000, 60_000)}
    data = fuzz.bombs()[name]
    names = ["a.profile", "a.json", "a.graph", "a.safetensors", "run/config.json", "run/history.jsonl"]
    names += ("a.toml", "a.weights", "page/summary.json", "page/history.jsonl", "export/summary.json")
    return {**dict.fromkeys(names, data), "a.profile.gz": gzip.compress(data)}


def _whole(read: Callable[[Path], Any]) -> Callable[[Path], Any]:
    """With the end of the last line; without it, the line would count as incomplete."""

    def way(path: Path) -> Any:
        path.write_bytes(path.read_bytes() + b"\n")
        return read(path)

    return way


def loaders() -> dict[str, Callable[[Path], Any]]:
    """Functions that read a file, by its suffix or folder."""
    from ecc.energy import EnergyModel
    from ecc.graph import ChannelGraph
    from ecc.measure import Profile
    from ecc.records import read_record
    from ecc.report.history import Follower
    from ecc.run_records import RunSummary
    from ecc.training import load_state, open_run
    from ecc.zoo.data.images import load_center_crop
    from ecc.zoo.image_task import read_weights
    from ecc.zoo.recipe import read_recipe

    def run(path: Path) -> None:
        if path.name != "config.json":
            data = path.read_bytes()
            path.unlink()
            with open_run(path.parent, {}):
                pass
            path.write_bytes(data + b"\n")
        with open_run(path.parent, {}):
            pass

    return {
        "profile": Profile.load,
        "gz": Profile.load,
        "json": EnergyModel.load,
        "graph": ChannelGraph.load,
        "safetensors": load_state,
        "run": run,
        "toml": read_recipe,
        "weights": read_weights,
        "png": lambda path: load_center_crop(path, (8, 8)),
        "page": lambda path: read_record(path, RunSummary) if path.suffix == ".json" else _whole(Follower().read)(path),
        "export": lambda path: read_record(path, RunSummary),
    }


def answers_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Answer of each loader to each bomb, and seconds."""
    ways, found = loaders(), {}
    for bomb in BOMBS:
        for number, (file, data) in enumerate(contents(bomb).items()):
            path = folder / f"{BOMBS.index(bomb)}-{number}" / file
            path.parent.mkdir(parents=True)
            path.write_bytes(data)
            del data
            way = ways[path.parent.name if path.parent.name in ways else path.suffix.removeprefix(".")]
            started = time.monotonic()
            try:
                way(path)
                said = "loaded"
            except Exception as error:  # noqa: BLE001 - the test looks at it
                said = f"{type(error).__name__}: {error}"[:200]
            found[f"{bomb}/{file}"] = {"said": said, "seconds": round(time.monotonic() - started, 3)}
            path.unlink()
    return found


def limit_memory() -> None:
    """Limit the memory to what the process uses, and `MORE_BYTES`."""
    loaders()
    lines = Path("/proc/self/status").read_text().splitlines()
    now = int(next(line for line in lines if "VmSize" in line).split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (now + MORE_BYTES, now + MORE_BYTES))


if __name__ == "__main__":
    limit_memory()
    sys.stdout.write(json.dumps(answers_of(Path(sys.argv[1]))))
