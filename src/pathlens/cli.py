"""The command line: demo, table, list, run, results, verify, report, doctor, data.

The commands import the package and torch when they run, so ``pathlens --help`` is fast.
"""

from __future__ import annotations

import enum
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from pathlens.errors import EXTRAS, ArtifactError, MissingExtraError, OptionError, PathlensError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from pathlens.data.store import SetStatus
    from pathlens.papers.experiment import Experiment, Progress
    from pathlens.papers.runner import Outcome, Plan


#: root of the repository if the package runs from its source; an installed package has no docs/results.md there
SOURCE = Path(__file__).resolve().parents[2]
DEMO = ("hs.fig2", "hs.fig3", "hs.fig5", "hs.fig6")
DEMO_TITLE = "What a gated network learns first"
DEMO_LEAD = (
    "Small networks learn a curve on a circle that is slow on the top half and fast on the bottom half. The figures "
    "show which paths of each network are active where, how that changes during training, and what happens when the "
    "gates are frozen."
)
_COLOURS = {
    "reproduced": "green",
    "not reproduced": "dark_orange",
    "cannot tell": "bright_black",
    "holds": "green",
    "printed form wrong, corrected holds": "dark_orange",
    "fails": "red",
    "ok": "green",
    "absent": "bright_black",
    "corrupt": "red",
    "unverified": "yellow",
}
_LOG_SECONDS = 60.0  # between lines of progress if the output is not a terminal


class Scale(enum.StrEnum):
    """The two sizes that every experiment has."""

    quick = "quick"
    paper = "paper"


class Kind(enum.StrEnum):
    """Whether a column is predicted as classes or as numbers."""

    auto = "auto"
    classification = "classification"
    regression = "regression"


class _Group(TyperGroup):
    """Prints errors of Pathlens as one red paragraph, without a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PathlensError as error:
            if os.environ.get("PATHLENS_DEBUG") == "1":
                raise
            from rich.console import Console
            from rich.text import Text

            Console(stderr=True, soft_wrap=True).print(Text(str(error), style="red"))
            raise typer.Exit(1) from None


app = typer.Typer(
    name="pathlens",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Analyse gated neural networks: active paths, half-spaces, and the kernels built from them.",
)
data_app = typer.Typer(no_args_is_help=True, help="Find, check and import the published data sets.")
app.add_typer(data_app, name="data")


def main() -> None:
    """Entry point of the ``pathlens`` command."""
    app()


def _show_version(wanted: bool) -> None:
    if wanted:
        from pathlens import __version__

        print(f"pathlens {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options that come before the command."""


# --- running ---------------------------------------------------------------------------------------------------

Out = Annotated[Path, typer.Option("--out", help="Write artifacts/ and index.html to this folder.")]
Device = Annotated[str, typer.Option("--device", help="Train on this device: cpu, cuda, cuda:1, or auto.")]


@app.command()
def demo(
    out: Out = Path("demo"),
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Train with this number of seeds: 0, 1, …")] = 5,
    device: Device = "cpu",
    open_page: Annotated[bool, typer.Option("--open/--no-open", help="Open the page in the browser.")] = False,
) -> None:
    """Train three networks on the circle and write a page about them (about a minute)."""
    from pathlens.papers.experiment import find
    from pathlens.papers.pages import headline, write_page
    from pathlens.papers.pages.palette import drawing
    from pathlens.papers.runner import Plan, run_all

    with drawing():  # raises before the training if matplotlib is not installed
        pass
    console = _console()
    plan = Plan("quick", _folder(out), seeds, _device(device))
    with _bars(console) as progress:
        outcomes = run_all([find(name) for name in DEMO], plan, progress=progress)
    for outcome in outcomes:
        if outcome.error:
            raise PathlensError(f"{outcome.name}: {outcome.error}")
    done = [outcome.artifact for outcome in outcomes if outcome.artifact is not None]
    page = write_page(done, out, title=DEMO_TITLE, lead=DEMO_LEAD)
    console.print(f"The page: {page.resolve()}")
    for artifact in done:
        console.print(headline(artifact))
    if open_page:
        import webbrowser

        webbrowser.open(page.resolve().as_uri())


