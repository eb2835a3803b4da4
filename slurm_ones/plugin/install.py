"""Installation of the plugin: its files in a folder, and the lines to add to Slurm's configuration.

Slurm's own files are not changed. A trial with `sbatch --test-only` checks the plugin.
"""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from slurm_ones.plugin.build import SPANK, PluginError, compile_spank, run, source

RULES = "slurm_ones.lua"
JOB_SUBMIT = "job_submit.lua"
CLI_FILTER = "cli_filter.lua"
OURS = "Written by slurm-ones plugin install."
WRONG = "2-1"
"""Invalid range of GPUs, which the plugin must refuse."""
_PATH = re.compile(r"/[A-Za-z0-9._+@:/-]*")


@dataclass(frozen=True)
class PluginSite:
    """Settings of Slurm that concern the plugin; empty if they are not set."""

    conf: str
    """Path of slurm.conf."""
    job_submit: str
    cli_filter: str
    plugstack: str
    """Path of plugstack.conf."""


def look() -> PluginSite:
    """Return the site's settings by `scontrol show config`. Raises `PluginError` if Slurm does not answer."""
    done = run("scontrol", "show", "config")
    pairs = (line.partition("=") for line in done.stdout.splitlines())
    found = {key.strip().lower(): value.strip() for key, _, value in pairs}
    if "jobsubmitplugins" not in found:
        raise PluginError(f"Slurm does not say how it is configured: {(done.stderr or done.stdout).strip()[:500]}")
    names = ("slurm_conf", "jobsubmitplugins", "clifilterplugins", "plugstackconfig")
    conf, submit, filters, plugstack = (re.sub(r"^\((?:null|none)\)$", "", found.get(name, "")) for name in names)
    return PluginSite(conf, submit, filters, plugstack or (str(Path(conf).with_name("plugstack.conf")) if conf else ""))


