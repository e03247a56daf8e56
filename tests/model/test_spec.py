"""RunSpec: what it accepts, what it refuses and how it says so, and that every field reaches the digest."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from model.ordered import Order
from model.spec import MAX_CONTRACTION, RunSpec
from tests.model.recipes import changed, run_section, run_spec


def leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}".lstrip("."))]
    return [(path, value)]


def test_parameter_counts_are_those_of_the_papers_model_and_of_the_demo() -> None:
    assert run_spec("open_1b").model.parameter_count() == 1_607_569_408
    assert run_spec("demo").model.parameter_count() == 3_541_248


def test_full_attention_every_fifth_layer_and_in_the_last() -> None:
    model = run_spec("open_1b").model
    assert [layer for layer in range(model.layers) if model.is_full(layer)] == [4, 9, 14, 19, 23]


def test_shapes_stand_in_name_order_and_gate_up_is_one_matrix() -> None:
    shapes = run_spec("demo").model.shapes()
    assert list(shapes) == sorted(shapes)
    assert shapes["blocks.000.gate_up"] == (1024, 192)
    assert shapes["blocks.004.k"] == (64, 192)
    assert shapes["head"] == shapes["embed"] == (4096, 192)


def test_vectors_and_the_embedding_do_not_decay() -> None:
    spec = run_spec("demo")
    kept = {name for name, shape in spec.model.shapes().items() if spec.optimizer.no_decay(name, shape)}
    assert "embed" in kept and "embed_norm" in kept and "blocks.000.mlp_norm" in kept
    assert "head" not in kept and "blocks.000.q" not in kept


def test_a_spec_survives_its_own_canonical_form() -> None:
    spec = run_spec("open_1b")
    again = RunSpec.model_validate(spec.canonical())
    assert again == spec and again.digest() == spec.digest()


OTHER = {"weight_scale": "lsq", "name": "other", "contract": "other", "vectors": "1" * 64}


def other_value(path: str, value: Any) -> Any:
    """An allowed value that differs from `value` in the smallest way."""
    field = path.split(".")[-1]
    if field in OTHER:
        return OTHER[field]
    if field == "phases":
        return [value[0], value[1] | {"windows": value[1]["windows"] + 1}]
    if field.endswith("_slices"):
        return 2
    if field in ("heads", "head_dim"):
        return value + 2
    if field == "kv_heads":
        return 3
    if field == "unit_windows":
        return None
    return value + 1 if isinstance(value, int) else f"{value}1"


@pytest.mark.parametrize("path", [path for path, _ in leaves(run_section("demo"))])
def test_every_field_reaches_the_digest(path: str) -> None:
    section = run_section("demo")
    value = other_value(path, dict(leaves(section))[path])
    if value is None:  # units of three windows need phases of three
        section = changed(section, "schedule.phases", [{"from_tokens": 0, "windows": 6}])
        value = 3
    base = RunSpec.model_validate(section).digest()
    assert RunSpec.model_validate(changed(section, path, value)).digest() != base


REFUSED = [
    ("model.head_dim", 63, "head_dim is 63; allowed: even numbers"),
    ("model.kv_heads", 2, "heads is 3; allowed: multiples of kv_heads = 2"),
    ("model.vocab", MAX_CONTRACTION + 1, "131071"),
    ("model.ffn", 65_536, r"2 \* ffn is 131072; allowed: 2 to 131,071"),
    ("model.seq_len", 32_768, "seq_len . heads / kv_heads is 98304; allowed: 1 to 66,052"),
    ("model.norm_eps", 0.00001, "should be a valid string"),
    ("model.norm_eps", "1e-5", "plain decimal"),
    ("model.norm_eps", "0.0000000000001", "leaves float32's safe range"),
    ("model.init_std", "0.0000000001", "leaves float32's safe range"),
    ("model.rope_theta", "500000", "should be a valid integer"),
    ("model.layers", True, "should be a valid integer"),
    ("model.surprise", 1, "Extra inputs are not permitted"),
    ("numerics.weight_scale", "mean", "'max' or 'lsq'"),
    ("numerics.unit_windows", 17, "less than or equal to 16"),
    ("numerics.unit_windows", 2, r"phases\[1\].windows is 3; allowed: multiples of unit_windows = 2"),
    ("optimizer.beta2", "1", r"beta2 is 1; allowed: \[0, 1\)"),
    ("optimizer.eps", "0", "eps is 0"),
    ("schedule.peak_lr", "0.0", r"peak_lr is 0.0; allowed: \(0, 1\]"),
    ("schedule.warmup_tokens", 10**9, "the run would end during the warm-up"),
    ("schedule.phases", [], "at least 1 item"),
    ("schedule.phases", [{"from_tokens": 1, "windows": 2}], r"phases\[0\].from_tokens is 1; allowed: 0"),
    ("schedule.phases", [{"from_tokens": 0, "windows": 4097}], "windows is 4097; allowed: at most 4096"),
    ("schedule.phases", [{"from_tokens": 0, "windows": 2}] * 2, "increasing numbers"),
    ("spike.norm", "16385", "norm is 16385"),
    ("spike.halt_events", 21, "halt_events is 21; allowed: 1 to 20"),
    ("seed", -1, "greater than or equal to 0"),
    ("name", "../x", "should match pattern"),
]


ORDER = {"kind": "ordered", "replicas": 2, "shards": 3, "residual": "left_fold"}
SIXES = [{"from_tokens": 0, "windows": 6}, {"from_tokens": 98304, "windows": 12}]


def test_every_part_of_an_order_reaches_the_digest() -> None:
    section = changed(run_section("demo"), "schedule.phases", SIXES)
    others = [{"replicas": 1}, {"shards": 1}, {"residual": "ascending_level"}]
    orders = [ORDER, *(ORDER | other for other in others), {"kind": "exact"}]
    specs = [RunSpec.model_validate(changed(section, "numerics", {"reduction": order})) for order in orders]
    assert len({spec.digest() for spec in specs}) == len(orders)
    assert specs[0].canonical()["numerics"]["reduction"] == ORDER  # type: ignore[index]
    assert RunSpec.model_validate(changed(section, "numerics", {})).digest() == specs[-1].digest()
    assert all(RunSpec.model_validate(spec.canonical()) == spec for spec in specs)
    assert specs[0].numerics.reduction.order(12) == Order(2, 3, 2, "left_fold")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("reduction", "message"),
    [
        (ORDER | {"shards": 4}, "units of a step is 6; allowed: multiples of 8 .*2 replicas × 4 shards"),
        (ORDER | {"residual": "right"}, "'ascending_level' or 'left_fold'"),
        (ORDER | {"replicas": 0}, "greater than or equal to 1"),
        ({"kind": "ordered", "replicas": 2, "shards": 3}, "residual\n.*Field required"),
        ({"kind": "float"}, "'exact', 'ordered'"),
        ({"kind": "exact", "replicas": 2}, "Extra inputs are not permitted"),
    ],
)
def test_an_order_that_cannot_be_is_refused(reduction: dict[str, object], message: str) -> None:
    section = changed(run_section("demo"), "schedule.phases", SIXES)
    with pytest.raises(ValidationError, match=message):
        RunSpec.model_validate(changed(section, "numerics", {"reduction": reduction}))


@pytest.mark.parametrize(("path", "value", "message"), REFUSED)
def test_what_cannot_run_is_refused_with_its_cause(path: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        RunSpec.model_validate(changed(run_section("demo"), path, value))


def test_a_row_of_more_keys_than_int32_counts_is_refused() -> None:
    section = changed(run_section("demo"), "model.seq_len", 8_192)
    with pytest.raises(ValidationError, match="seq_len is 8192; allowed: 1 to 8,191"):
        RunSpec.model_validate(section)


def test_a_spec_cannot_be_changed() -> None:
    spec = run_spec("demo")
    with pytest.raises(ValidationError, match="frozen"):
        spec.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("field", ["contract", "vectors"])
@pytest.mark.parametrize("value", ["", "\x1b[31m", "\ud800", "a\n  next: b", "a" * 100_000])
def test_names_of_the_arithmetic_are_plain(field: str, value: str) -> None:
    with pytest.raises(ValidationError, match=field):
        RunSpec.model_validate(run_spec("demo").canonical() | {field: value})
