"""RunSpec: everything that can change a bit of a run, and nothing else.

Its digest stands in the ledger's header. Decimals are strings ("0.0003" is exactly 3/10,000); integers are integers;
there is no float. Bounds come from the arithmetic contract: an int32 product must never wrap or saturate.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

import kernels
from kernels import canonical
from kernels.digest import digest
from model.host import exact
from model.ordered import Order, Residual

MAX_CONTRACTION = 131_071  # |hi| <= 127 or lo = -128 against 127: K terms stay within int32
MAX_SHARED_CONTRACTION = 66_052  # hi*lo and lo*hi of two sliced sides share one int32
# A softmax row sums its keys' counts of up to 2^18 in int32; 16 such windows stay below MAX_CONTRACTION.
MAX_KEYS = 8_191
MAX_UNITS = 4_096  # int64 gradient sums: 2^12 units of less than 2^51 steps each


def _plain_decimal(text: str) -> str:
    exact(text)
    return text


Decimal = Annotated[str, AfterValidator(_plain_decimal)]


def _require(ok: bool, field: str, value: object, allowed: str, cause: str) -> None:
    if not ok:
        raise ValueError(f"{field} is {value}; allowed: {allowed} ({cause})")


def _require_decimal(field: str, text: str, span: str) -> None:
    """span: an interval such as "(0, 1]", a round bracket leaving its end out."""
    value = exact(text)
    low, high = (exact(end) for end in span[1:-1].split(", "))
    ok = (value > low if span[0] == "(" else value >= low) and (value < high if span[-1] == ")" else value <= high)
    _require(ok, field, text, span, "outside it the update has no meaning or leaves float32's safe range")


class Spec(BaseModel):
    """Frozen, no unknown fields, no silent conversion of a YAML number into a string."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class ModelSpec(Spec):
    """Shape of the transformer. Lengths are in tokens; norm_eps and init_std are decimals."""

    vocab: int = Field(ge=2, le=MAX_CONTRACTION)
    d_model: int = Field(ge=1, le=MAX_CONTRACTION)
    layers: int = Field(ge=1, le=1_000)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    ffn: int = Field(ge=1)
    seq_len: int = Field(default=4096, ge=1)
    window: int = Field(default=512, ge=1)
    full_every: int = Field(default=5, ge=1)
    rope_theta: int = Field(default=500_000, ge=2)
    norm_eps: Decimal = "0.00001"
    init_std: Decimal = "0.02"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _require(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even numbers", "RoPE turns pairs of channels")
        _require(
            self.heads % self.kv_heads == 0,
            "heads",
            self.heads,
            f"multiples of kv_heads = {self.kv_heads}",
            "each KV head serves the same number of query heads",
        )
        cause = "a longer int8 contraction could leave int32"
        width, two = self.heads * self.head_dim, 2 * self.ffn
        _require(width <= MAX_CONTRACTION, "heads * head_dim", width, f"1 to {MAX_CONTRACTION:,}", cause)
        _require(two <= MAX_CONTRACTION, "2 * ffn", two, f"2 to {MAX_CONTRACTION:,}", cause)
        queries = self.seq_len * (self.heads // self.kv_heads)
        _require(
            queries <= MAX_SHARED_CONTRACTION,
            "seq_len * heads / kv_heads",
            queries,
            f"1 to {MAX_SHARED_CONTRACTION:,}",
            "attention's dV sums two cross terms over them in one int32",
        )
        cause = "a softmax row sums its keys' counts of 2^-18 in one int32"
        _require(self.seq_len <= MAX_KEYS, "seq_len", self.seq_len, f"1 to {MAX_KEYS:,}", cause)
        # Below these, an inverse root mean square could raise a subnormal over a floor, or a weight could be one.
        _require_decimal("norm_eps", self.norm_eps, "[0.000000000001, 1]")
        _require_decimal("init_std", self.init_std, "[0.000000001, 1]")
        return self

    def is_full(self, layer: int) -> bool:
        """Whether this layer attends to every earlier token: the last of each full_every, and the last layer."""
        return layer % self.full_every == self.full_every - 1 or layer == self.layers - 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name → shape, in sorted-name order. gate_up holds the gate's rows first."""
        d, queries, keys = self.d_model, self.heads * self.head_dim, self.kv_heads * self.head_dim
        block: dict[str, tuple[int, ...]] = {
            "attn_norm": (d,),
            "q": (queries, d),
            "k": (keys, d),
            "v": (keys, d),
            "o": (d, queries),
            "mlp_norm": (d,),
            "gate_up": (2 * self.ffn, d),
            "down": (d, self.ffn),
        }
        named: dict[str, tuple[int, ...]] = {
            "embed": (self.vocab, d),
            "embed_norm": (d,),
            "final_norm": (d,),
            "head": (self.vocab, d),
        }
        for layer in range(self.layers):
            named |= {f"blocks.{layer:03d}.{name}": shape for name, shape in block.items()}
        return dict(sorted(named.items()))

    def parameter_count(self) -> int:
        """Number of trained values."""
        total = 0
        for shape in self.shapes().values():
            total += shape[0] if len(shape) == 1 else shape[0] * shape[1]
        return total


class Exact(Spec):
    """Units' gradients are summed as integers: no number of ranks, and no order, is an input of the step."""

    kind: Literal["exact"] = "exact"

    def check_processes(self, count: int) -> None:
        """Any number of processes can do a step."""


class Ordered(Spec):
    """Units' gradients are added as float32 in the order of replicas × shards ranks, as `model.ordered` says: outside
    the contract, so that this order is a part of the run. residual: how blocks of replicas join."""

    kind: Literal["ordered"]
    replicas: int = Field(ge=1, le=MAX_UNITS)
    shards: int = Field(ge=1, le=MAX_UNITS)
    residual: Residual

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.replicas * self.shards

    def order(self, units: int) -> Order:
        """The order of a step of so many units; ValueError where they do not divide evenly among the ranks."""
        _require(units % self.world == 0, "units of a step", units, f"multiples of {self.world}", self._ranks())
        return Order(self.replicas, self.shards, units // self.world, self.residual)

    def check_processes(self, count: int) -> None:
        """ValueError unless so many processes can do a step: one, which replays the order, or one for each rank."""
        _require(count in (1, self.world), "the number of processes", count, f"1 or {self.world}", self._ranks())

    def _ranks(self) -> str:
        order = f"{self.replicas} replicas × {self.shards} shards"
        return f"the run's reduction is ordered over {order}: another number of ranks gives other bits"


class NumericsSpec(Spec):
    """Choices within the contract: weight scale formula, int8 slices, windows to a unit (the gradient's atom); and the
    reduction over units, which is the contract's own unless a run was recorded otherwise.

    The defaults trained best in `tests.bench.precision`.
    """

    weight_scale: Literal["max", "lsq"] = "lsq"
    input_gradient_slices: Literal[1, 2] = 1  # of an output gradient on its way to dX
    weight_gradient_slices: Literal[1, 2] = 2  # and to dW
    down_slices: Literal[1, 2] = 1
    unit_windows: int = Field(default=1, ge=1, le=16)
    reduction: Annotated[Exact | Ordered, Field(discriminator="kind")] = Exact()


class OptimizerSpec(Spec):
    """AdamW with decoupled decay, clipping by global norm, and the weight of the z-loss."""

    beta1: Decimal = "0.9"
    beta2: Decimal = "0.95"
    eps: Decimal = "0.00000001"
    weight_decay: Decimal = "0.1"
    clip_norm: Decimal = "1.0"
    z_loss: Decimal = "0.0001"

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _require_decimal("beta1", self.beta1, "[0, 1)")
        _require_decimal("beta2", self.beta2, "[0, 1)")
        _require_decimal("eps", self.eps, "[0.000000000001, 1]")
        _require_decimal("weight_decay", self.weight_decay, "[0, 1]")
        _require_decimal("clip_norm", self.clip_norm, "(0, 16384]")
        _require_decimal("z_loss", self.z_loss, "[0, 1]")
        return self

    def no_decay(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether weight decay leaves this tensor alone: vectors (norm gains) and the embedding."""
        return len(shape) < 2 or name == "embed"


class Phase(Spec):
    """From this many consumed tokens on, a step takes this many windows."""

    from_tokens: int = Field(ge=0)
    windows: int = Field(ge=1)


class ScheduleSpec(Spec):
    """Token-anchored batch size and learning rate: linear warm-up to peak_lr, cosine to floor_ratio * peak_lr."""

    peak_lr: Decimal
    warmup_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=1)
    floor_ratio: Decimal = "0.1"
    phases: tuple[Phase, ...] = Field(min_length=1, strict=False)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _require_decimal("peak_lr", self.peak_lr, "(0, 1]")
        _require_decimal("floor_ratio", self.floor_ratio, "[0, 1]")
        _require(
            self.warmup_tokens <= self.total_tokens,
            "warmup_tokens",
            self.warmup_tokens,
            f"0 to total_tokens = {self.total_tokens}",
            "the run would end during the warm-up",
        )
        starts = [phase.from_tokens for phase in self.phases]
        _require(starts[0] == 0, "phases[0].from_tokens", starts[0], "0", "the first step needs a batch size")
        _require(
            all(a < b for a, b in pairwise(starts)),
            "phases' from_tokens",
            starts,
            "increasing numbers",
            "each phase begins after the one before it",
        )
        _require(
            starts[-1] < self.total_tokens,
            "the last phase's from_tokens",
            starts[-1],
            f"less than total_tokens = {self.total_tokens}",
            "the phase would never begin",
        )
        return self


class SpikeSpec(Spec):
    """When an update is skipped: pre-clip gradient norm above `norm` (a decimal) from step from_step on."""

    norm: Decimal = "5.0"
    from_step: int = Field(default=1000, ge=0)
    cooldown: int = Field(default=4, ge=0)
    halt_events: int = Field(default=5, ge=1)
    halt_within: int = Field(default=100, ge=1)

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        _require_decimal("norm", self.norm, "(0, 16384]")
        possible = (self.halt_within - 1) // (self.cooldown + 1) + 1
        _require(
            self.halt_events <= possible,
            "halt_events",
            self.halt_events,
            f"1 to {possible}",
            f"with a cooldown of {self.cooldown} no more fresh events fit into {self.halt_within} steps",
        )
        return self


class RunSpec(Spec):
    """The whole run. contract and vectors name the arithmetic: the installed kernels' when a recipe leaves them out."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    seed: int = Field(ge=0, lt=2**63)
    contract: str = Field(default_factory=lambda: kernels.CONTRACT, max_length=64, pattern=r"^[a-z0-9.-]+$")
    vectors: str = Field(default_factory=lambda: kernels.vectors_digest(), pattern=r"^[0-9a-f]{64}$")
    model: ModelSpec
    numerics: NumericsSpec = NumericsSpec()
    optimizer: OptimizerSpec = OptimizerSpec()
    schedule: ScheduleSpec
    spike: SpikeSpec = SpikeSpec()

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        unit = self.numerics.unit_windows
        for index, phase in enumerate(self.schedule.phases):
            field = f"phases[{index}].windows"
            _require(
                phase.windows % unit == 0,
                field,
                phase.windows,
                f"multiples of unit_windows = {unit}",
                "a step is cut into whole units",
            )
            _require(
                phase.windows // unit <= MAX_UNITS,
                field,
                phase.windows,
                f"at most {MAX_UNITS * unit}",
                f"a step sums at most {MAX_UNITS:,} units in int64",
            )
            if isinstance(self.numerics.reduction, Ordered):
                self.numerics.reduction.order(phase.windows // unit)
        return self

    def canonical(self) -> dict[str, object]:
        """Plain dict for canonical JSON (integers, strings, lists)."""
        return self.model_dump(mode="json")

    def digest(self) -> str:
        """Hex digest of the canonical JSON."""
        return digest(canonical.dumps(self.canonical()), "spec")
