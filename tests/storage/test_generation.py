"""How a model goes on with a text: from a run, a release or an export the same, and one clear error each."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from storage import checkpoint
from storage.errors import CheckpointFault, InputFault, Refused, UsageError
from storage.generation import speaker
from tests.storage.conftest import Small, flip

PROMPT = "verbs7 v"


def said(address: object, **options: object) -> str:
    return "".join(speaker(str(address), **options).continued(PROMPT, 5))  # type: ignore[arg-type]


def test_a_run_a_release_and_an_export_say_the_same(made: Small) -> None:
    texts = {said(where) for where in (made.folder, made.published.root, made.published.root / "export")}
    assert len(texts) == 1 and texts.pop()
    assert CliRunner().invoke(app, ["generate", str(made.folder), "--prompt", PROMPT, "--tokens", "5"]).output == (
        PROMPT + said(made.folder) + "\n"
    )


def test_tokens_that_were_seen_are_kept(made: Small) -> None:
    """One token at a time gives the logits of all at once, but for the order of floats' sums."""
    model = speaker(str(made.folder), 5).model
    tokens, cache, parts = torch.arange(2, 14)[None], {}, []
    with torch.inference_mode():
        for part in tokens.split([3, 1, 1, 5, 1, 1], dim=1):
            parts.append(model.logits(part, cache))
        torch.testing.assert_close(torch.cat(parts, dim=1), model.logits(tokens))
    assert cache["blocks.000"][0].shape == (1, 1, 12, 64)


def test_it_ends_with_the_window(made: Small) -> None:
    model = speaker(str(made.folder)).model
    with torch.inference_mode():
        assert len(list(model.continued([5, 6, 7]))) <= 16 - 3 and not list(model.continued(list(range(2, 18))))


def test_a_prompt_must_fit(made: Small) -> None:
    for prompt, count in (("", "0"), ("verbs7 " * 16, r"\d+")):
        with pytest.raises(UsageError, match=f"the prompt has {count} tokens, the model goes on after 1 to 15"):
            speaker(str(made.folder)).continued(prompt, 1)


def test_no_such_model(made: Small, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"has no checkpoint 7; it has \[0, 5, 10, 12\]"):
        speaker(str(made.folder), 7)
    with pytest.raises(Refused, match="holds no run"):
        speaker(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match="an export is of one state"):
        speaker(str(made.published.root / "export"), 12)
    with pytest.raises(UsageError, match="device martian"):
        speaker(str(made.folder), None, "martian")


@pytest.mark.parametrize(
    "change", [{"attention_windows": None}, {"attention_windows": [16] * 9}, {"head_dim": 7}], ids=str
)
def test_an_export_whose_config_does_not_fit_its_weights(made: Small, change: dict[str, object]) -> None:
    path = made.published.path("export/config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InputFault, match="not an export"):
        speaker(str(made.published.root / "export"))
    path.write_text("[]")
    with pytest.raises(InputFault, match="not an export"):
        speaker(str(made.published.root / "export"))


def test_a_checkpoint_whose_root_is_not_in_the_ledger(made: Small) -> None:
    path = made.store.path(checkpoint.checkpoint_key(12))
    manifest = json.loads(path.read_bytes())
    manifest["scalars"]["updates"] -= 1
    path.write_bytes(json.dumps(manifest, separators=(",", ":")).encode())
    with pytest.raises(CheckpointFault, match=r"give root \w{64}, the ledger records \w{64}"):
        speaker(str(made.folder))


def test_another_tokenizer_than_the_models(made: Small) -> None:
    for path, address in (
        (made.published.path("export/tokenizer.json"), made.published.root / "export"),
        (made.mix.path("tokenizer.json"), made.folder),
    ):
        flip(path, 40)
        with pytest.raises(InputFault, match=r"tokenizer.json has digest \w{64}, the model was trained with \w{64}"):
            speaker(str(address))
