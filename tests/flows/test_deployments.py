"""prefect.yaml: every entrypoint exists, takes the parameters given, and explains each of them."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect import Flow
from prefect.utilities.callables import parameter_schema

ROOT = Path(__file__).resolve().parents[2]
DECLARED = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS = {deployment["name"]: deployment for deployment in DECLARED["deployments"]}


def load(entrypoint: str) -> Flow[..., Any]:
    path, name = entrypoint.split(":")
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    flow = getattr(module, name)
    assert isinstance(flow, Flow)
    return flow


def test_all_flows_are_declared() -> None:
    wanted = {"pipeline", "prepare", "train", "publish", "audit", "nightly-sample", "reproduce-mix"}
    assert set(DEPLOYMENTS) == wanted


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_parameters_fit_and_are_explained(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    flow = load(deployment["entrypoint"])
    parameters = inspect.signature(flow.fn).parameters
    assert set(deployment["parameters"]) <= set(parameters)
    schema = parameter_schema(flow.fn)
    for parameter in parameters:
        assert schema.properties[parameter]["description"], parameter
    flow.validate_parameters(deployment["parameters"])


def test_the_nightly_sample_names_its_timezone_and_never_piles_up() -> None:
    nightly = DEPLOYMENTS["nightly-sample"]
    assert nightly["schedules"][0]["timezone"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", nightly["schedules"][0]["cron"])
    assert nightly["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
