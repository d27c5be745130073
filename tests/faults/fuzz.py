"""Ways to damage a file: functions of its bytes or its JSON, and a random generator."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Mutator = Callable[[bytes, random.Random], bytes]

# ---------------------------------------------------------------- bytes


def truncate(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flip_bits(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def overwrite(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data)), rng.choice((1, 4, 64))
    return data[:start] + rng.randbytes(length) + data[start + length :]


def zero_rest(data: bytes, rng: random.Random) -> bytes:
    """As some file systems leave a file after a power cut."""
    start = rng.randrange(len(data))
    return data[:start] + b"\0" * (len(data) - start)


def remove_part(data: bytes, rng: random.Random) -> bytes:
    start = rng.randrange(len(data))
    return data[:start] + data[start + rng.choice((1, 10, 100)) :]


def repeat_part(data: bytes, rng: random.Random) -> bytes:
    start, length = rng.randrange(len(data)), rng.choice((1, 10, 100, 1000))
    return data[: start + length] + data[start:]


def shuffle_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.splitlines(keepends=True)
    rng.shuffle(lines)
    return b"".join(lines)


def append_junk(data: bytes, rng: random.Random) -> bytes:
    return data + rng.choice((b"\n", b"{}", b"\0\0", b"]", b"nan\n", rng.randbytes(40)))


def replace_all(data: bytes, rng: random.Random) -> bytes:
    """Something else; the pickle would leave a file behind if it were loaded."""
    del data
    return rng.choice((b"", b"\n", b"\0" * 64, b"null", b"[]", b"{}", b"7", b"\xff\xfe{\0}\0", b"PK\x03\x04", PICKLE))


PICKLE = b"cos\nsystem\n(S'touch EXECUTED'\ntR."
"""Protocol 0: `os.system("touch EXECUTED")`."""

BYTES: tuple[Mutator, ...] = (
    *(truncate, flip_bits, overwrite, zero_rest, remove_part, repeat_part, shuffle_lines, append_junk, replace_all),
)

# ---------------------------------------------------------------- JSON


class Raw(str):
    """JSON text that no Python value is written as."""

    __slots__ = ()


VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 3, 1.5, -1e300, 1e-320, 2**31, 2**63, 10**30),
    *(Raw("1e400"), Raw("-1e400"), Raw("NaN"), Raw("Infinity"), Raw("9" * 5000)),
    Raw("[" * 100_000 + "]" * 100_000),
    Raw('{"a":' * 50_000 + "1" + "}" * 50_000),
    *("", "text", "\0", "\ud800", "\x1b[2J\x1b]0;owned\x07", "../../../../etc/passwd", "/etc/passwd", "__class__"),
    *("$(touch EXECUTED)", "x" * 100_000, [], {}, [[]], [None] * 5, [0] * 10_000, {"kind": "text"}, {"tensor": "a"}),
)


def paths(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every node."""
    yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield from paths(value, (*path, key))


def changed_tree(tree: Any, rng: random.Random) -> Any:
    """A copy with one node replaced, removed, doubled, renamed or scaled."""
    tree = json.loads(json.dumps(tree))
    choices = [path for path in paths(tree) if path]
    if not choices:
        return rng.choice(VALUES)
    # Long lists hold most nodes; a short path is as likely as a long one.
    length = rng.choice(sorted({len(path) for path in choices}))
    path = rng.choice([path for path in choices if len(path) == length])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    last, way = path[-1], rng.randrange(8)
    if way == 0:
        del parent[last]
    elif way == 1 and isinstance(parent, list):
        parent.insert(last, parent[last])
    elif way == 1:
        parent[f"{last}x"] = parent.pop(last)
    elif way == 2 and isinstance(parent[last], int | float) and not isinstance(parent[last], bool):
        parent[last] *= rng.choice((-1, 0, 0.5, 1000, 10**12))
    elif way == 3 and isinstance(parent[last], list | dict):
        parent[last] = [parent[last]] * rng.choice((1, 3))
    else:
        parent[last] = rng.choice(VALUES)
    return tree


def as_json(tree: Any) -> bytes:
    """As `json.dumps`, with `Raw` values."""
    raws: list[str] = []

    def marked(node: Any) -> Any:
        if isinstance(node, Raw):
            raws.append(str(node))
            return f"@raw {len(raws) - 1}@"
        if isinstance(node, dict):
            return {key: marked(value) for key, value in node.items()}
        return [marked(value) for value in node] if isinstance(node, list) else node

    text = json.dumps(marked(tree))
    for number, raw in enumerate(raws):
        text = text.replace(f'"@raw {number}@"', raw)
    return text.encode("ascii")


def change_json(data: bytes, rng: random.Random) -> bytes:
    """Change the JSON value of one line, or of the whole file."""
    try:
        lines = [json.dumps(json.loads(data)).encode("ascii")]
    except ValueError:
        lines = data.splitlines()
    number = rng.randrange(len(lines)) if rng.random() < 0.5 else 0
    tree = changed_tree(json.loads(lines[number]), rng)
    lines[number] = as_json(tree)
    return b"\n".join(lines) + b"\n"


# ---------------------------------------------------------------- both


def mutations(
    data: bytes, count: int, *, change_content: Mutator | None = change_json, seed: int = 0
) -> Iterator[tuple[str, bytes]]:
    """Damaged forms of a file, the same in every run; two thirds of them by `change_content`, if given."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        mutator = change_content if change_content is not None and number % 3 else BYTES[number // 3 % len(BYTES)]
        yield f"{mutator.__name__} {number}", mutator(data, rng)


def bombs() -> dict[str, bytes]:
    """Small files that need much memory when they are read carelessly."""
    return {
        "long number": b"1" * 5_000_000,
        "deep lists": b"[" * 5_000_000,
        "deep dicts": b'{"a":' * 1_000_000,
        "one long string": b'"' + b"x" * 20_000_000,
        "many empty lists": b"[" + b"[]," * 2_700_000 + b"[]]",
        "a whole disk": b"\0" * (80 << 20),
    }


def gzip_bomb(first: bytes = b"", gigabytes: int = 8) -> bytes:
    """Some gigabytes of spaces in some megabytes."""
    member = gzip.compress(b" " * (64 << 20), 9)
    return gzip.compress(first) + member * (16 * gigabytes)
