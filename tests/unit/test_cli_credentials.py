"""Where the API key and the join token come from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshnet.cli import credentials
from meshnet.errors import StoreError, UsageError


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHNET_STORE", str(tmp_path))
    monkeypatch.delenv("MESHNET_API_KEY", raising=False)
    monkeypatch.delenv("MESHNET_JOIN_TOKEN", raising=False)
    return tmp_path


def test_they_are_made_once_in_a_private_file(store: Path) -> None:
    key, token = credentials.api_key(create=True), credentials.join_token(create=True)
    path = store / "credentials.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in store.iterdir()] == ["credentials.json"]
    assert credentials.api_key() == key
    assert credentials.join_token() == token
    assert key.value != token.value
    assert key.origin == str(path)


def test_without_serve_there_are_none(store: Path) -> None:
    with pytest.raises(UsageError, match="no join token: pass --join-token, set MESHNET_JOIN_TOKEN, or run"):
        credentials.join_token()
    assert not list(store.iterdir())


def test_what_is_given_comes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    stored = credentials.api_key(create=True)
    monkeypatch.setenv("MESHNET_API_KEY", "from-environment")
    assert credentials.api_key().value == "from-environment"
    assert credentials.api_key("from-option").value == "from-option"
    monkeypatch.setenv("MESHNET_API_KEY", " ")
    assert credentials.api_key() == stored


def test_the_environment_needs_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_STORE", "/home/nobody/models")
    monkeypatch.setenv("MESHNET_JOIN_TOKEN", "from-environment")
    assert credentials.join_token(create=True).value == "from-environment"
    with pytest.raises(StoreError, match="under /home"):
        credentials.api_key(create=True)


@pytest.mark.parametrize("value", ["short", "with space in it", "ümlaut-ümlaut", "x" * 201, "new\nline-here"])
def test_malformed_secrets_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match="secret from --api-key must be 8 to 200 printable"):
        credentials.api_key(value)


def test_a_file_that_others_can_read_is_refused(store: Path) -> None:
    credentials.api_key(create=True)
    (store / "credentials.json").chmod(0o640)
    with pytest.raises(UsageError, match="can be read by others; run `chmod 600"):
        credentials.api_key()


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"api_key": 7}', '{"api_key": "short"}'])
def test_a_damaged_file_is_told(store: Path, content: str) -> None:
    path = store / "credentials.json"
    path.touch(0o600)
    path.write_text(content)
    with pytest.raises(UsageError, match=r"credentials\.json"):
        credentials.api_key(create=True)


def test_a_file_that_appears_meanwhile_is_kept(store: Path) -> None:
    path = store / "credentials.json"
    path.touch(0o600)
    path.write_text(json.dumps({"api_key": "key-of-another", "join_token": "token-of-another"}))
    credentials._make(path)
    assert credentials.api_key().value == "key-of-another"
