"""Facts of models: read from a small GGUF, from its manifest alone, and from a facts file."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshnet.core import LayerRange
from meshnet.errors import UsageError
from meshnet.planner.model_facts import KvPart, LayerFacts, ModelFacts
from tests.support.facts import make_facts

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"


def layers(text: str) -> LayerRange:
    return LayerRange.parse(text)


def test_head_and_tail_bytes_belong_to_the_ends() -> None:
    facts = make_facts([10, 20, 30], head_bytes=5, tail_bytes=7)
    assert facts.weight_bytes(layers("0:1")) == 15
    assert facts.weight_bytes(layers("1:2")) == 20
    assert facts.weight_bytes(layers("2:3")) == 37
    assert facts.weight_bytes(facts.whole) == 72
    # Of a tied embedding a shard that is both holds one.
    tied = facts.model_copy(update={"tied_bytes": 5})
    assert tied.weight_bytes(tied.whole) == 67


def test_a_window_holds_a_step_beside_itself() -> None:
    layer = LayerFacts(
        weight_bytes=1,
        active_bytes=1,
        active_weights=1,
        kv=(KvPart(bytes_per_token=10, window_tokens=200), KvPart(bytes_per_token=0.5, tokens_per_row=4)),
        state_bytes=7,
    )
    # In multiples of 256 rows: a row of the second cache is four tokens.
    assert layer.kv_bytes(256, step_tokens=20) == 7 + 2560 + 512
    assert layer.kv_bytes(4000, step_tokens=56) == 7 + 2560 + 2048
    assert layer.kv_bytes(4000, step_tokens=57) == 7 + 5120 + 2048


def test_sessions_multiply_the_cache() -> None:
    facts = make_facts([1, 1], kv_bytes_per_token=2.5)
    assert facts.kv_bytes(facts.whole, 512, 3) == 3 * 2 * 1280


def test_legal_cuts_decide_what_a_shard_may_be() -> None:
    facts = make_facts([1] * 6, cuts=[2, 4])
    assert facts.ends == (0, 2, 4, 6)
    assert facts.is_legal(layers("2:6"))
    assert not facts.is_legal(layers("1:6"))


def test_deepseek_v4_flash() -> None:
    facts = ModelFacts.from_toml(EXAMPLES / "deepseek-v4-flash.toml")
    assert facts.n_layer == 43
    assert facts.legal_cuts == tuple(range(1, 43))
    assert 155e9 < facts.weight_bytes(facts.whole) < 165e9
    # 6,880 bytes per token, and windows of 128 tokens and a step on all layers beside the state.
    grown = facts.kv_bytes(facts.whole, 131_072, 1) - facts.kv_bytes(facts.whole, 65_536, 1)
    assert grown == 65_536 * 6880
    fixed = facts.kv_bytes(facts.whole, 131_072, 1) - 131_072 * 6880
    assert fixed == 43 * 768 * 1024 + 21 * 81_920 + 20 * 524_288  # the window and a step, in whole blocks of rows


GOOD = """
name = "m"
architecture = "a"
n_layer = 2
n_embd = 1
n_vocab = 1
n_wide = 1
head_bytes = 1
tail_bytes = 1
boundary_bytes = 4
legal_cuts = "all"
[[layers]]
start = 0
end = 2
weight_bytes = 1
active_bytes = 1
active_weights = 1
"""


def test_a_facts_file(tmp_path: Path) -> None:
    path = tmp_path / "facts.toml"
    path.write_text(GOOD)
    facts = ModelFacts.from_toml(path)
    assert (facts.n_layer, facts.legal_cuts, facts.fingerprint) == (2, (1,), "a:2:4")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("n_layer = 2", "", "n_layer is missing"),
        ("n_layer = 2", "n_layer = 3", "nothing is told of layer 2"),
        ("end = 2", "end = 3", "layers.0: layer 2 is told twice or not of the model"),
        ("head_bytes = 1", "head_bytes = -1", "head_bytes: Input should be greater than or equal to 0"),
        ("n_embd = 1", "", "n_embd: Field required"),
        ('legal_cuts = "all"', "legal_cuts = [2]", "a cut lies outside"),
        ("name", "name name", "is not TOML"),
    ],
)
def test_a_wrong_facts_file_is_told_where(tmp_path: Path, old: str, new: str, told: str) -> None:
    path = tmp_path / "facts.toml"
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UsageError, match=told):
        ModelFacts.from_toml(path)
