"""Damaged GGUF headers, manifests and torrents, fed to the code that reads them.

``python -m tests.support.artifact_fuzz KIND SEED COUNT`` does it in a process with little memory and prints what came
out as JSON. The same seed gives the same inputs. Whatever goes wrong ends it with a traceback, after the input in hex.
"""

from __future__ import annotations

import copy
import json
import random
import re
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import libtorrent

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.create import create_bundle, describe
from meshnet.artifact.manifest import Artifact, Manifest, total_bytes
from meshnet.artifact.pieces import PieceMap, share
from meshnet.artifact.splits import read_model_headers
from meshnet.artifact.torrent import read_torrent
from meshnet.errors import ArtifactError
from tests.support.small_gguf import SmallTensor, small_model
from tests.support.split_models import split_model

#: For everything that the process allocates beyond what it has when it begins.
MEMORY_BYTES = 192 << 20
LONGEST_S = 1.0

#: Reads one input.
Reader = Callable[[bytes], object]
#: Damages one input; the other one is where foreign parts come from.
Damage = Callable[[bytes, random.Random, bytes], bytes]

_NUMBERS = [0, 1, 2, 7, 31, 255, 2**15, 2**16 - 1, 2**20, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**63 - 1]
_NUMBERS += [2**63, 2**64 - 32, 2**64 - 1]
_TEXTS = [b"-1", b"1e308", b"NaN", b"-Infinity", b"1.5", b"true", b"null", b'""', b"[]", b"{}", b'"x"', b"9" * 30]
_TEXTS += [b"9" * 5000, b"[" * 300, b'{"a":' * 300, b'"\\ud800"', b'"' + b"x" * 600 + b'"', b'"\xff"', b"-0", b"[[1]]"]


_JSON_VALUES: list[Any] = [
    -1,
    1.5,
    1e308,
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "x",
    "\ud800",
    "\0",
    "..",
    "a/b",
]
_JSON_VALUES += [
    [],
    {},
    [[]],
    ["x"] * 300,
    {"a": {"b": []}},
    "9" * 5000,
    10**30,
    -(2**63),
    "http://example.org/",
    "F32",
]
_BENCODED_VALUES: list[Any] = [
    -1,
    -(2**63),
    b"",
    b"x",
    bytes(32),
    bytes(31),
    bytes(64),
    [],
    {},
    [b"x"] * 300,
    {b"a": 1},
]


