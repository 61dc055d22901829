"""URLs of web seeds as people paste them: the same in a pull as in a manifest."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet.artifact.create import create_bundle
from meshnet.cli.swarming import web_seed_base
from meshnet.errors import ArtifactError
from tests.support.swarm import write_layers


@pytest.mark.parametrize("tail", ["", "?download=true", "?a=model.gguf#b", "#model.gguf"])
def test_queries_are_left_out(tmp_path: Path, tail: str) -> None:
    model = write_layers(tmp_path / "model.gguf", n_layer=1)
    url = f"https://host.example/resolve/main/model.gguf{tail}"
    made = create_bundle(model, web_seeds=[url]).manifest
    assert web_seed_base(made, url) == made.web_seeds[0] == "https://host.example/resolve/main/"


@pytest.mark.parametrize("url", ["https://host.example/?model.gguf", "file:///srv/model.gguf", "https://h/other.gguf"])
def test_what_is_no_file_is_refused(tmp_path: Path, url: str) -> None:
    manifest = create_bundle(write_layers(tmp_path / "model.gguf", n_layer=1)).manifest
    with pytest.raises(ArtifactError, match="web seed"):
        web_seed_base(manifest, url)
