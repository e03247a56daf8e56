"""The container file names what exists; the Kubernetes template makes jobs that Kubernetes' own schemas accept."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
from prefect.utilities.templating import apply_values, find_placeholders

from flows.environment import QUIET
from storage.provenance import PACKAGES

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = json.loads((ROOT / "deployments/kubernetes/base-job.json").read_text(encoding="utf-8"))
VARIABLES = TEMPLATE["variables"]["properties"]
KUBERNETES = "1.32"
LINES = re.sub(r"\\\n\s*", "", (ROOT / "deployments/Containerfile").read_text(encoding="utf-8")).splitlines()


def manifest(**given: Any) -> Any:
    """What a worker would send: defaults, what the run says, and what Prefect fills in itself."""
    values = {name: variable["default"] for name, variable in VARIABLES.items() if "default" in variable}
    values |= {"name": "train-demo", "labels": {"prefect.io/flow-run-id": "1"}} | given
    values["env"] = [{"name": "PREFECT_API_URL", "value": "http://prefect:4200/api"}]  # Prefect lists them so
    jsonschema.validate({k: v for k, v in given.items()}, TEMPLATE["variables"])
    made = apply_values(TEMPLATE["job_configuration"]["job_manifest"], values)
    container = made["spec"]["template"]["spec"]["containers"][0]
    container["args"] = shlex.split(container["args"])  # as the worker does
    return made


@pytest.mark.parametrize("given", [{}, {"gpus": 2, "memory": "80Gi", "namespace": "elsewhere", "stop_seconds": 120}])
def test_a_job_from_the_template_is_one_that_kubernetes_takes(given: dict[str, Any]) -> None:
    made = manifest(**given)
    assert "{{" not in json.dumps(made)
    kubernetes_validate.validate(made, KUBERNETES, strict=True)


def test_a_job_with_a_field_misspelt_is_refused() -> None:
    made = manifest()
    made["spec"]["backofLimit"] = 0
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(made, KUBERNETES, strict=True)


def test_every_placeholder_is_a_variable_with_help() -> None:
    jsonschema.Draft202012Validator.check_schema(TEMPLATE["variables"])
    used = {placeholder.name for placeholder in find_placeholders(TEMPLATE["job_configuration"])}
    assert used == set(VARIABLES)
    for name, variable in VARIABLES.items():
        assert variable["description"].endswith("."), name
        if "default" in variable:
            jsonschema.validate({name: variable["default"]}, TEMPLATE["variables"])


def test_the_container_file_copies_what_exists_and_every_package() -> None:
    copied = {name for line in LINES if line.startswith("COPY ") for name in line.split()[1:-1]}
    assert all((ROOT / name).exists() for name in copied)
    assert set(PACKAGES) | {"deployments", "pyproject.toml", "constraints.txt"} <= copied
    words = {line.split(" ", 1)[0] for line in LINES if line and not line.startswith("#")}
    assert words <= {"FROM", "WORKDIR", "COPY", "RUN", "USER", "ENV", "CMD"}


def test_a_container_does_not_call_home_and_has_no_secret() -> None:
    text = "\n".join(LINES)
    for name in set(QUIET) - {"PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT", "PREFECT_SERVER_UI_V2_ENABLED"}:
        assert f"{name}={QUIET[name]}" in text
    assert not re.search(r"(?i)(password|secret_access_key|token)\s*=", text)
