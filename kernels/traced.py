"""Any backend, with a digest of what goes into every operation of a step and of what comes out: the step's trace.

Two replays of one step that end differently have a first operation that was given the same and answered otherwise. A
trace names it, and a referee (the reference, as a rule) does that one operation again with the same inputs. Only who
asks for a trace pays for it.

    traced = Traced(backend, weights)
    step(spec, traced, state, windows)      the same bytes as by `backend`, slower
    traced.trace()                          every operation once, in an order that no memory plan and no device changes

The order: quantised weights by name; the units' operations as they were done; squares, their sum and updates by name.
What a memory plan does again must come out again, or Unsteady is raised.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple
from weakref import ref

import numpy as np

from kernels import canonical, digest
from kernels.interface import Part, Weight


class Kind(NamedTuple):
    """Positions of an operation's arguments: the parameter that it is about, and what it changes in place."""

    parameter: int | None
    changes: tuple[int, ...]


KINDS = {
    "embed": Kind(0, ()),
    "norm_bf16": Kind(1, (3,)),
    "quantise_weight": Kind(0, (2,)),
    "norm_rows": Kind(1, (4,)),
    "quantise_rows": Kind(None, (2,)),
    "project": Kind(1, ()),
    "project_add": Kind(1, ()),
    "rotate_rows": Kind(None, (4,)),
    "rotate_backward": Kind(None, (4,)),
    "attention": Kind(None, ()),
    "attention_backward": Kind(None, (6,)),
    "swiglu_rows": Kind(None, (2,)),
    "swiglu_backward": Kind(None, ()),
    "linear_backward": Kind(1, (1, 3)),
    "norm_backward": Kind(3, (5, 6)),
    "head": Kind(1, (3,)),
    "head_backward": Kind(1, (4, 5)),
    "embed_backward": Kind(2, (2, 3)),
    "square_rows": Kind(0, ()),
    "fixed_sum": Kind(None, (1,)),
    "adamw": Kind(0, (0, 1, 2)),
}
BEFORE, AFTER = ("quantise_weight",), ("square_rows", "fixed_sum", "adamw")  # of no unit


class Operation(NamedTuple):
    """One operation. about: its parameters, joined by "+", or the block in which it stands; unit: None for BEFORE and
    AFTER. inputs: digest of all arguments; outputs: of what it returned and changed."""

    unit: int | None
    name: str
    about: str
    inputs: str
    outputs: str

    @property
    def place(self) -> tuple[int | None, str, str]:
        """Which operation it is, whatever came of it."""
        return self.unit, self.name, self.about

    def __str__(self) -> str:
        where = f" of {self.about}" if self.about else ""
        return f"{self.name}{where}" + ("" if self.unit is None else f", unit {self.unit}")


class Unsteady(RuntimeError):
    """An operation that was done twice with the same inputs gave two results: the machine is at odds with itself."""


class Difference(NamedTuple):
    """Where two traces part: the operation in each, None where one has ended. Given the same if their inputs agree."""

    ours: Operation | None
    theirs: Operation | None

    @property
    def computed(self) -> bool:
        """Whether one operation was given the same by both and answered otherwise."""
        ours, theirs = self
        return bool(ours and theirs and ours.place == theirs.place and ours.inputs == theirs.inputs)

    def __str__(self) -> str:
        if self.computed:
            return str(self.ours)
        if self.ours and self.theirs and self.ours.place == self.theirs.place:
            return f"the inputs of {self.ours}"
        ours, theirs = (str(operation or "the end") for operation in self)
        return f"{ours} here, where the other has {theirs}"


def first_difference(ours: Sequence[Operation], theirs: Sequence[Operation]) -> Difference | None:
    """The first operation in which two traces differ, None where they are equal."""
    for our, their in zip(ours, theirs):
        if our != their:
            return Difference(our, their)
    if len(ours) == len(theirs):
        return None
    shared = min(len(ours), len(theirs))
    our_next, their_next = (trace[shared] if len(trace) > shared else None for trace in (ours, theirs))
    return Difference(our_next, their_next)


