"""Every backend reproduces the committed vectors, and a wrong backend is named."""

from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

import kernels
from kernels import conformance, reference


@pytest.mark.parametrize("name", kernels.HOSTS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_backend_reproduces_every_vector(name: str) -> None:
    assert conformance.self_test(kernels.backend(name)) == []


def test_committed_vectors_are_those_of_the_cases() -> None:
    assert sorted(conformance.vectors()) == sorted(name for name, _ in conformance.cases())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_one_wrong_bit_is_named() -> None:
    def wrong(table: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        out = reference.embed(table, tokens)
        out[0, 0] ^= 1
        return out

    backend = SimpleNamespace(**{**vars(reference), "embed": wrong})
    failing = conformance.self_test(_module(backend))
    assert failing and all(name.startswith("embed") for name in failing)


def _module(namespace: SimpleNamespace) -> ModuleType:
    module = ModuleType("altered")
    vars(module).update(vars(namespace))
    return module
