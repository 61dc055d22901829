"""What people see."""

from __future__ import annotations

import io
import logging

import pytest
from rich.console import Console

from meshnet.cli.logs import OneLine, set_up_logging
from meshnet.cli.show import printable, size, telemetry_table
from meshnet.core import FinishCause, HopTelemetry, RepairTelemetry, Telemetry
from meshnet.errors import UsageError


def hop(shard: str, layers: str) -> HopTelemetry:
    return HopTelemetry(
        shard=shard,
        layers=layers,
        queue_ms=1.25,
        compute_ms=20,
        network_ms=0.5,
        bytes_in=999,
        bytes_out=12_345,
        prefill_tokens=7,
        decode_tokens=3,
    )


def shown(telemetry: Telemetry) -> str:
    out = io.StringIO()
    Console(file=out, width=160, markup=False).print(telemetry_table(telemetry))
    return out.getvalue()


def test_telemetry_has_a_row_per_hop_also_for_lost_ones() -> None:
    text = shown(
        Telemetry(
            session="0" * 32,
            epoch=1,
            model="tiny",
            artifact="sha256:aa",
            prompt_tokens=7,
            cached_tokens=0,
            generated_tokens=4,
            ttft_ms=None,
            total_ms=100,
            prefill_tokens_per_s=None,
            decode_tokens_per_s=12.34,
            finish_cause=FinishCause.FAILED,
            hops=(hop("n1/0-4.ab", "0:4"),),
            missing_hops=("n2/4-8.cd",),
            repairs=(
                RepairTelemetry(
                    epoch=2,
                    cause="hop_lost",
                    hop="n3/4-8.ef",
                    detect_ms=12.4,
                    plan_ms=3,
                    open_ms=5,
                    refill_ms=70,
                    layer_tokens=80,
                    kept_layer_tokens=0,
                ),
            ),
        )
    )
    assert (
        "epoch 2: n3/4-8.ef (hop_lost) replaced, 12 ms to notice, 3 to plan, 5 to open, 70 to compute 80 layer-tokens "
        "again"
    ) in " ".join(text.split())
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == "7 prompt + 4 generated tokens, decode 12.3 tokens/s, end: failed"
    (row,) = [line.split() for line in lines if line.startswith("n1")]
    assert row == ["n1/0-4.ab", "0:4", "1.2", "20.0", "0.5", "0.0", "999", "B", "12.3", "kB", "7", "3"]
    (row,) = [line.split() for line in lines if line.startswith("n2")]
    assert row == ["n2/4-8.cd", "lost", *["-"] * 8]


def test_model_output_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\n\tc\x9b2J\x7f\r") == "a[31mb\n\tc2J"
    assert printable("héllo 世界 🙂") == "héllo 世界 🙂"


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (98_362_432, "98.4 MB"), (7 * 10**12, "7.0 TB")],
)
def test_sizes(n_bytes: int, text: str) -> None:
    assert size(n_bytes) == text


def test_a_log_record_is_one_line_with_its_traceback() -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "a\nb", (), (type(error), error, error.__traceback__))
    text = OneLine("%(message)s").format(record)
    assert "\n" not in text
    assert text.startswith("a\\nb")
    assert "ValueError: two\\nlines" in text


def test_an_unknown_level_is_refused() -> None:
    with pytest.raises(UsageError, match="log level 'loud' is not one of debug, info"):
        set_up_logging("loud")
