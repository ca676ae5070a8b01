"""The command line: `spmd-compiler plan FILE.py:FUNCTION --mesh dp=8,tp=4`.  No GPU and no process group needed."""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import json
import logging
import os
import sys
import traceback
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import click

from .contracts import ContractError, Limits
from .cost import PROFILES, read_toml
from .diff import diff as compare
from .explain import explain_text
from .hf import LENGTH, training_step
from .placements import SpmdError
from .program import Program, explain, export, load
from .progress import shown as shown_progress
from .reader import parse
from .report import report
from .text import LEVELS, Text, readable
from .timeline import timeline, write_trace
from .words import meant, shown

BATCH = 8  # sequences a step, where nothing says how many


class _Judged:
    """A command whose exit codes mean something: bad input is 3 everywhere, as 1 and 2 are verdicts."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _bad_input():
            return super().make_context(*args, **kwargs)  # type: ignore[misc,no-any-return]

    def invoke(self, ctx: click.Context) -> Any:
        with _bad_input():
            return super().invoke(ctx)  # type: ignore[misc]


@contextlib.contextmanager
def _bad_input() -> Iterator[None]:
    try:
        yield
    except click.ClickException as error:
        error.exit_code = _Refusal.exit_code  # type: ignore[misc]
        raise
    except (click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except (SpmdError, OSError) as error:
        raise _Refusal(str(error)) from None
    except Exception:
        raise _Refusal(traceback.format_exc().rstrip()) from None  # an error of ours is no verdict either


class _Refusal(click.ClickException):
    exit_code = 3


class _Command(_Judged, click.Command):
    pass


class _Commands(_Judged, click.Group):
    command_class = _Command


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0, and 3 for bad input; of `plan`, 2 for a contract that is broken; of `diff`, 1 for programs "
    "that differ and 2 for a limit that is exceeded.",
)
@click.version_option(package_name="spmd-compiler")
def main() -> None:
    """Plan single-device PyTorch programs on meshes of devices."""


@main.command(
    epilog="\b\nExamples:\n"
    "  spmd-compiler plan train.py:step --mesh dp=8,tp=4 --profile h100\n"
    "  spmd-compiler plan train.py:step --mesh dp=64 --placements fsdp.toml --backward --level summary\n"
    "  spmd-compiler plan hf:llama --config config.json --mesh dp=8,tp=8 --placements tp.toml\n"
    "\b\nA file of placements has a table or a line for each name or glob:\n"
    "  ['layers.*.weight']\n"
    "  tp = 'S(0)'\n"
)
@click.argument("target", metavar="FILE.py:FUNCTION|hf:KIND")
@click.option("--mesh", required=True, metavar="AXIS=SIZE,...", help="The devices, outermost axis first.")
@click.option("--profile", metavar="NAME|FILE.toml", help=f"Prices: {', '.join(PROFILES)}, or a file.")
@click.option("--buckets", is_flag=True, help="Join small collectives where that costs less.")
@click.option("--overlap", is_flag=True, help="Weight gathers and gradient reductions hide behind computation.")
@click.option("--placements", "file", type=click.Path(exists=True, dir_okay=False), help="Placements by name, as TOML.")
@click.option("--backward/--no-backward", default=None, help="The first output is a loss; plan its gradients too.")
@click.option("--level", type=click.Choice(LEVELS), default="full", show_default=True, help="How much to print.")
@click.option("--forbid", multiple=True, metavar="KIND[AXIS]", help="Collectives there must be none of (repeatable).")
@click.option("--expect", multiple=True, metavar="KIND[AXIS]=N", help="How many there must be (repeatable).")
@click.option("--max-wire", metavar="BYTES", help="What a device may send: 10MiB.")
@click.option("--max-memory", metavar="BYTES", help="What a device may hold: 60GiB.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="Of hf:KIND: its configuration, as JSON.")
@click.option("--batch", type=click.IntRange(min=1), help=f"Of hf:KIND: sequences a step.  [default: {BATCH}]")
@click.option("--length", type=click.IntRange(min=1), help=f"And tokens a sequence.  [default: {LENGTH} or less]")
@click.option("--dump", type=click.Path(file_okay=False), help="A folder for the text after each pass.")
@click.option("--save", "to", type=click.Path(dir_okay=False), help="Save the program too, for the other commands.")
def plan(
    target: str, mesh: str, profile: str | None, overlap: bool, buckets: bool, file: str | None, backward: bool | None,
    level: str, forbid: tuple[str, ...], expect: tuple[str, ...], max_wire: str | None, max_memory: str | None,
    dump: str | None, to: str | None, config: str | None, batch: int | None, length: int | None,
) -> None:  # fmt: skip
    """Plan what FUNCTION returns, or a training step of a language model of transformers, and print the program.

    FUNCTION takes no arguments and gives what `spmd_compiler.export` takes: a tuple (model or function, args[,
    kwargs]), or a dict of export's own arguments.  What the options say replaces what the dict says.  Build
    large models under torch.device("meta"): nothing is allocated.  A broken contract (--forbid, --expect, --max-wire,
    --max-memory) is explained, and the exit code is 2.
    """
    try:
        if target.startswith("hf:"):
            asked = training_step(target.removeprefix("hf:"), config, BATCH if batch is None else batch, length)
        else:
            for option, value in (("--config", config), ("--batch", batch), ("--length", length)):
                if value is not None:
                    raise click.BadParameter(f"is of hf:KIND, not of {target}", param_hint=option)
            asked = _arguments(_load(target)())
        asked["mesh"] = _mesh(mesh)
        if file is not None:
            asked["placements"] = read_toml(file)
        if profile is not None:
            asked["profile"] = profile
        asked |= {k: True for k, given in (("overlap", overlap), ("buckets", buckets)) if given}
        if backward is not None:
            asked["backward"] = backward
        if dump is not None:
            asked["dump"] = dump
        contract = {"forbid": forbid, "expect": _counts(expect), "max_wire_bytes": max_wire, "max_memory": max_memory}
        asked |= {k: v for k, v in contract.items() if v or v == ""}
        # What fails while it is traced is an error in words below; torch would log it with its own traceback.
        logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
        with shown_progress(), _rarely_collecting():
            program = export(asked.pop("model_or_fn"), asked.pop("args"), asked.pop("kwargs", None), **asked)
            if to is not None:
                program.save(to)
            printed = _shown(program, level)
    except ContractError as error:
        click.secho(f"Error: {error}", err=True)
        sys.exit(2)
    except (SpmdError, OSError, click.ClickException):
        raise
    except Exception as error:
        raise _Refusal(_blamed(error, target)) from None
    click.echo(printed, nl=False)


def _blamed(error: Exception, target: str) -> str:
    """An error of the user's program in words, with its last line there; an error of ours with its traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{os.path.relpath(error.filename)}:{error.lineno}: {type(error).__name__}: {error.msg}"
    frames = traceback.extract_tb(error.__traceback__)
    if Path(__file__).parent in Path(frames[-1].filename).parents:
        return "".join(traceback.format_exception(error)).rstrip()
    folder = Path(target.rpartition(":")[0]).resolve().parent
    theirs = [f for f in frames if folder in Path(f.filename).resolve().parents and "site-packages" not in f.filename]
    at = f"{os.path.relpath(theirs[-1].filename)}:{theirs[-1].lineno}, in {theirs[-1].name}" if theirs else target
    return f"{at}: {type(error).__name__}: {error}"


