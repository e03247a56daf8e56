"""The commands that say what a model is worth: evaluate, score, generate. cli.py registers them."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from flows.terminal import JsonOption, KeysOption, MirrorOption, absolute, all_absolute, line
from storage.errors import UsageError, printable
from tasks.references import AUDITS, KEYS

if TYPE_CHECKING:
    from storage.audit.verdict import Report
    from storage.figures import Probe

Show = Callable[[dict[str, Any], bool], None]  # prints a verdict, as JSON or as text
BackendOption = Annotated[str, typer.Option(help="By which backend it is measured; verbatim audit lists them.")]
RecordsOption = Annotated[Path, typer.Option(help="Folder for this machine's certificates and scores.")]


def register(app: typer.Typer, say: Callable[[bool], Report], show: Show) -> None:
    """Add the commands to the program. say: shows progress, or is quiet; show: prints a verdict."""
    _add_evaluate(app, say, show)
    _add_score(app)
    _add_generate(app)


def _add_evaluate(app: typer.Typer, say: Callable[[bool], Report], show: Show) -> None:
    @app.command()
    def evaluate(
        run: Annotated[str, typer.Argument(help="A run's folder, or a published run: folder, file:// or s3://.")],
        step: Annotated[int | None, typer.Option(min=0, help="State to measure. Default: the last; or all.")] = None,
        backend: BackendOption = "cpu",
        records: RecordsOption = AUDITS,
        keys: KeysOption = KEYS,
        mirror: MirrorOption = None,
        as_json: JsonOption = False,
    ) -> None:
        """Measure held-out losses, or check those that a run published.

        They are exact: sums of integers, the same on every machine. Of a run's folder, whatever checkpoint has none yet
        gets its record. Of a published run, a checkpoint is measured again and compared with the signed record; the
        verdict is signed like an audit's, and has its exit codes.

        \b
        Examples: verbatim evaluate runs/demo
                  verbatim evaluate runs/demo/published --step 40
        """
        from tasks import evaluation

        address = absolute(run)
        if evaluation.is_folder_of_run(address):
            if mirror:
                raise UsageError("--mirror names copies of a published run", next_step="leave it out")
            _show_made(evaluation.make(address, step, backend), as_json)
            return
        kept, copies = str(records.absolute()), all_absolute(mirror)
        result = evaluation.check(address, step, backend, kept, str(keys.absolute()), say(as_json), copies)
        show(result, as_json)
        raise typer.Exit(int(result["exit_code"]))


def _add_score(app: typer.Typer) -> None:
    @app.command()
    def score(
        run: Annotated[str, typer.Argument(help="A run's folder, or a published run: folder, file:// or s3://.")],
        tasks: Annotated[Path, typer.Option(help="A YAML file of tasks, such as deployments/olmes.yaml.")],
        step: Annotated[int | None, typer.Option(min=0, help="Which checkpoint. Default: the last.")] = None,
        records: RecordsOption = AUDITS,
        keys: KeysOption = KEYS,
        as_json: JsonOption = False,
    ) -> None:
        """Ask a checkpoint multiple-choice tasks, by lm-eval.

        It is exported to plain PyTorch first. Each task is asked in two formulations, completions and letters, of which
        the better counts. The signed record names the state. `make olmes` installs lm-eval once, in an environment of
        its own.

        \b
        Example: verbatim score runs/demo/published --tasks deployments/olmes.yaml
        """
        from tasks import olmes

        with asking(as_json) as tell:
            done = olmes.evaluate(absolute(run), tasks, str(records.absolute()), str(keys.absolute()), step, tell)
        if as_json:
            print(json.dumps(done))
            return
        for text in score_lines(done):
            line(text)


@contextlib.contextmanager
def asking(quiet: bool) -> Iterator[Callable[[int, int, str], None]]:
    """Shows how many answers were scored, on standard error, so that the scores alone are the output."""
    if quiet:
        yield lambda done, of, task: None
        return
    from flows import display
    from tasks import progress

    pace = progress.Pace("Ask tasks", 1, "answers")

    def tell(done: int, of: int, task: str) -> None:
        pace.total = of
        progress.tell(pace.report(done, task))

    with display.shown(Console(stderr=True)):
        yield tell


def score_lines(done: dict[str, Any]) -> list[str]:
    """A record of scores as text, a task a line."""
    lines = []
    for name, found in done["by_task"].items():
        shares = (f"{form.replace('_', ' ')} {share:.1%}" for form, share in found["shares"].items())
        lines.append(f"{name}: {', '.join(shares)} of {found['questions']:,}")
    mean = f"state {done['step']}: {done['mean']:.1%} is {done['averaged']}, each task in its better formulation"
    return [*lines, mean, f"record: {done['record']}"]


def _add_generate(app: typer.Typer) -> None:
    @app.command()
    def generate(
        model: Annotated[str, typer.Argument(help="An export's folder, a run's folder, or a published run.")],
        prompt: Annotated[str, typer.Option(help="The text to go on with.")],
        tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens more.")] = 128,
        step: Annotated[int | None, typer.Option(min=0, help="Of a run: which checkpoint. Default: the last.")] = None,
        device: Annotated[str, typer.Option(help="A torch device: cpu, or cuda for an NVIDIA GPU.")] = "cpu",
    ) -> None:
        """Let a model go on with a text, printed as it comes.

        By the program that is published with the weights, in float32, each token the likeliest; it ends with a text, or
        with the model's window. A checkpoint is verified against the ledger first.

        \b
        Examples: verbatim generate runs/demo --prompt "The function returns"
                  verbatim generate runs/demo/published --step 20 --prompt "The function returns"
        """
        from storage.generation import speaker

        pieces = speaker(absolute(model), step, device).continued(prompt, tokens)
        for piece in itertools.chain([prompt], pieces):
            print(printable(piece), end="", flush=True)
        print()


def _show_made(found: list[Probe], as_json: bool) -> None:
    """Every source's loss of every state, and the mean over all windows."""
    if as_json:
        print(json.dumps([probe.document() for probe in found]))
        return
    for probe in found:
        losses = {name: source.value() for name, source in probe.sources.items()}
        told = ", ".join(f"{name} {'void' if loss is None else format(loss, '.4f')}" for name, loss in losses.items())
        mean = probe.mean()
        line(f"state {probe.step}: {'void' if mean is None else format(float(mean), '.4f')} nats a token ({told})")