@app.command()
def run(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME…", help="Names, patterns such as 'hs.*', all, or FILE.py.")
    ],
    scale: Annotated[
        Scale, typer.Option(help="Choose quick (about a minute each) or paper (the paper's sizes).")
    ] = Scale.quick,
    seeds: Annotated[
        int | None,
        typer.Option("--seeds", min=1, help="Use this number of seeds: 0, 1, …; default: set by the experiment."),
    ] = None,
    device: Device = "auto",
    out: Out = Path("runs"),
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SIZE=VALUE", help="Change a size, such as epochs=30; marks the result REDUCED."),
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=1, help="Run this number of processes at once.")] = 1,
    again: Annotated[bool, typer.Option("--again", help="Start over instead of skipping or resuming runs.")] = False,
) -> None:
    """Run experiments; skip finished runs and resume interrupted ones. Exit code 1 if one fails."""
    from pathlens.papers.experiment import select
    from pathlens.papers.runner import Plan, run_all

    console = _console()
    chosen = select(names)
    plan = Plan(scale.value, _folder(out), seeds, _device(device), _changes(changes or []), again)
    plan.check(chosen)
    if scale is Scale.paper:
        _print_estimates(chosen, plan, console)
    ended = 0
    with _bars(console) as progress:

        def show(outcome: Outcome) -> None:
            nonlocal ended
            ended += 1
            _print_outcome(outcome, f"{ended}/{len(chosen)}", console)
            progress("experiments", ended, len(chosen))

        progress("experiments", 0, len(chosen))
        try:
            outcomes = run_all(chosen, plan, jobs=jobs, progress=progress, ended=show)
        except KeyboardInterrupt:
            console.print(f"Stopped after {ended} of {len(chosen)}. Repeat the command to resume.")
            raise typer.Exit(130) from None
    failed = [outcome for outcome in outcomes if outcome.error]
    if len(failed) < len(outcomes):
        _write_run_page(out, console)
    if failed:
        console.print(
            f"{len(failed)} of {len(chosen)} failed: {', '.join(outcome.name for outcome in failed)}. "
            "Repeat the command to resume them; --again starts all of them over.",
            style="red",
        )
        raise typer.Exit(1)


def _write_run_page(out: Path, console: Console) -> None:
    """Write the page of a folder; print a message if an artifact is unreadable or matplotlib is not installed."""
    from pathlens.papers.artifact import load_folder
    from pathlens.papers.pages import write_page

    try:
        shown = load_folder(_artifact_folder(out))
    except ArtifactError as error:
        console.print(f"No page: {error}", style="yellow")
        return
    try:
        console.print(f"The page: {write_page(shown, out).resolve()}")
    except MissingExtraError as error:
        console.print(f"No page: {error}", style="yellow")


def _print_outcome(outcome: Outcome, count: str, console: Console) -> None:
    """One line: name, verdict, duration and the numbers of the first claim; or the error."""
    from rich.text import Text

    from pathlens.papers.pages import headline

    line = Text.assemble((f"{count} ", "bright_black"), (outcome.name, "bold"), " ")
    artifact = outcome.artifact
    if artifact is None:
        line.append(f"failed: {outcome.error}", style="red")
    else:
        mark = " REDUCED" if artifact.reduced and artifact.scale == "paper" else ""
        took = f"kept from {artifact.created[:10]}" if outcome.kept else f"{artifact.duration_seconds:.0f} s"
        line.append(artifact.verdict + mark, style=_COLOURS[artifact.verdict])
        line.append(f", {took}. {headline(artifact)}")
    console.print(line)


