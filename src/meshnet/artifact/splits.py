"""Split sets: a model in several GGUF files, ``NAME-00001-of-00003.gguf`` and so on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from meshnet.artifact.gguf_header import GgufHeader, read_header
from meshnet.errors import ArtifactError

_NAME = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf$")
MAX_FILES = 10_000


def read_model_headers(path: Path) -> list[GgufHeader]:
    """The headers of all files of the model that ``path`` is (a part of), in order.

    Raises:
        ArtifactError: a file is missing, malformed, or not a part of the same set.
    """
    header = read_header(path)
    n_files = header.count("split.count") or 1
    if n_files == 1:
        return [header]
    if n_files > MAX_FILES:
        raise ArtifactError(f"{path} is malformed: it claims to be one of {n_files} files; fetch it again")
    name = _NAME.match(path.name)
    number = header.count("split.no") or 0
    if number >= n_files:
        raise ArtifactError(f"{path} is malformed: it claims to be part {number + 1} of {n_files}; fetch it again")
    if name is None or int(name["count"]) != n_files or int(name["number"]) != number + 1:
        raise ArtifactError(
            f"{path} is part {number + 1} of {n_files} of a split model, but not named so; "
            f"call it NAME-{number + 1:05}-of-{n_files:05}.gguf"
        )
    paths = [path.with_name(f"{name['stem']}-{part:05}-of-{n_files:05}.gguf") for part in range(1, n_files + 1)]
    missing = [part.name for part in paths if not part.exists()]
    if missing:
        raise ArtifactError(
            f"{len(missing)} of the {n_files} files of {name['stem']} are missing from {path.parent}: {missing[0]}"
            + (" and others" if len(missing) > 1 else "")
        )
    headers = [read_header(part) for part in paths]
    _check_set(headers)
    return headers


def require_one_model(paths: Sequence[Path]) -> None:
    """Check that all ``paths`` are of one model: files of the same split set.

    Raises:
        ArtifactError: one is not, or as `read_model_headers`.
    """
    parts = {os.path.realpath(header.path) for header in read_model_headers(paths[0])}
    for path in paths[1:]:
        if os.path.realpath(path) not in parts:
            raise ArtifactError(
                f"{path} is not of the same model as {paths[0]}; give the files of one split set, "
                "or make one manifest after the other"
            )


def _check_set(headers: list[GgufHeader]) -> None:
    n_tensors = headers[0].count("split.tensors.count")
    names: dict[str, Path] = {}
    for number, header in enumerate(headers):
        if header.count("split.count") != len(headers) or (header.count("split.no") or 0) != number:
            raise ArtifactError(
                f"{header.path} is not part {number + 1} of {len(headers)} by its own account; fetch the set again"
            )
        if header.count("split.tensors.count") != n_tensors:
            raise ArtifactError(f"{header.path} belongs to another split set than {headers[0].path}")
        for tensor in header.tensors:
            if tensor.name in names:
                raise ArtifactError(f"{names[tensor.name]} and {header.path} both hold tensor {tensor.name!r}")
            names[tensor.name] = header.path
    if n_tensors is not None and n_tensors != len(names):
        raise ArtifactError(
            f"the {len(headers)} files of {headers[0].path} hold {len(names)} tensors, not {n_tensors}; "
            "a part is foreign or incomplete"
        )