def damaged(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """``data`` with one to three things wrong."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if not out:
            break
        rng.choice(_DAMAGES)(out, rng, other)
    return bytes(out)


def damaged_json(data: bytes, rng: random.Random, other: bytes) -> bytes:
    """Wrong values in a well-formed text, mostly."""
    if rng.random() < 0.3:
        return damaged(data, rng, other)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 1, 2))):
        _restructure(value, rng, [*_NUMBERS, *_JSON_VALUES])
    return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", errors="surrogatepass")


def damaged_torrent(data: bytes, rng: random.Random, other: bytes) -> bytes:
    if rng.random() < 0.5:
        return damaged(data, rng, other)
    value = libtorrent.bdecode(data)
    _restructure(value, rng, [*(number for number in _NUMBERS if number < 2**63), *_BENCODED_VALUES])
    return bytes(libtorrent.bencode(value))


def _restructure(value: Any, rng: random.Random, odd: Sequence[Any]) -> None:
    """One value somewhere in ``value`` replaced by an odd one or by one from elsewhere, removed, or doubled."""
    places = list(_places(value))
    container, key = rng.choice(places)
    there, where = rng.choice(places)
    what = rng.random()
    if what < 0.4:
        container[key] = copy.deepcopy(rng.choice(odd))
    elif what < 0.5 and isinstance(container[key], int | str | bytes):
        # Nearly right is worse than odd.
        container[key] += 1 if isinstance(container[key], int) else type(container[key])()
    elif what < 0.75:
        container[key] = copy.deepcopy(there[where])
    elif what < 0.9 or isinstance(container, dict):
        del container[key]
    else:
        container.insert(key, copy.deepcopy(container[key]))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def _flip(out: bytearray, rng: random.Random, other: bytes) -> None:
    for _ in range(rng.choice((1, 1, 2, 8))):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)


def _number(out: bytearray, rng: random.Random, other: bytes) -> None:
    """A binary number somewhere, most often where there already is a small one."""
    code = rng.choice(["<Q", "<I", "<H"])
    size = struct.calcsize(code)
    places = [at for at in range(max(1, len(out) - size)) if out[at] and not any(out[at + 1 : at + size])]
    at = rng.choice(places) if places and rng.random() < 0.8 else rng.randrange(len(out))
    value = rng.choice(_NUMBERS) if rng.random() < 0.8 else rng.getrandbits(64)
    out[at : at + size] = struct.pack(code, value % (1 << 8 * size))


def _decimal(out: bytearray, rng: random.Random, other: bytes) -> None:
    """A written number replaced by another, or by something that is none."""
    places = list(re.finditer(rb"\d+", bytes(out)))
    if places:
        found = rng.choice(places)
        new = str(rng.choice(_NUMBERS)).encode() if rng.random() < 0.6 else rng.choice(_TEXTS)
        out[found.start() : found.end()] = new


def _value(out: bytearray, rng: random.Random, other: bytes) -> None:
    """A JSON string, or a bencoded one, replaced."""
    places = list(re.finditer(rb'"[^"]*"|\d+:[a-z ]+', bytes(out)))
    if places:
        found = rng.choice(places)
        out[found.start() : found.end()] = rng.choice(_TEXTS)


def _cut(out: bytearray, rng: random.Random, other: bytes) -> None:
    del out[rng.randrange(len(out)) :]


def _remove(out: bytearray, rng: random.Random, other: bytes) -> None:
    at = rng.randrange(len(out))
    del out[at : at + rng.choice((1, 4, 8, 32, 200))]


def _splice(out: bytearray, rng: random.Random, other: bytes) -> None:
    """A part of this input or of another one, put in or put over something."""
    source = bytes(out) if rng.random() < 0.7 else other
    start = rng.randrange(len(source))
    part = source[start : start + rng.choice((1, 4, 8, 32, 200))]
    at = rng.randrange(len(out))
    out[at : at + (len(part) if rng.random() < 0.5 else 0)] = part


def _noise(out: bytearray, rng: random.Random, other: bytes) -> None:
    at = rng.randrange(len(out))
    out[at : at + rng.choice((0, 4))] = rng.randbytes(rng.choice((1, 4, 16)))


_DAMAGES = (_flip, _number, _decimal, _value, _cut, _remove, _splice, _noise)


# ------------------------------------------------------------------------------------------------------------- readers


def use(artifact: Artifact) -> None:
    """Whatever is accepted can be worked with."""
    pieces = PieceMap.of(artifact)
    assert len(pieces) <= 500_000
    assert pieces.span(len(pieces) - 1).end == artifact.files[-1].size_bytes
    for layers in artifact.divided(min(2, artifact.n_layer)):
        assert share(artifact, layers).waste >= 0
    assert total_bytes(artifact.needed(artifact.whole)) <= artifact.size_bytes
    assert re.fullmatch("sha256:[0-9a-f]{64}", artifact.digest)


def headers(directory: Path, rng: random.Random) -> tuple[list[bytes], Damage, Reader]:
    """Files: a whole model, and one of a split set. Some are made so large that every claim about sizes is true."""
    whole, part = directory / "whole.gguf", directory / "set" / "whole-00001-of-00002.gguf"
    whole.write_bytes(small_model(2).to_bytes())
    split_model(whole, directory / "set", 2)
    originals = [whole.read_bytes(), part.read_bytes()]

    def read(data: bytes) -> None:
        # The set's second file stays as it is.
        path = part if b"split.count" in data else whole
        with path.open("r+b") as file:
            file.write(data)
            file.truncate(2**40 if rng.random() < 0.2 else len(data))
        use(describe(read_model_headers(path)))

    return originals, damaged, read


def manifests(directory: Path, rng: random.Random) -> tuple[list[bytes], Damage, Reader]:
    whole = directory / "whole.gguf"
    whole.write_bytes(small_model(2).to_bytes())
    seed = ["http://example.org/a/whole-00001-of-00002.gguf"]
    bundles = [
        create_bundle(whole),
        create_bundle(split_model(whole, directory / "set", 2)[0], web_seeds=seed),
    ]

    def read(data: bytes) -> None:
        manifest = Manifest.parse(data)
        assert Manifest.parse(manifest.to_json()) == manifest
        use(manifest.artifact)
        # Somebody sends it along with a torrent.
        Bundle.parse(data, bundles[len(manifest.file_names) > 1].torrent)

    return [bundle.manifest.to_json() for bundle in bundles], damaged_json, read


def torrents(directory: Path, rng: random.Random) -> tuple[list[bytes], Damage, Reader]:
    model = small_model(2)
    model.tensors += [SmallTensor(f"blk.{layer}.large", (20_000 + layer,)) for layer in range(2)]
    whole = directory / "whole.gguf"
    whole.write_bytes(model.to_bytes())
    bundles = [create_bundle(whole), create_bundle(split_model(whole, directory / "set", 2)[0])]
    assert all(len(bundle.pieces) > 2 for bundle in bundles)

    def read(data: bytes) -> None:
        bundle = bundles[b"whole-0000" in data]
        assert b"".join(read_torrent(data, bundle.manifest)) == bundle.piece_hashes
        assert data == bundle.torrent

    return [bundle.torrent for bundle in bundles], damaged_torrent, read


KINDS = {"headers": headers, "manifests": manifests, "torrents": torrents}


def fuzz(kind: str, seed: int, count: int) -> dict[str, object]:
    """Read ``count`` damaged inputs; how many were refused, with which messages, and how long the slowest took."""
    rng = random.Random(f"{kind}-{seed}")
    messages: Counter[str] = Counter()
    accepted, slowest_s = 0, 0.0
    with tempfile.TemporaryDirectory() as name:
        originals, damage, read = KINDS[kind](Path(name), rng)
        for original in originals:
            read(original)
        for _ in range(count):
            data = damage(rng.choice(originals), rng, rng.choice(originals))
            begin = time.process_time()
            try:
                read(data)
                accepted += 1
            except ArtifactError as error:
                message = str(error)
                messages[re.sub(r"'[^']*'?|\"[^\"]*\"?|b'.*|/\S+|\d+|\[.*", "_", message)[:200]] += 1
                if len(message) > 1000:
                    raise ValueError(f"a message of {len(message)} letters: {message[:2000]}") from error
            except BaseException:
                print(f"{kind} {seed}: {data.hex()}", file=sys.stderr)
                raise
            took_s = time.process_time() - begin
            if took_s > slowest_s:
                slowest_s = took_s
            if took_s > LONGEST_S:
                print(f"{kind} {seed}: {data.hex()}", file=sys.stderr)
                raise TimeoutError(f"one input took {took_s:.2f} s")
    return {
        "accepted": accepted,
        "refused": messages.total(),
        "messages": dict(messages.most_common()),
        "slowest_s": slowest_s,
    }


def main(arguments: list[str]) -> int:
    """Fuzz as the command line says, with little memory."""
    if len(arguments) != 3 or arguments[0] not in KINDS:
        print(f"usage: python -m tests.support.artifact_fuzz {'|'.join(KINDS)} SEED COUNT", file=sys.stderr)
        return 2
    # Of what is mapped from files nothing is counted, only what is allocated.
    has_bytes = int(re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) << 10
    resource.setrlimit(resource.RLIMIT_DATA, (has_bytes + MEMORY_BYTES, resource.RLIM_INFINITY))
    print(json.dumps(fuzz(arguments[0], int(arguments[1]), int(arguments[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