def _print_estimates(chosen: list[Experiment], plan: Plan, console: Console) -> None:
    """Print the cost of the runs that are not finished."""
    from pathlens.papers.pages.words import duration
    from pathlens.papers.runner import finished

    left = [entry for entry in chosen if plan.again or finished(entry, plan) is None]
    total = 0.0
    for entry in left:
        flops, minutes = entry.estimate(plan.run(entry))
        total += minutes
        counted = f"about {_scientific(flops)} floating-point operations, " if flops is not None else ""
        console.print(f"{entry.name}: {counted}about {duration(60 * minutes)}")
    if len(left) > 1:
        console.print(f"All {len(left)}: about {duration(60 * total)}, less if they share trainings")


def _scientific(value: float) -> str:
    return f"{value:.0e}".replace("e+0", "e").replace("e+", "e")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder that contains artifacts or artifacts/.")],
) -> None:
    """Rebuild the page of a folder from its artifacts, without running anything."""
    from pathlens.papers.artifact import load_folder
    from pathlens.papers.pages import not_run, remarks, write_page

    page = write_page(load_folder(_artifact_folder(folder)), folder, not_run=not_run(folder), remarks=remarks(folder))
    _console().print(f"The page: {page.resolve()}")


@app.command()
def results(
    folder: Annotated[
        Path, typer.Option("--in", help="Read artifacts, not-run.toml and remarks.toml from this folder.")
    ] = Path("results"),
    out: Annotated[Path, typer.Option("--out", help="Write this Markdown file.")] = Path("docs/results.md"),
) -> None:
    """Write a table with the verdict of every experiment, or the reason why it was not run."""
    from pathlens.pages import write_file

    write_file(out, results_text(folder).encode())
    _console().print(f"The table: {out.resolve()}")


def results_text(folder: Path) -> str:
    """The table of results, from a folder of artifacts and the list of experiments."""
    from pathlens.papers.artifact import load_folder
    from pathlens.papers.experiment import Run, find, names
    from pathlens.papers.pages import Entry, not_run, remarks, results_page
    from pathlens.papers.pages.words import duration

    entries = []
    for name in names():
        entry = find(name)
        flops, minutes = entry.estimate(Run("paper", tuple(range(entry.seed_count("paper")))))
        cost = duration(60 * minutes) + (f", {_scientific(flops)} operations" if flops is not None else "")
        entries.append(Entry(name, entry.paper, entry.what, cost))
    return results_page(entries, load_folder(_artifact_folder(folder)), not_run(folder), remarks(folder))