def _write(path: Path, text: str) -> None:
    """Replace a file atomically."""
    handle, name = tempfile.mkstemp(prefix=".slurm-ones-", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink()
        raise


def _folder(to: Path) -> Path:
    """Create a folder and return its absolute path. Raises `PluginError` if Slurm's files cannot contain this path."""
    to = to.resolve()
    if _PATH.fullmatch(str(to)) is None:
        raise PluginError(f"{to}: choose a folder whose path is made of letters, digits and ._+@:/-")
    try:
        to.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PluginError(f"{to}: {error.strerror}") from None
    return to


def _is_foreign(path: Path) -> bool:
    """Return True if the file exists and was not written by `install`. Raises `PluginError` if it cannot be read."""
    try:
        return OURS not in path.read_text("utf-8", errors="replace")[:200]
    except FileNotFoundError:
        # A link to what is not there now is somebody's.
        return path.is_symlink()
    except OSError as error:
        raise PluginError(f"{path}: {error.strerror}") from None


def _files(to: Path, names: tuple[str, ...]) -> list[Path]:
    for name in names:
        _write(to / name, source(name).replace("@DIRECTORY@", str(to)))
    return [to / name for name in names]


def names_lua(plugins: str) -> bool:
    """Return True if a list of Slurm's plugins has lua, as `lua` or as in `job_submit/lua`."""
    return "lua" in [name.rpartition("/")[2] for name in plugins.split(",")]


def write_site(to: Path, include: Path | None, spank: bool, site: PluginSite | None) -> tuple[list[Path], list[str]]:
    """Write the files for a site into `to`, the folder of slurm.conf. Return the files, and sentences that say what the
    admin must still do.

    If the site has its own job_submit.lua or cli_filter.lua, that file is not changed. Raises `PluginError`.
    """
    to = _folder(to)
    foreign = [name for name in (JOB_SUBMIT, CLI_FILTER) if _is_foreign(to / name)]
    try:
        written = [compile_spank(to, include)] if spank else []
        written += _files(to, (RULES, *(name for name in (JOB_SUBMIT, CLI_FILTER) if name not in foreign)))
    except OSError as error:
        raise PluginError(f"{to}: {error.strerror or error}") from None
    todo = []
    for name, calls in ((JOB_SUBMIT, "submitted(job_desc)"), (CLI_FILTER, "filtered(options)")):
        if name in foreign:
            todo.append(
                f"{to / name} is your site's own and stays as it is. To check elastic jobs, call our rules in it:\n"
                f'    local loaded, ones = pcall(dofile, "{to / RULES}")\n'
                f"    local ran, refused = pcall(function() return ones.{calls} end)\n"
                "If `ran` is true and `refused` is not nil, show the sentence in `refused` and return slurm.ERROR."
            )
    if spank:
        plugstack = site.plugstack if site is not None and site.plugstack else f"{to}/plugstack.conf"
        todo.append(f"On login nodes, add to {plugstack}:\n    optional {to / SPANK}")
    conf = site.conf if site is not None and site.conf else f"{to}/slurm.conf"
    plugins = (site.job_submit, site.cli_filter) if site is not None else ("", "")
    submit, filters = (value if names_lua(value) else f"{value},lua".lstrip(",") for value in plugins)
    todo.append(f"In {conf}, once the files are on the controller's machine:\n    JobSubmitPlugins={submit}")
    todo.append(
        "To have --open-mode and --signal set too, and jobs checked by sbatch itself, add also this line. Slurm ends "
        f"every sbatch, srun and salloc on a machine without {CLI_FILTER}, so put that file on all machines first:\n"
        f"    CliFilterPlugins={filters}"
    )
    todo.append("Then:\n    scontrol reconfigure\n    slurm-ones plugin check")
    return written, todo


def write_own(to: Path, include: Path | None, site: PluginSite) -> tuple[list[Path], list[str]]:
    """Write the files for one user into `to`, at a site without the plugin. Return the files, and sentences that say
    what the user must still do.

    The slurm.conf in `to` includes the site's, and adds the filter and the options for this user's commands. Raises
    `PluginError`, for example if the site has its own filter, since Slurm runs only one.
    """
    if not site.conf:
        raise PluginError("Slurm does not say where its slurm.conf is")
    to = _folder(to)
    if Path(site.conf).is_relative_to(to):
        raise PluginError("SLURM_CONF names the file that would be written: unset SLURM_CONF first")
    if site.cli_filter:
        raise PluginError(
            f"this site has a filter of its own (CliFilterPlugins={site.cli_filter}), which would not run next to "
            "yours: ask its administrator to install the plugin"
        )
    foreign = [to / name for name in ("slurm.conf", "plugstack.conf", CLI_FILTER) if _is_foreign(to / name)]
    if foreign:
        raise PluginError(f"{foreign[0]} was not written by this command: choose an empty folder")
    try:
        theirs = f"include {site.plugstack}\n" if Path(site.plugstack).exists() else ""
        written = [compile_spank(to, include), *_files(to, (RULES, CLI_FILTER))]
        _write(to / "plugstack.conf", f"# {OURS}\n{theirs}optional {to / SPANK}\n")
        _write(
            to / "slurm.conf",
            f"# {OURS}\nInclude {site.conf}\nCliFilterPlugins=lua\nPlugStackConfig={to}/plugstack.conf\n",
        )
    except OSError as error:
        raise PluginError(f"{error.filename or to}: {error.strerror or error}") from None
    todo = [f"Where you submit:\n    export SLURM_CONF={to}/slurm.conf\n    slurm-ones plugin check"]
    return [*written, to / "plugstack.conf", to / "slurm.conf"], todo


# -- the trial ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialFinding:
    """Result of one check of the installed plugin."""

    what: str
    good: bool
    text: str


def _submission(*options: str) -> tuple[bool, str]:
    """Submit a trivial job with `sbatch --test-only`. Return (accepted by Slurm, text that sbatch prints)."""
    done = run("sbatch", "--test-only", *options, "--wrap", "true")
    return done.returncode == 0, (done.stderr + done.stdout).strip()


def trial(site: PluginSite) -> tuple[TrialFinding, ...]:
    """Check the installed plugin as this user. Raises `PluginError` if there is no Slurm."""
    taken, said = _submission()
    # A site may refuse such a job for reasons of its own: what counts is that none of them is ours.
    text = "a job without our options is not touched" if taken else f"not submitted: {_last(said)}"
    found = [TrialFinding("plain jobs", "ones:" not in said, text)]
    offered = "--elastic-gpus" in run("sbatch", "--help").stdout
    text = "sbatch knows --elastic-gpus" if offered else f"sbatch does not know --elastic-gpus: see {site.plugstack}"
    found.append(TrialFinding("options", offered, text))
    option = f"--elastic-gpus={WRONG}" if offered else f"--comment=ones: gpus={WRONG}"
    taken, said = _submission(option)
    ours = next((line.partition("ones:")[2].strip() for line in said.splitlines() if "ones:" in line), "")
    if taken:
        text = f"{option} is taken, so nothing is checked and options have no effect: {_why(site)}"
    else:
        text = f"{option} is refused: {ours}" if ours else f"could not be tried: {_last(said)}"
    found.append(TrialFinding("checks", not taken and bool(ours), text))
    return tuple(found)


def _why(site: PluginSite) -> str:
    plugins = {"JobSubmitPlugins": site.job_submit, "CliFilterPlugins": site.cli_filter}
    lua = [name for name, value in plugins.items() if names_lua(value)]
    if not lua:
        return f"neither JobSubmitPlugins nor CliFilterPlugins names lua in {site.conf}"
    return f"lua is in {' and '.join(lua)}, so its script does not call ours, or cannot read it"


def _last(said: str) -> str:
    return said.splitlines()[-1] if said else "no reason given"
