"""Names that users chose, everywhere they are shown: no escape reaches a terminal or a log, no markup a table, no tag a
page, no line break a shell."""

from __future__ import annotations

import csv
import io
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from ones_db import ActionRecord, Store
from ones_db.reasons import Reason
from ones_db.shape import Shape
from ones_db.views import VIEWS
from slurm_ones.act.actor import commands
from slurm_ones.jobs.elastic import Elastic, WholeJob
from slurm_ones.rules.plan import PlannedChange
from slurm_ones.service.logs import OneLine, TerminalFormatter
from slurm_ones.show.pages import write_usage
from slurm_ones.show.usage import JobUsage, SizeSpan, Usage, of_job, of_jobs
from tests.commands import call
from tests.db.make import decision, job, resized_job, said
from tests.fuzz.parsers import tags
from tests.slurm.make import job_of

NAME = "x\x1b]0;owned\x07\x1b[2J\x9b31m\n\u202e[red]<script>alert('1')</script>'; DROP TABLE jobs; --$\\frac{ \\"
"""As a database of an older release, or one that others write to, may have it."""


def harmless(text: str) -> bool:
    """Printable but for the ends of lines; what a terminal is sent for bold is ours alone, and not sent to a pipe."""
    return all(line.isprintable() for line in text.split("\n"))


@pytest.fixture
def url(empty_url: str) -> str:
    found = empty_url
    with Store.open(found, NAME) as store:
        resized_job(store, 7)
        names = {"name": NAME, "user": NAME, "account": NAME, "partition": NAME, "comment": NAME, "work_dir": NAME}
        store.record_jobs([job(8, refusal=said(NAME), report_note=NAME, **names)])
        decided = decision(2400.0, 7, 8)
        why = Reason(NAME, ((NAME, NAME),))
        store.add_decision(replace(decided, jobs=tuple(replace(one, reason=why, outcome=why) for one in decided.jobs)))
        store.add_action(ActionRecord(2500.0, NAME, NAME, NAME))
    return found


def output(*arguments: str) -> str:
    done = call(*arguments, width=400)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    "arguments",
    [
        ("jobs",), ("jobs", "8"), ("jobs", "--json"), ("why", "8"), ("why", "7"), ("why", "8", "--json"),
        ("top", "--once", "-t", "all"), ("top", "--json"), ("report",), ("report", "8"), ("report", "--json"),
    ],
)  # fmt: skip
def test_commands(url: str, arguments: tuple[str, ...]) -> None:
    text = output(*arguments, "--database", url)
    assert harmless(text)
    if "--json" in arguments:
        assert json.loads(text)


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "job.sbatch").write_text(f"#SBATCH --comment='ones: {NAME}'\n{NAME}\n")
    done = call("check", str(tmp_path / "job.sbatch"))
    assert done.exit_code == 1 and harmless(done.output)


@pytest.mark.parametrize("view", VIEWS)
def test_questions(url: str, view: str) -> None:
    """A table of every view is harmless; csv and json hold what is stored, for a file or a program."""
    assert harmless(output("db", "query", view, "--database", url))
    rows = list(csv.reader(io.StringIO(output("db", "query", view, "--format", "csv", "--database", url))))
    assert len({len(row) for row in rows}) == 1
    json.loads(output("db", "query", view, "--format", "json", "--database", url))


def test_a_column_of_ones_own(url: str) -> None:
    assert harmless(output("db", "query", "--sql", 'SELECT name AS "\x1b[2J[red]" FROM jobs', "--database", url))


@pytest.mark.parametrize("format", ["csv", "json"])
def test_data_on_a_terminal(url: str, format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from slurm_ones.cli import query

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for on_terminal in (True, False):
        target = Terminal() if on_terminal else io.StringIO()
        monkeypatch.setattr(sys, "stdout", target)
        answer = query.Answer(("name",), iter([(NAME,), (None,), (7,)]))
        query._write(answer, query.Format(format), None, None, "")
        monkeypatch.undo()
        assert harmless(target.getvalue()) == on_terminal


def test_errors(url: str, tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('"\\u001b[2J" = 1\n')
    for arguments in (["db", "query", NAME], ["db", "query", "--sql", NAME], ["jobs", "--config", str(config)]):
        done = call(*arguments, "--database", url)
        assert done.exit_code == 2
        assert harmless(done.output + done.stderr)


@pytest.mark.parametrize("layout", [OneLine(journal=True), OneLine(journal=False), TerminalFormatter()])
def test_the_log(layout: logging.Formatter) -> None:
    """One event is one line of a file or of the journal, and a traceback of an error about such a name too."""
    try:
        raise ValueError(NAME)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "", 1, "job %d: %s", (8, NAME), sys.exc_info())
    text = layout.format(record)
    assert harmless(text)
    assert ("\n" in text) == isinstance(layout, TerminalFormatter)


def test_the_log_on_a_terminal() -> None:
    from rich.logging import RichHandler

    written = io.StringIO()
    console = Console(file=written, force_terminal=True, color_system=None, width=400, highlight=False)
    handler = RichHandler(console=console, show_path=False, markup=False)
    handler.setFormatter(TerminalFormatter())
    handler.emit(logging.LogRecord("x", logging.WARNING, "", 1, "job %d: %s", (8, NAME), None))
    assert harmless(written.getvalue())
    assert "[red]" in written.getvalue()


def test_advice() -> None:
    """Commands are for a shell, perhaps root's: nothing that the owner named begins one."""
    path = "/home/a\nrm -rf /\n'; id; '"
    found = job_of(Shape(1, 1), work_dir=path, held=False, kind="$(id)\nrm -rf /\n; id;")
    change = PlannedChange(Elastic(WholeJob.of(found), None, 4, False), Shape(1, 1), Shape(1, 2), None, 64)
    import shlex

    told = commands(change, 5, None, 900.0)
    for line in told:
        if line.startswith("#"):
            assert harmless(line) and "\n" not in line
        else:
            words = shlex.split(line)
            assert words[0] in ("printf", "scontrol")
            assert "rm" not in words and "id;" not in words


def test_the_page(tmp_path: Path) -> None:
    """Its tags are the same whatever jobs are called, and a name that looks like a formula is drawn as it is."""
    found, path = [], tmp_path / "page.html"
    for name in ("train", NAME, "$\\undefined{$"):
        job = JobUsage(7, name, name, name, name, name, *[0.0] * 14)  # type: ignore[arg-type]
        used = Usage(job, stretches=(SizeSpan(0.0, 1.0, 2),))
        write_usage(path, "The demo", of_jobs([used], name), [(used, of_job(used, []))])
        html = path.read_text(encoding="utf-8")
        assert "<script" not in html and "\x1b" not in html
        found.append(tags(html))
    assert found[0] == found[1] == found[2]