@app.command()
def verify(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME…]", help="Names, or patterns such as 'dgn.*'; default: all checks."),
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results to this file.")] = None,
    html_file: Annotated[Path | None, typer.Option("--html", help="Write an HTML page to this file.")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the checks and exit.")] = False,
) -> None:
    """Check every theorem and equation of the papers on small networks. Exit code 1 if one fails."""
    import time

    import msgspec
    from rich.text import Text

    from pathlens.pages import write_file
    from pathlens.papers.artifact import environment
    from pathlens.papers.checks import attempt, select
    from pathlens.papers.pages.verification import FORMAT, Verification, write_verification

    console = _console()
    chosen = select(names or ())
    if only_list:
        for check in chosen:
            console.print(Text.assemble((f"{check.name:<22}", "bold"), f" {check.where}: {check.claim}"))
        return
    start, results = time.perf_counter(), []
    with _bars(console) as progress:
        for done, check in enumerate(chosen):
            progress("checks", done, len(chosen))
            results.append(result := attempt(check))
            verdict, _, rest = str(result).partition(": ")
            console.print(Text.assemble((verdict, _COLOURS[verdict]), f": {rest}"))
            if verdict == "fails" and result.detail:
                console.print(f"  {result.detail}", style="red")
    seconds = time.perf_counter() - start
    checks = [result.document() for result in results]
    document = Verification(format=FORMAT, environment=environment(), seconds=seconds, checks=checks)
    if json_file is not None:
        write_file(json_file, msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n")
    if html_file is not None:
        console.print(f"The page: {write_verification(document, html_file).resolve()}")
    verdicts = [result.verdict for result in results]
    hold, fail = verdicts.count("holds"), verdicts.count("fails")
    console.print(
        f"{len(results)} checks in {seconds:.0f} s: {hold} hold, {len(results) - hold - fail} hold in a corrected "
        f"form, {fail} fail."
    )
    if fail:
        raise typer.Exit(1)


def _changes(texts: list[str]) -> dict[str, Any]:
    """``["epochs=30"]`` as ``{"epochs": 30}``; values are JSON, or else strings."""
    import json

    found: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise OptionError(f"--set {text!r} is not of the form SIZE=VALUE. Write, for example, --set epochs=30.")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


@contextmanager
def _bars(console: Console) -> Iterator[Progress]:
    """Show a progress bar for each unfinished task; without a terminal, print a line every minute."""
    import time

    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bars:
        tasks: dict[str, TaskID] = {}
        last_line = time.monotonic()

        def report_progress(what: str, done: float, total: float) -> None:
            nonlocal last_line
            if not console.is_terminal and time.monotonic() - last_line > _LOG_SECONDS:
                last_line = time.monotonic()
                console.print(f"{what}: {done:.4g} of {total:.4g}")
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
            bars.update(tasks[what], completed=done, total=total)
            if done >= total:
                bars.remove_task(tasks.pop(what))

        yield report_progress


def _device(text: str) -> str:
    """Return the device to use; raise an error now if it is not available, not after the training starts."""
    if text == "cpu":
        return text  # without importing torch
    import torch

    if text == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    from pathlens.training.inputs import as_device

    as_device(text, "--device")
    return text


def _folder(path: Path) -> Path:
    """Create a folder and check that files can be written to it, before the training starts."""
    import tempfile

    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"--out {path} cannot be created: {error.strerror or error}. Choose another.") from error
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise OptionError(f"--out {path} cannot be written to: {error.strerror or error}. Choose another.") from error
    return path


# --- tables ----------------------------------------------------------------------------------------------------


@app.command()
def table(
    file: Annotated[Path, typer.Argument(metavar="FILE.csv", help="A CSV file whose first line has the column names.")],
    target: Annotated[str, typer.Option("--target", help="Predict this column.")],
    out: Annotated[Path, typer.Option("--out", help="Write to FILE.html, or to index.html in this folder.")] = Path(
        "table"
    ),
    kind: Annotated[Kind, typer.Option("--kind", help="Predict classes or numbers.")] = Kind.auto,
    drop: Annotated[list[str] | None, typer.Option("--drop", help="Leave out a column, such as an identifier.")] = None,
    held_out: Annotated[float, typer.Option("--held-out", help="Evaluate on this share of the rows.")] = 0.25,
    rows: Annotated[int, typer.Option("--rows", min=8, help="Use at most this number of rows, at random.")] = 10_000,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the split and the fit.")] = 0,
) -> None:
    """Fit a DLGN to a column of a table and write a page that explains it (half a minute)."""
    import time

    from pathlens.data.tabular import read_csv
    from pathlens.errors import unknown_name
    from pathlens.estimators.frames import fit_table, refuse_infinite

    console = _console()
    frame, notes = read_csv(file)
    for line in notes:
        console.print(f"{line}.", style="bright_black")
    for name in drop or ():
        if name not in frame.columns:
            raise unknown_name("column to drop", name, list(map(str, frame.columns)))
    frame = frame.drop(columns=list(drop or ()))
    refuse_infinite(frame)  # before rows are drawn, because the error names the row in the file
    note = "held out"
    if len(frame) > rows:
        note = f"held out, of {rows:,} of {len(frame):,} rows"
        frame = frame.sample(rows, random_state=seed)
    start = time.perf_counter()
    fitted = fit_table(frame, target, kind.value, held_out, random_state=seed, verbose=True)
    model, seconds = fitted.model, time.perf_counter() - start
    for line in fitted.notes:
        console.print(f"{line}.", style="bright_black")
    page = model.report(
        fitted.test,
        fitted.truth,
        out,
        within=fitted.train,
        others=fitted.others,
        note=note,
        title=f"{target}, from {file.name}",
    )
    measure = "accuracy" if hasattr(model, "classes_") else "R²"
    scores = [
        (type(model).__name__, model.score(fitted.test, fitted.truth)),
        *((one["what"], one["score"]) for one in fitted.others),
    ]
    console.print(
        f"{len(fitted.train):,} rows fitted in {seconds:.0f} s; {measure} on {len(fitted.test):,} held out: "
        + ", ".join(f"{what} {score:.3f}" for what, score in scores)
    )
    console.print(f"The page: {page.resolve()}")


