"""Bearer tokens and announce keys, compared in constant time."""

from __future__ import annotations

import hashlib
import hmac


def bearer_is(authorization: str | None, token: str) -> bool:
    """True if the ``Authorization`` header's value carries exactly ``token``. An empty token never matches."""
    scheme, _, given = (authorization or "").partition(" ")
    # Digests are of one length, so that comparing them takes the same time whatever is wrong.
    same = hmac.compare_digest(_digest(given.strip()), _digest(token))
    return same and scheme.lower() == "bearer" and bool(token)


def announce_key(join_token: str) -> str:
    """What BitTorrent announces carry in their URL instead of the join token, which does not follow from it."""
    return hmac.new(join_token.encode(), b"meshnet-announce-v1", hashlib.sha256).hexdigest()[:32]


def announce_key_is(given: str, join_token: str) -> bool:
    """True if ``given`` is the key of this token. That of an empty token never matches."""
    return hmac.compare_digest(_digest(given), _digest(announce_key(join_token))) and bool(join_token)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