@contextlib.contextmanager
def _rarely_collecting() -> Iterator[None]:
    """Collect garbage seldom: a plan is a few large graphs that live to its end, and looking through them is slow."""
    before = gc.get_threshold()
    gc.set_threshold(100_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("--level", type=click.Choice(LEVELS), default="full", show_default=True, help="How much to print.")
def show(file: str, level: str) -> None:
    """Print the program that FILE holds (saved, or the text of one)."""
    if _is_saved(file):
        click.echo(_shown(load(file), level), nl=False)
        return
    text = _read(file)
    click.echo(Path(file).read_text() if level == text.level else str(text.at(level)), nl=False)


@main.command(
    "explain",
    epilog="\b\nExamples:\n  spmd-compiler explain job.spmd all_gather_3\n  spmd-compiler explain job.txt\n",
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.argument("collective", required=False)
def explain_(file: str, collective: str | None) -> None:
    """Say why COLLECTIVE is in the saved program FILE, and what else could be done.

    COLLECTIVE is the name of a line ("all_gather_3").  Without it, all are listed with their reasons, dearest first.
    FILE may be the text of a program too, which says who makes and who wants a value, but holds no alternatives.
    """
    if not _is_saved(file):
        text = _read(file)
        if collective is None and not text.collectives:
            click.echo("the program has no collectives")
        names = [k.name for k in sorted(text.collectives, key=lambda k: -k.wire_bytes(text.mesh))]
        for name in names if collective is None else [collective]:
            rows = explain_text(text, name)
            click.echo(rows[0] if collective is None else "\n".join(rows))
        return
    program = load(file)
    if collective is not None:
        click.echo(str(explain(program, collective)))
        return
    if not program.collectives:
        click.echo("the program has no collectives")
    for c in sorted(program.collectives, key=lambda c: -c.wire_bytes):
        click.echo(f"%{c.name} = {c.kind}[{c.axis}]  {c.source}  {c.phase}  {readable(c.wire_bytes)} wire: {c.why}")


@main.command(
    "report",
    epilog="\b\nExamples:\n  spmd-compiler report job.spmd -o report.html --trace trace.json\n"
    "  spmd-compiler report new.spmd --against old.spmd -o report.html\n",
)
@click.argument("file", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "out", required=True, type=click.Path(dir_okay=False), help="The page to write.")
@click.option("--against", type=click.Path(exists=True, dir_okay=False), help="A saved program to compare with.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write the predicted timeline for Perfetto too.")
def report_(file: str, out: str, against: str | None, trace: str | None) -> None:
    """Write a self-contained page of the saved program FILE: placements, communication, timeline, memory, text."""
    for each in filter(None, (file, against)):
        if not _is_saved(each):
            raise SpmdError(f"{each}: a report takes programs that `spmd-compiler plan --save` wrote, not texts")
    program = load(file)
    page = report(program, load(against) if against is not None else None)
    Path(out).write_text(page)
    if trace is not None:
        write_trace(timeline(program.local), program.local.captured.name, trace)


@main.command(
    epilog="\b\nExit codes: 0 the same, 1 different, 2 a limit is exceeded, 3 bad input.\n"
    "\b\nExamples:\n"
    "  spmd-compiler diff main.txt branch.txt --max-wire-increase 5% --forbid 'all_gather[tp]'\n"
    "  spmd-compiler diff old.spmd new.spmd --json | jq .added\n",
)
@click.argument("old", type=click.Path(exists=True, dir_okay=False))
@click.argument("new", type=click.Path(exists=True, dir_okay=False))
@click.option("--max-wire-increase", metavar="SHARE%|BYTES", help="How much more a device may send: 5%, 10MiB.")
@click.option("--max-memory", metavar="BYTES", help="What a device may hold in NEW: 60GiB.")
@click.option("--forbid", multiple=True, metavar="KIND[AXIS]", help="Collectives that NEW must not add (repeatable).")
@click.option("--details", is_flag=True, help="A line for each change, not for changes that are alike.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def diff(
    old: str, new: str, max_wire_increase: str | None, max_memory: str | None, forbid: tuple[str, ...], details: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Say what changed from the program OLD to NEW (texts of `plan`, or saved programs)."""
    found = compare(_read(old), _read(new))
    limits = Limits.of(max_wire_increase, max_memory, forbid).exceeded(found)
    if as_json:
        click.echo(json.dumps(found.json() | {"exceeded": limits}, indent=2))
    else:
        colour = False if os.environ.get("NO_COLOR") else None  # None: on a terminal
        for line in found.lines(details):
            click.secho(line, fg={"+": "green", "-": "red", "~": "yellow"}.get(line[0]), color=colour)
        for limit in limits:
            click.secho(f"! {limit}", fg="red", bold=True, color=colour)
    sys.exit(2 if limits else 0 if found.same else 1)


def _counts(given: tuple[str, ...]) -> dict[str, int]:
    """``("all_reduce[tp]=4",)`` -> ``{"all_reduce[tp]": 4}``."""
    found = {}
    for text in given:
        name, _, count = text.rpartition("=")
        if not count.strip().isdigit():
            raise click.BadParameter(f"{text!r} is not KIND[AXIS]=N", param_hint="--expect")
        found[name.strip()] = int(count)
    return found


def _is_saved(path: str) -> bool:
    """Whether a file holds a saved program, be it damaged, and not the text of one."""
    with open(path, "rb") as file:
        return file.read(2) == b"PK" or zipfile.is_zipfile(path)


def _read(path: str) -> Text:
    """The text of a program in a file: one that was printed, or saved."""
    if _is_saved(path):
        return parse(load(path).text())
    try:
        return parse(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise SpmdError(f"{path}: neither a saved program nor the text of one") from None
    except SpmdError as error:
        raise SpmdError(f"{path}: {error}") from None


def _load(target: str) -> Any:
    """The function named ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``."""
    place, _, name = target.rpartition(":")
    if not place:
        raise click.BadParameter(f"{target!r} is not FILE.py:FUNCTION")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise click.BadParameter(f"there is no file {place}")
        sys.path.insert(0, str(Path(place).resolve().parent))
        found = vars(_imported(Path(place)))
    else:
        try:
            found = vars(importlib.import_module(place))
        except ModuleNotFoundError as error:
            raise click.BadParameter(str(error)) from None
    if not callable(found.get(name)):
        own = {n: v for n, v in found.items() if getattr(v, "__module__", None) == found["__name__"]}
        functions = [n for n, v in own.items() if callable(v) and not n.startswith("_")]
        raise click.BadParameter(f"{place} has no function {name!r}; {meant(name, functions)}")
    try:
        inspect.signature(found[name]).bind()
    except TypeError as error:
        raise click.BadParameter(f"{target}: FUNCTION is called without arguments: {error}") from None
    return found[name]


def _imported(file: Path) -> ModuleType:
    """The module in a file, as ``spmd_plan``: Dynamo looks up by that name what its functions call."""
    module = ModuleType("spmd_plan")
    module.__file__ = str(file)
    sys.modules[module.__name__] = module
    exec(compile(file.read_bytes(), str(file), "exec"), vars(module))
    return module


def _arguments(given: Any) -> dict[str, Any]:
    """The keyword arguments of `export` that a function gave."""
    if isinstance(given, Mapping):
        found = dict(given)
    elif isinstance(given, tuple) and len(given) in (2, 3):
        found = dict(zip(("model_or_fn", "args", "kwargs"), given, strict=False))
    else:
        raise SpmdError(f"the function gave {type(given).__name__}, not (model, args), (model, args, kwargs) or a dict")
    known = inspect.signature(export).parameters
    for key in found:
        if key not in known:
            raise SpmdError(f"the dict has {shown(key)}, which export does not take; {meant(key, known)}")
    if not {"model_or_fn", "args"} <= found.keys():
        raise SpmdError("the dict lacks 'model_or_fn' or 'args'")
    return found


def _mesh(text: str) -> dict[str, int]:
    sizes = {}
    for part in text.split(","):
        name, _, size = part.partition("=")
        if not size.strip().isdigit():
            raise click.BadParameter(f"{text!r} is not AXIS=SIZE,...", param_hint="--mesh")
        if name.strip() in sizes:
            raise click.BadParameter(f"{text!r} names axis {name.strip()!r} twice", param_hint="--mesh")
        sizes[name.strip()] = int(size)
    return sizes


def _shown(program: Program, level: str) -> str:
    """The text at a level; below the full one, with comments on price and fallbacks, and why each collective is."""
    if level == "full":
        return program.text()
    notes = [f"predicted  {program.price * 1e3:.3f} ms a step, proven within {program.gap:.2%} of the cheapest plan"]
    if program.replicated_ops:
        notes.append(f"no rule  {', '.join(program.replicated_ops)}")
    if level == "collectives":
        notes += [f"why {c.name}: {c.why}" for c in program.collectives]
    return program.text(level) + "".join(f"# {note}\n" for note in notes)