# --- listing ---------------------------------------------------------------------------------------------------


@app.command("list")
def list_experiments(
    chosen: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME…]", help="Names, patterns such as 'hs.*', or FILE.py; default: all."),
    ] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option("--in", help="Look for results in this folder; default: runs, demo and results."),
    ] = None,
) -> None:
    """List experiments with their data, expected time and verdicts."""
    from rich.table import Table
    from rich.text import Text

    from pathlens.papers.experiment import Run, select
    from pathlens.papers.pages.words import duration

    for folder in folders or ():
        if not folder.is_dir():
            raise OptionError(f"--in {folder}: no such folder. Give the --out folder of `pathlens run`.")
    status = _results(folders or [Path("runs"), Path("demo"), Path("results")])
    columns = ("name", "what", "data", "quick", "paper", "operations", "status")
    table = Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))
    console, paper = _console(), ""
    for entry in select(chosen or ["all"]):
        if entry.paper != paper:
            paper = entry.paper
            table.add_row("", Text(paper, style="bright_black"))
        flops, _ = entry.estimate(Run("paper", tuple(range(entry.seed_count("paper")))))
        table.add_row(
            entry.name,
            entry.what,
            ", ".join(entry.data) or "–",
            duration(60 * entry.minutes[0]),
            duration(60 * entry.minutes[1]),
            "–" if flops is None else _scientific(flops),
            status.get(entry.name, Text("not run", style="bright_black")),
        )
    console.print(table, soft_wrap=False)
    console.print(
        "quick, paper: expected time at each scale, on two cores or one GPU; operations: floating-point, at "
        "paper scale; data: at paper scale, quick may need less. Run one with: pathlens run NAME",
        style="bright_black",
    )
    page = SOURCE / "docs" / "results.md"
    where = str(page) if page.is_file() else "docs/results.md of the source repository; an installed package has none"
    console.print(f"Results at the papers' sizes: {where}", style="bright_black")


def _artifact_folder(folder: Path) -> Path:
    inner = folder / "artifacts"
    return inner if inner.is_dir() else folder


def _results(folders: list[Path]) -> dict[str, Text]:
    """Name → coloured status at each scale, from the first folder that has an artifact."""
    from rich.text import Text

    from pathlens.papers.artifact import load

    seen: dict[tuple[str, str], Text] = {}
    for folder in folders:
        for file in sorted(_artifact_folder(folder).glob("*.*.*.json")):
            name, _, scale = file.name.removesuffix(".json").rpartition(".")
            if (name, scale) in seen:
                continue
            try:
                artifact = load(file)
            except ArtifactError:  # a broken file must not hide the others
                seen[name, scale] = Text(f"{scale}: unreadable", style="red")
                continue
            mark = " REDUCED" if artifact.reduced else ""
            seen[name, scale] = Text(f"{scale}: {artifact.verdict}{mark}", style=_COLOURS[artifact.verdict])
    status: dict[str, Text] = {}
    for (name, _), text in sorted(seen.items(), key=lambda item: item[0]):
        status[name] = Text("\n").join([status[name], text]) if name in status else text
    return status