class Traced(ModuleType):
    """A backend whose operations are traced through one step.

    weights: the state's, by name, where the backend has them (its `to_device` done). other: a trace to be judged: what
    it says an operation gave, where its inputs were ours and its outputs were not, is asked of the referee, and
    `by_referee` then holds the outputs' digest by place. The referee works on the host.
    """

    def __init__(
        self,
        backend: ModuleType,
        weights: Mapping[str, Any],
        other: Iterable[Operation] = (),
        referee: ModuleType | None = None,
    ) -> None:
        super().__init__(f"kernels.traced.{backend.NAME}", __doc__)
        self.backend, self.NAME = backend, f"traced:{backend.NAME}"
        self.by_referee: dict[Operation, str] = {}
        self._referee = referee
        self._other = {(*operation.place, operation.inputs): operation.outputs for operation in other}
        self._names: dict[int, tuple[ref[Any], str]] = {}
        for name, weight in weights.items():
            self._call(weight, name)
        self._seen: dict[tuple[str, str, str], Operation] = {}
        self._unit, self._block = 0, ""

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.backend, name)
        return partial(self._do, name, function) if name in KINDS else function

    def trace(self) -> list[Operation]:
        """Every operation, each once, in the order of the file's head."""
        done = list(self._seen.values())
        units = [operation for operation in done if operation.unit is not None]
        by_name = {
            name: sorted((operation for operation in done if operation.name == name), key=lambda found: found.about)
            for name in BEFORE + AFTER
        }
        first, last = ([operation for name in names for operation in by_name[name]] for names in (BEFORE, AFTER))
        return first + units + last

    def _do(self, name: str, function: Any, *args: Any) -> Any:
        host = _hosted(self.backend, args, copy=bool(self._other))  # what is changed in place is asked for again
        inputs, about = _digest(host), self._about(name, args)
        result = function(*args)
        outputs = _digest(_hosted(self.backend, _outputs(name, result, args)))
        unit = None if name in BEFORE + AFTER else self._unit
        done = Operation(unit, name, about, inputs, outputs)
        known = self._seen.setdefault((name, about, inputs), done)
        if known.outputs != outputs:
            raise Unsteady(f"{done} gave {outputs} where it gave {known.outputs} before, of the same inputs")
        if self._referee and self._other.get((*done.place, inputs), outputs) != outputs:
            again = getattr(self._referee, name)(*host)
            self.by_referee[done] = _digest(_hosted(self._referee, _outputs(name, again, host)))
        self._learn(name, about, result, args)
        return result

    def _about(self, name: str, args: tuple[Any, ...]) -> str:
        """The names of an operation's parameters, or the block of the last one that had any."""
        position = KINDS[name].parameter
        if name in AFTER:
            return "" if position is None else self._name(args[position])
        if name == "embed_backward":  # its sums are met here first
            found = "embed"
        elif position is None:
            return self._block
        else:
            parameters = args[position] if name == "linear_backward" else (args[position],)
            found = "+".join(self._name(_handle(parameter)) for parameter in parameters)
        self._block = found.partition("+")[0].rpartition(".")[0]
        return found

    def _call(self, array: Any, name: str) -> None:
        self._names[id(array)] = ref(array), name

    def _name(self, array: Any) -> str:
        """Its parameter, "" for an array without one, even where one with a name lay before."""
        known, name = self._names.get(id(array), (None, ""))
        return name if known and known() is array else ""

    def _learn(self, name: str, about: str, result: Any, args: tuple[Any, ...]) -> None:
        """Codes and sums bear the name of their parameter."""
        if name == "quantise_weight":
            self._call(result.hi, about)
        elif name == "linear_backward":
            for part, parameter in zip(args[1], about.split("+")):
                self._call(part.sums, parameter)
        elif name in ("norm_backward", "head_backward", "embed_backward"):
            self._call(args[KINDS[name].changes[0]], about)
        self._unit += name == "embed_backward"  # the last of a unit


def _handle(parameter: Any) -> Any:
    """What tells a parameter: the codes of a weight, else the array itself."""
    if isinstance(parameter, Part):
        parameter = parameter.weight
    return parameter.hi if isinstance(parameter, Weight) else parameter


def _outputs(name: str, result: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What an operation returned, then what it changed."""
    changed = [args[position] for position in KINDS[name].changes]
    return result, *(tuple(part.sums for part in x) if isinstance(x, tuple) else x for x in changed)


def _hosted(backend: ModuleType, value: Any, copy: bool = False) -> Any:
    """The same on the host: a backend's own layout of a weight counts for nothing, an array of no dimension is an
    integer."""
    if value is None or isinstance(value, bool | int | str | np.float32):
        return value
    if isinstance(value, Weight):
        return Weight(*(_hosted(backend, part, copy) for part in value[:2]))
    if isinstance(value, tuple):
        parts = [_hosted(backend, part, copy) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    array = np.asarray(value) if isinstance(value, np.generic) else backend.to_host(value)
    if array.ndim == 0:
        return int(array)
    return array.copy() if copy else array


def _digest(value: Any) -> str:
    return digest.digest(canonical.dumps(_form(value)), "operation")


def _form(value: Any) -> Any:
    """For canonical JSON: arrays by their digests, integers and the bits of floats as text."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, tuple):
        return [_form(part) for part in value]
    if isinstance(value, np.ndarray):
        return digest.tensor_digest("", value)
    return canonical.bits(value) if isinstance(value, np.float32) else str(int(value))
