"""The English of the product, section by section: every reason, and what commands, checks and advice say.

`python -m tests.golden.sentences` writes it to sentences.txt. Tests elsewhere assert codes and arguments.
"""

from __future__ import annotations

import os
import re
import string
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from ones_db import Store, migrate
from ones_db.reasons import CAUSES, SENTENCES, Argument, render
from ones_wrapper.protocol import Spec, encode
from ones_wrapper.protocol.limits import SizeLimits, StrategyLimits
from slurm_ones.cli import app
from slurm_ones.show.usage import advice
from tests.show.test_usage import ADVICE
from tests.test_batch_script import BLOCKS, GOOD, TYPED

FILE = Path(__file__).with_name("sentences.txt")


def reasons() -> Iterator[str]:
    """Each sentence of one thing, and of several if that reads otherwise."""
    for code, sentence in SENTENCES.items():
        fields = [(name, spec) for _, name, spec, _ in string.Formatter().parse(sentence) if name]
        one = render(code, {name: _example(name, spec or "", 1) for name, spec in fields})
        several = render(code, {name: _example(name, spec or "", 4) for name, spec in fields})
        yield f"{code}: {one}"
        if any("|" in (spec or "") for _, spec in fields):
            yield f"  {several}"


def _example(name: str, spec: str, number: int) -> Argument:
    return number if spec and spec != "clock" else name.upper()


def causes() -> Iterator[str]:
    """What is counted of jobs that get no other size."""
    for code, text in CAUSES.items():
        yield f"{code}: {text}"


COMMANDS: tuple[tuple[str, ...], ...] = (
    ("jobs", "99999"), ("jobs", "abc"), ("jobs", "-t", "XX"), ("jobs", "-j", "abc"), ("jobs", "--config", "none.toml"),
    ("jobs", "--database", "postgresql://me:secret@host/ones"), ("jobs", "--database", "sqlite:///none.sqlite"),
    ("top", "--sort", "colour"), ("why", "99999"), ("report", "99999"), ("report", "--since", "yesterday"),
    ("report", "--html", "/nonexistent/page.html"), ("resize", "7", "0"), ("resize", "7", "4"),
    ("estimate", "7", "2x"), ("rehearse", "7"), ("template", "nowhere"), ("template", "ddp", "--account", "m1234"),
    ("template", "delta", "--gpus", "lots"), ("template", "delta", "--batch", "9-1"),
    ("template", "delta", "--account", "a b"), ("template", "delta", "--time", "1:00\n#SBATCH --x"),
    ("web", "--user-header", "X-User", "--token", "t"),
    ("import", "sacct", "--since", "yesterday"), ("import", "sacct", "--since", "2d", "--until", "3d"),
    ("check", "no-such-file"),
)  # fmt: skip
OF_DATABASE = {"jobs", "top", "why", "report", "web"}


