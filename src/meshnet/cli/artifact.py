"""``meshnet artifact``: model files as artifacts; here, making and inspecting their manifests."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshnet.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from meshnet.artifact.bundle import Bundle
    from meshnet.artifact.manifest import Artifact, Manifest

DEFAULT_SHARDS = (2, 3, 4)

app = typer.Typer(
    help="Make, inspect and keep artifacts: models as they are shared between machines.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
)


@app.command()
def create(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="A GGUF file, or any file of a split set.")],
    name: Annotated[str | None, typer.Option(help="What people ask for. [default: from the file's name]")] = None,
    web_seed: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="Where a web server has the (first) file. Repeatable.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="Where manifest and torrent are written.")] = Path(),
    threads: Annotated[int | None, typer.Option(min=1, max=256, help="[default: all cores]")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Tell the result as JSON.")] = False,
) -> None:
    """Hash a model and write NAME.manifest.json and NAME.torrent."""
    from meshnet.artifact.create import create_bundle
    from meshnet.artifact.splits import require_one_model
    from meshnet.cli.progress import progress_of
    from meshnet.cli.show import printable

    require_one_model(paths)
    _require_directory(output)
    with progress_of(f"hashing {printable(paths[0].name)}") as progress:
        bundle = create_bundle(paths[0], name=name, web_seeds=web_seed or (), threads=threads, progress=progress)
    # A name may have slashes in it, a file's may not.
    stem = bundle.manifest.name.replace("/", "-")
    manifest_path, torrent_path = output / f"{stem}.manifest.json", output / f"{stem}.torrent"
    _write_all({torrent_path: bundle.torrent, manifest_path: bundle.manifest.to_json()})
    told = _created(bundle) | {"manifest": str(manifest_path), "torrent": str(torrent_path)}
    if as_json:
        print(json.dumps(told, indent=1))
    else:
        _print_lines(
            ("digest", bundle.digest),
            ("name", bundle.manifest.name),
            *_file_lines(bundle.manifest.file_names, bundle.artifact),
            ("pieces", _pieces(bundle.artifact)),
            ("info hash", bundle.info_hash),
            *(("web seed", url) for url in bundle.manifest.web_seeds),
            ("written", str(manifest_path)),
            ("", str(torrent_path)),
        )


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A GGUF file, a file of a split set, or a manifest.")],
    shards: Annotated[
        list[int] | None,
        typer.Option(min=1, metavar="N", help="What each of N shards would fetch. Repeatable. [default: 2, 3 and 4]"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """Show what a model consists of, and what shards of it would fetch. Reads headers only."""
    from meshnet.artifact.create import describe
    from meshnet.artifact.splits import read_model_headers

    manifest = _read_manifest(path)
    if manifest is not None:
        artifact, file_names = manifest.artifact, manifest.file_names
    else:
        headers = read_model_headers(path)
        artifact, file_names = describe(headers), tuple(header.path.name for header in headers)
    for number in shards or ():
        if number > artifact.n_layer:
            raise UsageError(f"--shards {number} is more than the model has layers ({artifact.n_layer})")
    counts = shards or [number for number in DEFAULT_SHARDS if number <= artifact.n_layer]
    told = _inspected(artifact, manifest, file_names, counts)
    if as_json:
        print(json.dumps(told, indent=1))
    else:
        _show(told, artifact)


# ---------------------------------------------------------------------------------------------------- reading, writing


def _read_manifest(path: Path) -> Manifest | None:
    """The manifest at ``path``; None if it is something else."""
    from meshnet.artifact.manifest import MAX_MANIFEST_BYTES, Manifest

    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            if not file.read(64).lstrip().startswith(b"{"):
                return None
            file.seek(0)
            text = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return Manifest.parse(text)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from None


def _require_directory(directory: Path) -> None:
    # Before hashing, which can take minutes.
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--output {directory} cannot be created: {error.strerror}") from error
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UsageError(f"--output {directory} is not writable by this user")


def _write_all(contents: Mapping[Path, bytes]) -> None:
    """Write all files or, if one cannot be written, none."""
    written: dict[Path, str] = {}
    try:
        with _removed(written):
            for path, data in contents.items():
                handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
                written[path] = name
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.chmod(name, 0o644)
            for path, name in written.items():
                os.replace(name, path)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; nothing was") from error


@contextlib.contextmanager
def _removed(written: Mapping[Path, str]) -> Iterator[None]:
    try:
        yield
    finally:
        for name in written.values():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


# ------------------------------------------------------------------------------------------------------------ telling


def _created(bundle: Bundle) -> dict[str, Any]:
    artifact = bundle.artifact
    return {
        "digest": bundle.digest,
        "name": bundle.manifest.name,
        "info_hash": bundle.info_hash,
        "size_bytes": artifact.size_bytes,
        "piece_bytes": artifact.piece_bytes,
        "pieces": len(bundle.pieces),
        "files": [
            {"name": name, "size_bytes": record.size_bytes, "sha256": record.sha256}
            for name, record in zip(bundle.manifest.file_names, artifact.files, strict=True)
        ],
        "web_seeds": list(bundle.manifest.web_seeds),
    }


def _inspected(
    artifact: Artifact, manifest: Manifest | None, file_names: Sequence[str], shard_counts: Sequence[int]
) -> dict[str, Any]:
    from meshnet.artifact.manifest import Role
    from meshnet.artifact.pieces import PieceMap, share
    from meshnet.artifact.torrent import info_hash

    layer_bytes = artifact.layer_bytes()
    role_bytes = {role: artifact.role_bytes(role) for role in Role}
    tensor_bytes = sum(tensor.size_bytes for tensor in artifact.tensors)
    tensors_of = Counter(tensor.file for tensor in artifact.tensors)
    shards = []
    for number in shard_counts:
        for layers in artifact.divided(number):
            found = share(artifact, layers)
            shards.append(
                {
                    "of": number,
                    "layers": str(layers),
                    "needed_bytes": found.needed_bytes,
                    "fetched_bytes": found.fetched_bytes,
                    "waste": round(found.waste, 6),
                }
            )
    return {
        "digest": manifest.digest if manifest else None,
        "name": manifest.name if manifest else None,
        "info_hash": info_hash(manifest) if manifest else None,
        "architecture": artifact.architecture,
        "quantization": artifact.quantization,
        "model_name": artifact.model_name,
        "licence": artifact.licence,
        "source": artifact.source,
        "n_layer": artifact.n_layer,
        "n_ctx_train": artifact.n_ctx_train,
        "size_bytes": artifact.size_bytes,
        "files": [
            {
                "name": name,
                "size_bytes": record.size_bytes,
                "header_bytes": record.header_bytes,
                "tensors": tensors_of[number],
            }
            for number, (name, record) in enumerate(zip(file_names, artifact.files, strict=True))
        ],
        "layer_bytes": layer_bytes,
        "embedding_bytes": role_bytes[Role.EMBEDDING],
        "head_bytes": role_bytes[Role.HEAD],
        "shared_bytes": role_bytes[Role.SHARED],
        "unused_bytes": tensor_bytes - sum(layer_bytes) - sum(role_bytes.values()),
        "header_bytes": sum(record.header_bytes for record in artifact.files),
        "piece_bytes": artifact.piece_bytes,
        "pieces": len(PieceMap.of(artifact)),
        "web_seeds": list(manifest.web_seeds) if manifest else [],
        "shards": shards,
    }


def _show(told: dict[str, Any], artifact: Artifact) -> None:
    from meshnet.cli.show import console, size, table

    _print_lines(
        ("digest", told["digest"] or "of its manifest, which `meshnet artifact create` makes"),
        ("name", told["name"]),
        ("model", told["model_name"]),
        ("architecture", told["architecture"]),
        ("quantization", told["quantization"]),
        ("licence", told["licence"]),
        ("source", told["source"]),
        ("layers", told["n_layer"]),
        ("context", f"{told['n_ctx_train']} tokens" if told["n_ctx_train"] else None),
        *_file_lines([file["name"] for file in told["files"]], artifact),
        ("pieces", _pieces(artifact)),
        ("info hash", told["info_hash"]),
        *(("web seed", url) for url in told["web_seeds"]),
    )
    out = console()
    rows = [
        (layers, size(each), size(each * number) if number > 1 else "")
        for layers, each, number in _folded(told["layer_bytes"])
    ]
    for key, what in (
        ("embedding", "embedding"),
        ("head", "head"),
        ("shared", "shared by all shards"),
        ("unused", "read by no shard"),
        ("header", "metadata"),
    ):
        if told[f"{key}_bytes"]:
            rows.append((what, size(told[f"{key}_bytes"]), ""))
    out.print(table("Contents", ("layers", "bytes", "together"), rows, right=("bytes", "together")))
    out.print(
        table(
            "What shards of equally many layers fetch",
            ("shards", "layers", "needed", "fetched", "waste"),
            [
                (
                    str(shard["of"]),
                    shard["layers"],
                    size(shard["needed_bytes"]),
                    size(shard["fetched_bytes"]),
                    f"{shard['waste']:.2%}",
                )
                for shard in told["shards"]
            ],
            right=("shards", "needed", "fetched", "waste"),
        )
    )


def _folded(layer_bytes: Sequence[int]) -> Iterator[tuple[str, int, int]]:
    """Runs of layers of the same size: their range, bytes of each, and how many they are."""
    start = 0
    for end in range(1, len(layer_bytes) + 1):
        if end == len(layer_bytes) or layer_bytes[end] != layer_bytes[start]:
            yield f"{start}:{end}", layer_bytes[start], end - start
            start = end


def _file_lines(names: Sequence[str], artifact: Artifact) -> Iterator[tuple[str, str]]:
    from meshnet.cli.show import size

    if len(names) > 1:
        yield "size", f"{size(artifact.size_bytes)} in {len(names)} files"
    for number, (name, record) in enumerate(zip(names, artifact.files, strict=True)):
        yield ("file" if len(names) == 1 else "" if number else "files"), f"{name}, {size(record.size_bytes)}"


def _pieces(artifact: Artifact) -> str:
    from meshnet.artifact.pieces import PieceMap

    return f"{len(PieceMap.of(artifact))} of {artifact.piece_bytes >> 10} KiB"


def _print_lines(*lines: tuple[str, Any]) -> None:
    """Facts, one a line; those that are None are left out."""
    from meshnet.cli.show import printable

    for what, value in lines:
        if value is not None:
            print(f"{what:<13} {' '.join(printable(str(value)).split())}")
