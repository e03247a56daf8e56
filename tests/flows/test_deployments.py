"""prefect.yaml: every entrypoint exists, takes the parameters given, explains each of them and bounds it; and no
parameter can hold a secret.
"""

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
from prefect.utilities.schema_tools.validation import ValidationError, validate

from storage.errors import UsageError

ROOT = Path(__file__).resolve().parents[2]
DECLARED = yaml.safe_load((ROOT / "deployments" / "prefect.yaml").read_text(encoding="utf-8"))
DEPLOYMENTS = {deployment["name"]: deployment for deployment in DECLARED["deployments"]}


def load(entrypoint: str) -> Flow[..., Any]:
    path, _, name = entrypoint.rpartition(".")
    module = importlib.import_module(path)
    flow = getattr(module, name)
    assert isinstance(flow, Flow)
    return flow


def test_all_flows_are_declared() -> None:
    wanted = {"pipeline", "prepare", "train", "publish", "audit-step", "nightly-sample", "reproduce-mix", "evaluate"}
    assert set(DEPLOYMENTS) == wanted


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_parameters_fit_and_are_explained(name: str) -> None:
    deployment = DEPLOYMENTS[name]
    flow = load(deployment["entrypoint"])
    parameters = inspect.signature(flow.fn).parameters
    assert list(deployment["parameters"]) == [name for name in parameters if name in deployment["parameters"]]
    assert set(parameters) - set(deployment["parameters"]) == set()
    schema = parameter_schema(flow.fn)
    for parameter in parameters:
        assert schema.properties[parameter]["description"], parameter
    flow.validate_parameters(deployment["parameters"])
    assert deployment["description"].endswith(".") and deployment["tags"]


def bounded(schema: dict[str, Any]) -> bool:
    """Whether the JSON schema of a parameter limits what it can hold."""
    if "anyOf" in schema:
        return all(map(bounded, schema["anyOf"]))
    if schema["type"] == "array":
        return "maxItems" in schema and bounded(schema["items"])
    if schema["type"] == "string":
        return "maxLength" in schema or "enum" in schema
    return schema["type"] in ("null", "boolean") or bool({"maximum", "exclusiveMaximum"} & set(schema))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_every_parameter_has_a_largest_value(name: str) -> None:
    properties = parameter_schema(load(DEPLOYMENTS[name]["entrypoint"]).fn).properties
    assert [parameter for parameter, schema in properties.items() if not bounded(schema)] == []


SECRETS = (
    "https://somebody:pass-word@api.drand.sh",
    "https://to-ken@api.drand.sh",
    "s3://bucket/demo?X-Amz-Signature=sig-nature",
    "https://host/demo#access_token=to-ken",
)


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_no_parameter_takes_a_secret(name: str, secret: str) -> None:
    """The form's schema refuses it before a run is made; the flow too, and repeats nothing of it."""
    deployment = DEPLOYMENTS[name]
    flow = load(deployment["entrypoint"])
    schema = parameter_schema(flow.fn).model_dump()
    taken = [key for key, given in deployment["parameters"].items() if isinstance(given, (str, list))]
    for parameter in taken:
        if parameter == "backend":
            continue
        value = [secret] if isinstance(deployment["parameters"][parameter], list) else secret
        parameters = deployment["parameters"] | {parameter: value}
        with pytest.raises(ValidationError, match=parameter):
            validate(parameters, schema, raise_on_error=True)
        with pytest.raises(UsageError, match="may hold a secret") as caught:
            flow.validate_parameters(parameters)
        assert not re.search("pass-word|to-ken|sig-nature", str(caught.value))


@pytest.mark.parametrize("address", ("runs/a@b", "s3://bucket/de-mo/v1.2", "https://api.drand.sh", "/srv/what?/#1", ""))
def test_addresses_without_a_secret_are_taken(address: str) -> None:
    parameters = DEPLOYMENTS["nightly-sample"]["parameters"] | {"beacon": address}
    flow = load(DEPLOYMENTS["nightly-sample"]["entrypoint"])
    validate(parameters, parameter_schema(flow.fn).model_dump(), raise_on_error=True)
    assert flow.validate_parameters(parameters)["beacon"] == address


def test_the_nightly_sample_names_its_timezone_and_never_piles_up() -> None:
    nightly = DEPLOYMENTS["nightly-sample"]
    assert nightly["schedules"][0]["timezone"]
    assert re.fullmatch(r"\d+ \d+ \* \* \*", nightly["schedules"][0]["cron"])
    assert nightly["concurrency_limit"] == {"limit": 1, "collision_strategy": "CANCEL_NEW"}
