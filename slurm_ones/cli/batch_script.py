"""Parser of batch scripts: it reads directives as sbatch does, and finds calls of ones-run as the shell would.

How sbatch reads a directive was compared with sbatch 26.05 (tests/test_batch_script.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

LONG = {
    "-A": "--account", "-C": "--constraint", "-D": "--chdir", "-G": "--gpus", "-L": "--licenses", "-N": "--nodes",
    "-a": "--array", "-c": "--cpus-per-task", "-d": "--dependency", "-n": "--ntasks", "-p": "--partition",
    "-q": "--qos", "-t": "--time", "-w": "--nodelist", "-x": "--exclude",
}  # fmt: skip
"""Long name of each short option of sbatch that the checks need."""
_VALUED = (
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container",
    "core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error",
    "exclude export export-file extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket",
    "gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem",
    "mem-bind mem-per-cpu mem-per-gpu mincpus network nice nodefile nodelist nodes ntasks ntasks-per-core",
    "ntasks-per-gpu ntasks-per-node ntasks-per-socket open-mode output oversubscribe partition prefer priority",
    "profile propagate qos reservation signal sockets-per-node switches tasks-per-node thread-spec threads-per-core",
    "time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey wrap",
)
_BARE = """
contiguous exclusive get-user-env help hold ignore-pbs no-kill no-requeue overcommit parsable quiet reboot requeue
spread-job test-only use-min-nodes usage verbose version wait
"""
NAMES = tuple(f"--{name}" for name in sorted([*" ".join(_VALUED).split(), *_BARE.split()]))
"""All long options of sbatch. sbatch also accepts unambiguous prefixes of them."""
SAME = {"--tasks-per-node": "--ntasks-per-node"}
BARE = {f"--{name}" for name in _BARE.split()} | {f"-{letter}" for letter in "HkOQshvVWI"}
"""Options of sbatch that take no value."""

_NEARLY = re.compile(r"\s+#SBATCH\b|\s*#\s+SBATCH\b|\s*#sbatch\b", re.ASCII)
_HET = re.compile(r"\s*(hetjob|packjob)\s*")
_VARIABLE = re.compile(r"\$\{?[A-Za-z_]")
_SIGNAL = re.compile(r"(?i)[RB]*B[RB]*:(?:SIG)?(?:USR2|12)(?:@\d{1,5})?")


@dataclass(frozen=True)
class ScriptFinding:
    """Error or warning about a batch script."""

    weight: Literal["error", "warning"]
    """Severity: an error if the job would not be resized, or would not do what its owner intends; else a warning."""
    line: int
    """Number of the line, from 1; 0 for the whole script."""
    text: str


error, warning = partial(ScriptFinding, "error"), partial(ScriptFinding, "warning")


@dataclass(frozen=True)
class Command:
    """Command in a batch script, with its words."""

    line: int
    words: tuple[str, ...]
    piped: bool = False
    """True if the command is part of a pipeline."""
    looped: bool = False
    background: bool = False
    follows: bool = False
    """True if the script has another command after this one."""


@dataclass(frozen=True)
class Script:
    """Batch script, parsed into directives and commands."""

    options: dict[str, tuple[int, str]]
    """(Line, value) of each option, by its long name. Of an option that occurs twice the last counts, as in sbatch."""
    body: tuple[tuple[int, str], ...]
    """(Line, text) of each line with commands. Continued lines are joined into one."""
    findings: tuple[ScriptFinding, ...]

    def value(self, option: str) -> str:
        """Return the value of an option; empty if the script does not set it."""
        return self.options.get(option, (0, ""))[1]

    def line(self, option: str) -> int:
        return self.options.get(option, (0, ""))[0]

    @property
    def warned(self) -> bool:
        """True if `--signal` makes Slurm send SIGUSR2 to the batch shell, and only to it, before the time limit."""
        return _SIGNAL.fullmatch(self.value("--signal")) is not None


def read_script(text: str) -> Script:
    """Parse a batch script into directives and commands, with findings about their form."""
    options: dict[str, tuple[int, str]] = {}
    body: list[tuple[int, str]] = []
    findings = list(_refused(text))
    joined, ends = False, ""
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if ends:  # a here-document
            ends = "" if line == ends else ends
        elif not raw.startswith("#SBATCH"):
            if _NEARLY.match(raw):
                findings.append(warning(number, f"Slurm does not read {line!r:.60}: write #SBATCH"))
            elif joined:
                body[-1] = body[-1][0], f"{body[-1][1]} {line.removesuffix(chr(92))}"
            elif line and not line.startswith("#"):
                body.append((number, line.removesuffix("\\")))
            joined = bool(body) and raw.endswith("\\") and not line.startswith("#")
            ends = _document(line)
        elif body:
            findings.append(error(number, "Slurm ignores #SBATCH after the first command: move it to the top"))
        elif _HET.fullmatch(raw.removeprefix("#SBATCH")):
            findings.append(error(number, "a heterogeneous job cannot be resized: submit it as a job of one part"))
        else:
            findings += _directive(number, raw.removeprefix("#SBATCH"), options)
    return Script(options, tuple(body), tuple(findings))


def _refused(text: str) -> Iterator[ScriptFinding]:
    if text and not text.startswith("#!"):
        yield error(1, "sbatch refuses it: the first line must be #!/bin/bash, or another interpreter's")
    if "\r\n" in text:
        line = text[: text.index("\r\n")].count("\n") + 1
        yield error(line, "sbatch refuses it: lines end as in Windows; convert it by: sed -i 's/\\r$//' FILE")


def _document(line: str) -> str:
    begun = re.search(r"<<-?\s*([\"']?)(\w+)\1", line)
    return begun[2] if begun and "<<<" not in line else ""


def _directive(number: int, rest: str, options: dict[str, tuple[int, str]]) -> Iterator[ScriptFinding]:
    try:
        words = shlex.split(rest.removesuffix("\\"), comments=True)
    except ValueError as reason:
        yield error(number, f"its quotes do not match: {reason}")
        return
    for name, value in options_in(words):
        fits = [one for one in NAMES if one.startswith(name)] if name not in NAMES else [name]
        if name.startswith("--") and len(fits) > 1:
            yield error(number, f"sbatch refuses {name}, which may be {' or '.join(fits[:3])}")
            continue
        full = fits[0] if fits else name
        options[SAME.get(full, full)] = number, value
    if _VARIABLE.search(rest):
        yield warning(number, "Slurm does not replace variables in #SBATCH lines")


def options_in(words: list[str]) -> Iterator[tuple[str, str]]:
    """Yield (long name, value) for each option in sbatch's arguments. A word that is no option is yielded like one."""
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("-") and not word.startswith("--"):
            if word[:2] in BARE and len(word) > 2:  # letters of several options in one word
                words.insert(0, f"-{word[2:]}")
                word = word[:2]
            name, equals, value = LONG.get(word[:2], word[:2]), word[2:], word[2:]
        if not equals and not is_bare(name) and words and not words[0].startswith("-"):
            value = words.pop(0)
        yield name, value


