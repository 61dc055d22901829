"""The documentation names every field, metric, parameter and error that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from meshnet.core import FinishCause, HopTelemetry, Telemetry
from meshnet.gateway import failures, schemas
from meshnet.gateway.metrics import GatewayMetrics
from meshnet.gateway.schemas import ChatRequest, CompletionRequest

DOCS = Path(__file__).resolve().parents[2] / "docs"


def first_cells(page: str, heading: str) -> set[str]:
    """Code names in the first cells of the table rows under ``heading``, up to the next heading."""
    text = (DOCS / page).read_text()
    section = re.split(r"^#+ ", text.split(f"# {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return set(re.findall(r"^\| `([^`]+)`", section, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "names"),
    [
        ("Generation Telemetry", set(Telemetry.model_fields)),
        ("One hop", set(HopTelemetry.model_fields)),
        ("Finish causes", {cause.value for cause in FinishCause}),
    ],
)
def test_telemetry_is_documented(heading: str, names: set[str]) -> None:
    assert first_cells("telemetry.md", heading) == names


def test_metrics_are_documented() -> None:
    exposed = set()
    for family in GatewayMetrics().registry.collect():
        exposed.add(f"{family.name}_total" if family.type == "counter" else family.name)
    assert first_cells("telemetry.md", "Metrics") == exposed


def test_parameters_are_documented() -> None:
    both = first_cells("api.md", "Both routes")
    assert both | first_cells("api.md", "Chat") == set(ChatRequest.model_fields)
    assert both | first_cells("api.md", "Completions") == set(CompletionRequest.model_fields)
    text = (DOCS / "api.md").read_text()
    for name in [*schemas.IGNORED, *schemas.UNSUPPORTED]:
        assert f"`{name}`" in text, name


def test_error_codes_are_documented() -> None:
    rows = re.findall(r"^\| (\d{3}) \| `([a-z_]+)`", (DOCS / "api.md").read_text(), re.MULTILINE)
    documented = {code: int(status) for status, code in rows}
    raised = {code: status for _, status, _, code in failures.KINDS}
    assert documented == {
        **raised,
        "internal_error": 500,
        "not_found": 404,
        "method_not_allowed": 405,
    }
