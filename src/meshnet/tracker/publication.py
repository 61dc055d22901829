"""How an artifact travels between its publisher, the tracker and nodes: manifest and torrent in one JSON object.

``{"manifest": <object, or its text>, "torrent_base64": …}``. Nothing in it is believed before `Publication.bundle`.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.library import fits
from meshnet.core import Noun
from meshnet.errors import ArtifactError, RequestError, UnknownArtifact
from meshnet.tracker.messages import PublishedArtifact, parse

#: Most bytes of one: the largest manifest and the largest torrent fit.
MAX_PUBLICATION_BYTES = 48 << 20


class PublicationBody(Noun):
    """The JSON object."""

    manifest: dict[str, Any] | str
    torrent_base64: str


@dataclass(frozen=True)
class Publication:
    """A manifest and a torrent as another party sent them."""

    manifest: bytes
    torrent: bytes

    @classmethod
    def of(cls, bundle: Bundle) -> Publication:
        return cls(bundle.manifest.to_json(), bundle.torrent)

    @classmethod
    def parse(cls, body: bytes) -> Publication:
        """Read one.

        Raises:
            RequestError: not such an object; the message names the field.
        """
        told = parse(PublicationBody, body)
        manifest = told.manifest
        if not isinstance(manifest, str):
            manifest = json.dumps(manifest, separators=(",", ":"), ensure_ascii=False)
        try:
            torrent = base64.b64decode(told.torrent_base64, validate=True)
        except (binascii.Error, ValueError) as error:
            raise RequestError(f"torrent_base64 is not Base64: {error}", param="torrent_base64") from None
        return cls(manifest.encode(), torrent)

    def to_json(self) -> bytes:
        return b'{"manifest":%b,"torrent_base64":"%b"}' % (self.manifest, base64.b64encode(self.torrent))

    def bundle(self, digest: str) -> Bundle:
        """What was sent, if it is the artifact ``digest``.

        Raises:
            ArtifactError: malformed, the torrent is not the manifest's, or it is another artifact.
        """
        bundle = Bundle.parse(self.manifest, self.torrent)
        if bundle.digest != digest:
            raise ArtifactError(f"the manifest is that of another artifact: {bundle.digest}, not {digest}")
        return bundle


def choose(wanted: str, published: Sequence[PublishedArtifact]) -> PublishedArtifact:
    """The artifact meant by a digest, its first 8 digits or more, or a name. A whole digest never means a name.

    Raises:
        UnknownArtifact: none fits.
        ArtifactError: several fit.
    """
    digest = whole_digest(wanted)
    if digest is not None:
        fitting = [artifact for artifact in published if artifact.digest == digest]
    else:
        fitting = [artifact for artifact in published if fits(wanted, artifact.digest, artifact.name)]
    if not fitting:
        names = sorted({artifact.name for artifact in published})
        told = f"published: {', '.join(names[:20])}" if names else "nothing has been published yet"
        more = f" and {len(names) - 20} more" if len(names) > 20 else ""
        raise UnknownArtifact(
            f"the tracker knows no artifact {wanted[:200]!r} ({told}{more}); "
            "publish it with `meshnet artifact publish` on a machine that has it",
            param="artifact",
        )
    if len(fitting) > 1:
        raise ArtifactError(
            f"{wanted!r} fits several artifacts: {', '.join(artifact.digest for artifact in fitting)}; "
            "name one by its digest"
        )
    return fitting[0]


def whole_digest(wanted: str) -> str | None:
    """``wanted`` as ``sha256:<hex>``, if it is a digest with all its digits."""
    match = re.fullmatch(r"(?:sha256:)?([0-9a-f]{64})", wanted)
    return f"sha256:{match[1]}" if match else None