# --- the machine -----------------------------------------------------------------------------------------------


@app.command()
def doctor() -> None:
    """Show versions, devices, memory, optional packages and data sets of this machine."""
    from importlib.metadata import PackageNotFoundError, version

    import torch
    from rich.table import Table
    from rich.text import Text

    from pathlens.budgets import free_bytes, human_bytes
    from pathlens.data import store
    from pathlens.papers.artifact import environment
    from pathlens.stores.executors import default_workers

    console = _console()
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    found = environment()
    for key in ("pathlens", "python", "platform", "torch", "numpy", "scipy"):
        table.add_row(key, str(found[key] or "from source"))
    table.add_row("cpu", f"{default_workers()} cores usable, {torch.get_num_threads()} threads in torch")
    table.add_row("memory", f"{human_bytes(free_bytes())} free for this process")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            table.add_row(
                f"cuda:{index}",
                f"{about.name}, {human_bytes(about.total_memory)}, compute capability {about.major}.{about.minor}",
            )
    else:
        table.add_row("cuda", "none")
    for package, (extra, purpose) in EXTRAS.items():
        try:
            table.add_row(package, f"{version(package)} ({purpose})")
        except PackageNotFoundError:
            missing = f"not installed ({purpose}): pip install 'pathlens[{extra}]'"
            table.add_row(package, Text(missing, style="bright_black"))
    console.print(table, soft_wrap=False)
    console.print()
    _print_sets(console, store.status())


@data_app.command("list")
def data_list() -> None:
    """Show which data sets and tables are on this machine, and the folders that are searched."""
    from pathlens.data import store, table_names

    console = _console()
    _print_sets(console, store.status())
    console.print("Tables: " + (", ".join(table_names()) or "none"))
    console.print("Searched: " + ", ".join(map(str, store.data_folders())), style="bright_black")


@data_app.command("check")
def data_check(
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME…]", help="Sets to check; default: all.")] = None,
) -> None:
    """Decode data sets and compare every checksum. Exit code 1 if one is corrupt, or if a named one is absent."""
    from pathlens.data import store

    console = _console()
    with console.status("decoding"):
        found = [store.check(name) for name in names or store.set_names()]
    _print_sets(console, found)
    if any(item.state == "corrupt" or (names and item.state == "absent") for item in found):
        raise typer.Exit(1)


@data_app.command("import")
def data_import(
    path: Annotated[Path, typer.Argument(metavar="FOLDER_OR_ARCHIVE", help="The published files.")],
    names: Annotated[list[str] | None, typer.Argument(metavar="[NAME…]", help="Sets to import; default: all.")] = None,
) -> None:
    """Check published data sets and copy them into the data folder of Pathlens."""
    from pathlens.budgets import human_bytes
    from pathlens.data import store

    console = _console()
    with console.status("checking and copying"):
        imported = store.import_from(path, names or None)
    for item in imported:
        checked = "checksums agree" if item.verified else "no published checksum to compare with"
        console.print(f"{item.name}: {len(item.files)} files, {human_bytes(item.bytes)}, {checked}, in {item.folder}")


def _print_sets(console: Console, sets: list[SetStatus]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table("data set", "state", "form", "where", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for item in sets:
        where = Text(str(item.place or "–"), overflow="fold")
        if item.state == "corrupt" and item.detail:
            where.append(f"\n{item.detail}", style="red")
        table.add_row(item.title, Text(item.state, style=_COLOURS[item.state]), item.form or "–", where)
    console.print(table, soft_wrap=False)


def _console() -> Console:
    from rich.console import Console

    # tables in piped output must not be folded at 80 columns
    return Console(width=None if sys.stdout.isatty() else 160, soft_wrap=True, highlight=False, markup=False)