def is_bare(name: str) -> bool:
    """Return True if an option takes no value. `name` may be an unambiguous prefix."""
    return name in BARE or any(one.startswith(name) for one in BARE if len(name) > 4)


# -- commands ----------------------------------------------------------------------------------------------------------

_OPENS, _CLOSES = {"for", "while", "until", "select"}, {"done"}
_KEYWORDS = {"if", "then", "else", "elif", "fi", "do", "done", "{", "}", "!", "time", "for", "while", "until", "select"}
_ENDS = {";", "&&", "||", "|", "|&", "&", "(", ")", ";;"}
_ASSIGNS = re.compile(r"[A-Za-z_]\w*\+?=.*", re.DOTALL)
_NAMED = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
_SHELLS = {"sh", "bash", "dash", "zsh"}
_MOST = 4
"""Largest depth of nested `sh -c` commands that are read."""


def commands(script: Script) -> list[Command]:
    """Return the script's commands in order. A function's commands come at the place of its definition."""
    variables: dict[str, str] = {}
    found: list[Command] = []
    loops = 0
    for number, line in script.body:
        for words, before, after in _simple(line):
            loops += len(_OPENS & {*words[:1]})
            within = loops > 0
            loops = max(0, loops - len(_CLOSES & {*words[:1]}))
            rest = _without_keywords(words)
            while rest and _ASSIGNS.fullmatch(rest[0]):
                name, _, value = rest.pop(0).partition("=")
                variables[name.rstrip("+")] = value
            if rest:
                piped = {before, after} & {"|", "|&"} != set()
                found += _within(Command(number, tuple(rest), piped, within, after == "&"), variables, _MOST)
    return [replace(one, follows=at + 1 < len(found)) for at, one in enumerate(found)]