def commands() -> Iterator[str]:
    """Exit code and complaint of each command that cannot be carried out, on a machine without Slurm."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/ones.sqlite"
        migrate.upgrade(url)
        Store.open(url, "gres").close()
        for arguments in COMMANDS:
            named = ("--database", url) if arguments[0] in OF_DATABASE and "--database" not in arguments else ()
            yield _said([*arguments, *named], Path(folder))


def _said(arguments: list[str], folder: Path, *, whole: bool = False) -> str:
    environment = {"PATH": "/nonexistent", "HOME": "/nonexistent", "COLUMNS": "200", "TERM": "dumb"}
    before = Path.cwd()
    os.chdir(folder)
    try:
        with mock.patch.dict(os.environ, environment):
            done = CliRunner().invoke(app, arguments)
    finally:
        os.chdir(before)
    text = " ".join(re.sub("[│╭╮╰╯─]", " ", done.output if whole else done.stderr).split())
    text = re.sub("^Usage: .* Error ", "", text)
    shown = [word for word in arguments if word != "--database" and not word.startswith(f"sqlite:///{folder}")]
    return f"{' '.join(map(repr, shown))} ({done.exit_code}): {text.replace(str(folder), 'FOLDER')}"


SCRIPTS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "a job": (GOOD, (
        ("--nodes=1", "--nodes=1 --ntasks=4"), ("--nodes=1", "-N1 -n 4"), ("--nodes=1", "--ntasks-per-node=2"),
        ("--requeue", "--no-requeue"), ("--requeue ", ""), (" --open-mode=append", ""), ("--signal=B:USR2@120", "-t 9"),
        ("--gres=gpu:1", "--gpus=4"), ("--gres=gpu:1", "-G 4"), ("ones: gpus", "ones gpus"), ("-16", "-16 deadline=x"),
        ("ones: gpus", "my run; ones: gpus"), ("gpus=1-16", "gpu=1-16"), ("gpus=1-16", "gpus=2-16"), ("ones: ", "run "),
        ("batch=32-1024", "batch=32-1024 array=blocks"), ("exec ones-run", "srun ones-run"), ("--comment", "--mail"),
        ("exec ones-run", "exec torchrun"), ("exec ones-run", "exec ones-run --blocks"), ("--nodes=1", "--nodes=$N"),
        ("--nodes=1", "--nodes=1 --array=0-9"), ("--nodes=1", "--nodes=1 --array=0-9%4"), ("--nodes=1", "-A EDIT"),
        ("--nodes=1", "--nodes=1 --array=0-9%1"), ("--nodes=1", "--nodes=1 --array=5"), ("1024\"", "1024"),
        ("--nodes=1", "--nodes=1 --array=0-0%1"), ("--nodes=1", "--nodes=1 --array=0-3:4"),
        ("exec", "# SBATCH --time=1\nmodule load x\n#SBATCH --time=9\nexec"), ("exec", "export ONES_JOB_DIR=/a\nexec"),
        ("exec", "export ONES_JOB_ROOT=\"$SCRATCH/a\"\nexec"), ("exec", "# ONES_JOB_ROOT=/a\nexec"),
        ("--requeue", "--requeue --chdir=/x"),
    )),
    "blocks": (BLOCKS, (
        ("0-7%1", "0-7%1"), ("0-7%1", "0-7"), ("0-7%1", "0-7%8"), ("ones-run --blocks", "ones-run"),
        ("0-7%1", "0-7%1 -d singleton"), ("exec ones-run --blocks", "ones-run --blocks x\necho"),
    )),
    "types of GPU": (TYPED, (("2080ti:1", "v100:1"), ("--gres=gpu:2080ti:1", "--exclusive"))),
}  # fmt: skip
"""Batch scripts, and what is changed in each."""
COMMENTS = (
    "ones: gpus=1-16", "ones: gpus=1 kinds=a100,v100", "ones: nodes=1-4 batch=64 resize=off", "ones gpus=1-16",
    "ones: gpus=16-1", "ones: gpus=4-16:4 batch=32-1024 array=blocks", "my run",
)  # fmt: skip
RANGES = ("4-16", "4-16:4", "1-16", "1-3")
"""Of GPUs, for a strategy that runs on 4, 8 or 16."""


def checks() -> Iterator[str]:
    """`slurm-ones check` of scripts, comments and the limits of an earlier run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for title, (script, changes) in SCRIPTS.items():
            for before, after in changes:
                assert before in script, (title, before)
                (folder / "job").write_text(script.replace(before, after))
                yield f"{title}, {before!r} → {after!r}: {_said(['check', 'job'], folder, whole=True)}"
        for comment in COMMENTS:
            yield _said(["check", comment], folder, whole=True)
        rows = tuple(SizeLimits(n, n // 4, together=4) for n in (4, 8, 16))
        spec = Spec(32, 512, 64, 1000, 5, limits=StrategyLimits("ring", rows, batch_fixed=True))
        (folder / "spec.json").write_bytes(encode(spec))
        for sizes in RANGES:
            yield _said(["check", f"ones: gpus={sizes}", "--spec", "spec.json"], folder, whole=True)
        (folder / "spec.json").write_text((folder / "spec.json").read_text().replace('"gpus": 8', '"gpus": -8'))
        yield _said(["check", "ones: gpus=4-16", "--spec", "spec.json"], folder, whole=True)


def advices() -> Iterator[str]:
    """Each piece of advice with its figures."""
    for usage, allowed, rule in ADVICE:
        for text in advice(usage, allowed):
            yield f"{rule}: {text}"


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "Reasons": reasons, "Causes": causes, "Commands": commands, "Checks": checks, "Advice": advices,
}  # fmt: skip


def section(name: str) -> str:
    return "\n".join([f"## {name}", *SECTIONS[name](), "", ""])


if __name__ == "__main__":
    FILE.write_text("".join(map(section, SECTIONS)), encoding="utf-8")
