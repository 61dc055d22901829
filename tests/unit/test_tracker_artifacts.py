"""Publications in a real SQLite file, and how they are asked for."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import update

from meshnet.artifact.bundle import Bundle
from meshnet.artifact.manifest import MAX_MANIFEST_BYTES
from meshnet.artifact.torrent import MAX_TORRENT_BYTES
from meshnet.errors import ArtifactError, RequestError, TrackerUnavailable, UnknownArtifact
from meshnet.tracker.artifacts import Artifacts
from meshnet.tracker.database import ArtifactRow, Database, sqlite_url
from meshnet.tracker.messages import MAX_EARLIER_SWARMS, PublishedArtifact
from meshnet.tracker.publication import MAX_PUBLICATION_BYTES, Publication, choose
from tests.support.published import small_bundle


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    opened = await Database.open(sqlite_url(tmp_path / "tracker.sqlite3"))
    yield opened
    await opened.close()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def bundle(directory: Path) -> Bundle:
    return small_bundle(directory)


def renamed(bundle: Bundle, file_name: str, **changes: Any) -> Bundle:
    layer = bundle.piece_hashes
    return Bundle.of(bundle.manifest.model_copy(update={"file_names": (file_name,), **changes}), [layer])


def short(bundle: Bundle) -> bytes:
    return bytes.fromhex(bundle.info_hash)[:20]


async def test_what_is_published_can_be_had_again(database: Database, bundle: Bundle, directory: Path) -> None:
    artifacts = Artifacts(database, clock=lambda: 1234.5)
    assert not artifacts.has_swarm(short(bundle))
    told = await artifacts.publish(bundle)
    assert told == PublishedArtifact(
        digest=bundle.digest,
        name="small",
        architecture="llama",
        n_layer=2,
        size_bytes=(directory / "small.gguf").stat().st_size,
        n_files=1,
        info_hash=bundle.info_hash,
        published_unix_s=1234,
    )
    assert artifacts.all() == (told,)
    assert artifacts.has_swarm(short(bundle))
    for wanted in ("small", bundle.digest, bundle.digest.removeprefix("sha256:"), bundle.digest[:15]):
        publication = await artifacts.get(wanted)
        assert publication == Publication(bundle.manifest.to_json(), bundle.torrent)
        assert publication.bundle(bundle.digest) == bundle


async def test_publications_outlive_the_process(database: Database, bundle: Bundle) -> None:
    await Artifacts(database).publish(bundle)
    again = Artifacts(database)
    await again.restore()
    assert [published.digest for published in again.all()] == [bundle.digest]
    assert again.has_swarm(short(bundle))
    assert (await again.get("small")).torrent == bundle.torrent


async def test_the_last_publication_wins_and_earlier_swarms_stay_open(database: Database, bundle: Bundle) -> None:
    artifacts = Artifacts(database)
    await artifacts.publish(bundle)
    seeded = renamed(bundle, "small.gguf", name="called-otherwise", web_seeds=("http://192.0.2.1/models/",))
    told = await artifacts.publish(seeded)
    assert (told.name, told.info_hash, told.earlier_info_hashes) == ("called-otherwise", bundle.info_hash, ())
    assert (await artifacts.get(bundle.digest)).bundle(bundle.digest).manifest.web_seeds == seeded.manifest.web_seeds
    with pytest.raises(UnknownArtifact):
        await artifacts.get("small")

    elsewhere = renamed(bundle, "other.gguf")
    assert elsewhere.info_hash != bundle.info_hash
    told = await artifacts.publish(elsewhere)
    assert (told.info_hash, told.earlier_info_hashes) == (elsewhere.info_hash, (bundle.info_hash,))
    restored = Artifacts(database)
    await restored.restore()
    assert restored.all() == artifacts.all() == (told,)
    for known in (artifacts, restored):
        assert known.has_swarm(short(bundle))
        assert known.has_swarm(short(elsewhere))

    told = await artifacts.publish(bundle)
    assert (told.info_hash, told.earlier_info_hashes) == (bundle.info_hash, (elsewhere.info_hash,))
    for number in range(MAX_EARLIER_SWARMS):
        told = await artifacts.publish(renamed(bundle, f"{number}.gguf"))
    assert len(told.earlier_info_hashes) == MAX_EARLIER_SWARMS
    assert told.earlier_info_hashes[-1] == bundle.info_hash
    assert not artifacts.has_swarm(short(elsewhere))


async def test_a_row_of_another_version_is_left_out(database: Database, bundle: Bundle) -> None:
    await Artifacts(database).publish(bundle)
    async with database.writing() as session:
        await session.execute(update(ArtifactRow).values(info_hash="of another kind"))
    again = Artifacts(database)
    await again.restore()
    assert again.all() == ()
    assert (await again.publish(bundle)).info_hash == bundle.info_hash


async def test_a_database_that_fails_changes_nothing(tmp_path: Path, bundle: Bundle) -> None:
    opened = await Database.open(sqlite_url(tmp_path / "t.sqlite3"))
    artifacts = Artifacts(opened)
    async with opened.writing() as session:
        await (await session.connection()).exec_driver_sql("DROP TABLE artifacts")
    with pytest.raises(TrackerUnavailable, match="no such table"):
        await artifacts.publish(bundle)
    assert artifacts.all() == ()
    assert not artifacts.has_swarm(short(bundle))
    await opened.close()


def listed(name: str, digits: str) -> PublishedArtifact:
    return PublishedArtifact(
        digest=f"sha256:{digits:0<64}",
        name=name,
        architecture="llama",
        n_layer=2,
        size_bytes=1,
        n_files=1,
        info_hash="0" * 64,
        published_unix_s=1,
    )


def test_how_artifacts_are_asked_for() -> None:
    one, two, three = listed("one", "aaaaaaaa1"), listed("two", "aaaaaaaa2"), listed("two", "b")
    liar = listed(one.digest, "c")
    published = [one, two, three, liar]
    for wanted in ("one", "aaaaaaaa1", "sha256:aaaaaaaa1", one.digest, one.digest.removeprefix("sha256:")):
        assert choose(wanted, published) is one
    assert choose("b0000000", published) is three
    for wanted in ("two", "aaaaaaaa"):
        with pytest.raises(ArtifactError, match=r"fits several artifacts: sha256:.*, sha256:.*; name one"):
            choose(wanted, published)
    for wanted in ("three", "aaaaaaa", "", "sha256:", f"sha256:{'d' * 64}", one.digest.upper()):
        with pytest.raises(UnknownArtifact, match="publish it with `meshnet artifact publish`"):
            choose(wanted, published)
    # A name that is another artifact's digest never stands for it.
    with pytest.raises(UnknownArtifact):
        choose(one.digest, [liar])
    with pytest.raises(UnknownArtifact, match="nothing has been published yet"):
        choose("one", [])


def test_a_publication_travels_as_json(bundle: Bundle) -> None:
    sent = Publication.of(bundle).to_json()
    assert json.loads(sent)["manifest"]["name"] == "small"
    as_text = {"manifest": bundle.manifest.to_json().decode(), "torrent_base64": json.loads(sent)["torrent_base64"]}
    for body in (sent, json.dumps(as_text).encode(), json.dumps({**as_text, "later": [1]}).encode()):
        assert Publication.parse(body).bundle(bundle.digest) == bundle


def test_the_largest_bundle_fits() -> None:
    assert len(Publication(b"x" * MAX_MANIFEST_BYTES, b"y" * MAX_TORRENT_BYTES).to_json()) < MAX_PUBLICATION_BYTES


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "PublicationBody is not valid"),
        (b"{}", "manifest: Field required; torrent_base64: Field required"),
        (b'{"manifest": 7, "torrent_base64": ""}', "manifest"),
        (b'{"manifest": {}, "torrent_base64": 7}', "torrent_base64"),
        (b'{"manifest": {}, "torrent_base64": "a"}', "torrent_base64 is not Base64"),
        (b'{"manifest": {}, "torrent_base64": "a b="}', "torrent_base64 is not Base64"),
        ('{"manifest": {}, "torrent_base64": "ü"}'.encode(), "torrent_base64 is not Base64"),
        (b'{"manifest": ' + b"[" * 100_000, "JSON"),
    ],
)
def test_what_is_no_publication_is_named(body: bytes, told: str) -> None:
    with pytest.raises(RequestError, match=told):
        Publication.parse(body)


async def test_what_does_not_fit_together_is_named(bundle: Bundle, directory: Path) -> None:
    (directory / "other").mkdir()
    other = small_bundle(directory / "other", seed=1)
    with pytest.raises(ArtifactError, match=f"of another artifact: {bundle.digest}, not {other.digest}"):
        Publication.of(bundle).bundle(other.digest)
    with pytest.raises(ArtifactError, match="torrent"):
        Publication(bundle.manifest.to_json(), other.torrent).bundle(bundle.digest)
    with pytest.raises(ArtifactError, match="torrent"):
        Publication(bundle.manifest.to_json(), b"").bundle(bundle.digest)
    with pytest.raises(ArtifactError, match="manifest"):
        Publication(b"{}", bundle.torrent).bundle(bundle.digest)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=20,
)


@given(
    st.one_of(
        st.binary(max_size=100),
        st.fixed_dictionaries(
            {
                "manifest": JSON,
                "torrent_base64": JSON | st.binary(max_size=40).map(lambda data: base64.b64encode(data).decode()),
            }
        ).map(lambda value: json.dumps(value).encode()),
    )
)
def test_any_body_is_refused_by_name(body: bytes) -> None:
    with pytest.raises((RequestError, ArtifactError)):
        Publication.parse(body).bundle(f"sha256:{'0' * 64}")