def _simple(line: str) -> list[tuple[list[str], str, str]]:
    """Return (words, operator before, operator after) for each command in a line."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    found: list[tuple[list[str], str, str]] = []
    words: list[str] = []
    before = ""
    try:
        for word in reader:
            if word in _ENDS:
                if words:
                    found.append((words, before, word))
                words, before = [], word
            else:
                words.append(word)
    except ValueError:  # a quotation that goes on in the next line
        pass
    return [*found, (words, before, "")] if words else found


def _without_keywords(words: list[str]) -> list[str]:
    rest = list(words)
    while rest and rest[0] in _KEYWORDS:
        if rest[0] in _OPENS - {"while", "until"}:
            return []  # the words are what it goes over
        rest.pop(0)
    return rest


def _within(command: Command, variables: dict[str, str], deep: int) -> Iterator[Command]:
    """Yield the command with its variables replaced. For `sh -c TEXT`, yield the commands in TEXT instead."""
    words: list[str] = []
    for word in command.words:
        named = _NAMED.fullmatch(word)
        value = variables.get(named[1] or named[2]) if named else None
        words += [word] if value is None else _split(value)
    inner = next((at for at, word in enumerate(words[:-1]) if word in ("-c", "-lc") and _is(words[at - 1], _SHELLS)), 0)
    if not (inner and deep):
        yield replace(command, words=tuple(words))
        return
    text = " ".join(words[inner + 1 :])
    for own, before, after in _simple(_NAMED.sub(lambda one: variables.get(one[1] or one[2], one[0]), text)):
        piped = command.piped or bool({before, after} & {"|", "|&"})
        behind = command.background or after == "&"
        whole = replace(command, words=(*words[:inner], *own), piped=piped, background=behind)
        yield from _within(whole, variables, deep - 1)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _is(word: str, names: set[str]) -> bool:
    return word.rpartition("/")[2] in names


# -- calls of ones-run -------------------------------------------------------------------------------------------------

_SPEAK = {
    "echo", "printf", "which", "type", "command", "hash", "alias", "cat", "grep", "sed", "awk", "ls", "test", "[", "[[",
    "pip", "man", "module", "ml", "source", ".", "export", "cp", "mkdir", "cd", "tee",
}  # fmt: skip
"""Commands that may mention ones-run without calling it."""
_ASKS = {"--version", "--dry-run", "--help", "-h", "--new-secret"}
_LAUNCHERS = {
    "srun", "ibrun", "mpirun", "mpiexec", "torchrun", "accelerate", "deepspeed", "horovodrun", "aprun", "prun",
}  # fmt: skip
_CONTAINERS = {"apptainer", "singularity", "docker", "podman", "podman-hpc", "shifter", "ch-run", "enroot"}
_HAND_ON = {"exec", "env", "nice", "nohup", "stdbuf", "ionice", "numactl", "taskset", "chrt", "setsid", "time"}
"""Commands that replace themselves by the command in their arguments, so that it receives the signals sent to them."""


@dataclass(frozen=True)
class Call:
    """Call of ones-run in a batch script."""

    command: Command
    prefix: tuple[str, ...]
    """Words before ones-run."""
    arguments: tuple[str, ...]

    @property
    def launcher(self) -> str:
        """Launcher in front of ones-run, such as srun; empty if there is none."""
        return next((word for word in self.prefix if _is(word, _LAUNCHERS)), "")

    @property
    def container(self) -> str:
        """Words that start the container, from the container's command to ones-run; empty without a container."""
        at = next((at for at, word in enumerate(self.prefix) if _is(word, _CONTAINERS)), -1)
        return " ".join(self.prefix[at:]) if at >= 0 else ""

    @property
    def takes_over(self) -> bool:
        """True if ones-run replaces the batch shell (`exec`), so that it receives the signals sent to the shell."""
        if self.command.piped or self.command.background or self.prefix[:1] != ("exec",):
            return False
        return not any(word[:1].isalpha() and not _is(word, _HAND_ON) and "=" not in word for word in self.prefix[1:2])

    @property
    def blocks(self) -> bool:
        return "--blocks" in self.arguments


def calls(found: list[Command]) -> list[Call]:
    """Return the calls of ones-run among these commands."""
    return [one for command in found if (one := _call(command)) is not None]


def _call(command: Command) -> Call | None:
    words = command.words
    at = next((at for at, word in enumerate(words) if _is(word, {"ones-run"})), -1)
    module = next((at for at, word in enumerate(words) if word == "ones_wrapper.launch" and words[at - 1] == "-m"), -1)
    first = words[0].rpartition("/")[2]
    if max(at, module) < 0 or (first in _SPEAK and not (first == "command" and at == 1)):
        return None
    prefix, arguments = (words[:at], words[at + 1 :]) if at >= 0 else (words[: module - 2], words[module + 1 :])
    script = next((n for n, word in enumerate(arguments) if not word.startswith("-")), len(arguments))
    return None if _ASKS & {*arguments[: script + 1]} else Call(command, prefix, arguments)


def requeues_itself(found: list[Command]) -> int:
    """Return the number of the line in which the script requeues or resubmits itself; 0 if there is none."""
    for one in found:
        text = " ".join(one.words)
        again = _is(one.words[0], {"sbatch"}) and re.search(r"\$\{?0\b|:\$\{?SLURM_(ARRAY_)?JOB_?ID\b", text)
        if re.search(r"\bscontrol\s+requeue", text) or again:
            return one.line
    return 0


def hands_on(found: list[Command]) -> bool:
    """Return True if a trap in the script passes SIGUSR2 on to another process."""
    return any(
        one.words[0] == "trap"
        and len(one.words) > 2
        and "kill" in one.words[1]
        and any(re.fullmatch(r"(?i)(SIG)?USR2|12", word) for word in one.words[2:])
        for one in found
    )
