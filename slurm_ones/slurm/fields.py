"""Table of a job's fields: the name and notation of each field in every source, for Slurm 22.05 to 26.05."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_type_hints

from ones_wrapper.protocol.hostlist import expand

_GPU = r"(?:gres[/:])?gpu(?![0-9A-Za-z_-])"
_GPUS = re.compile(
    rf"(?:^|,){_GPU}(?::(?:\(null\)|(?=[0-9]*[^0-9:=,()])([^:=,()]+)))?(?:[:=]([0-9]{{1,9}})(?![0-9A-Za-z_])|(?=$|[,(]))"
)
"""Pattern of a GPU type and count, as in gpu:a100:2. A type is not a number; (null) means none. Without a count, it is
one GPU."""
_OTHER = re.compile(rf"(?:^|,)(?!{_GPU})(?:gres[/:])?([^,]+)")
_ALL_GPUS = re.compile(r"(?:^|,)gres/gpu=([0-9]{1,9})(?![0-9])")
_MEMORY = re.compile(r"(?:^|,)mem=([0-9]{1,9}(?:\.[0-9]{1,9})?)([KMGTP]?)(?![0-9A-Za-z])")
_MB = {"K": 1 / 1024, "": 1.0, "M": 1.0, "G": 1024.0, "T": 1024.0**2, "P": 1024.0**3}
_LICENCE = re.compile(r"([^:|;,*]+)(?:[:*]([0-9]{1,9}))?")
ANY_OF = ("|", 0)
"""Mark at the end of a job's licences if any single one suffices (`a|b`)."""
_TASKS = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9})(?::([0-9]{1,9}))?)?")
_ID = re.compile(r"\s*[0-9]{1,15}")
DIGITS = re.compile(r"[0-9]{1,15}")
MOST = 2**53
"""Largest number accepted in a field; a larger one counts as missing."""
LONGEST = 8_192
"""Number of characters to which users' texts are cut."""
MOST_TASKS = 10_000
"""Number of task numbers kept for each array, lowest first."""


def text_of(value: Any) -> str:
    """Return text of bounded length, with ? for NUL and invalid characters. Terminal escapes stay."""
    return _characters(str(value)[:LONGEST]) if value else ""


def _characters(text: str) -> str:
    return text if text.isascii() and "\0" not in text else text.encode(errors="replace").decode().replace("\0", "?")


def number(value: Any, default: int = 0) -> int:
    """Read a number from the JSON of any release: a plain number, or an object {set, infinite, number}."""
    if isinstance(value, Mapping):
        value = value.get("number") if value.get("set", True) and not value.get("infinite") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -MOST <= value <= MOST:
        return default
    # 22.05 writes Slurm's NO_VAL and INFINITE as plain numbers.
    return default if value >= 0xFFFFFFF0 and value < 2**33 else int(value)


def hosts(text: Any) -> tuple[str, ...]:
    """Expand a host list to names; empty if Slurm names none. Raises ValueError for an invalid list."""
    return tuple(expand(_characters(text))) if isinstance(text, str) and text not in ("", "(null)", "N/A") else ()


def gpus(text: Any) -> int:
    """Return the total GPU count of a TRES or GRES text such as gres/gpu:4, gres:gpu:a100:2 or gpu:1(IDX:0)."""
    return sum(int(count or 1) for _, count in _GPUS.findall(text)) if isinstance(text, str) else 0


def gpu_kind(text: Any) -> str:
    """Return the GPU types in a TRES or GRES text, separated by commas; "" for untyped GPUs."""
    found = _GPUS.findall(text) if isinstance(text, str) else ()
    return ",".join(sorted({kind for kind, count in found if int(count or 1)}))


def other_gres(text: str) -> str:
    """Return a GRES text without its GPUs, as `scontrol update Gres=` takes it; "" if nothing is left."""
    return ",".join(_OTHER.findall("" if text in ("N/A", "(null)") else text))


def memory_mb(tres: str) -> int:
    """Return the memory in a TRES text such as cpu=4,mem=8000M,node=2, in MB, rounded up; 0 if the text has none."""
    found = _MEMORY.search(tres)
    return -int(-float(found[1]) * _MB[found[2]] // 1) if found else 0


def seconds(text: str) -> float:
    """Parse a time limit such as 1-00:00:00 or 30:00 into seconds; 0 for none."""
    days, _, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(map(DIGITS.fullmatch, [*parts, days or "0"])):
        return 0.0
    hours, minutes, rest_s = map(int, [*["0"] * (3 - len(parts)), *parts])
    return 86400.0 * int(days or 0) + 3600.0 * hours + 60.0 * minutes + rest_s


def tasks_of(text: Any) -> tuple[int, ...]:
    """Return the task numbers in a text such as 3, 1-7%1 or 0-12:4; ascending, at most `MOST_TASKS`, without invalid
    parts."""
    found: set[int] = set()
    for piece in text.partition("%")[0].strip("[]").split(",") if isinstance(text, str) else ():
        if (match := _TASKS.fullmatch(piece)) is not None:
            low, high, step = int(match[1]), int(match[2] or match[1]), int(match[3] or 1)
            found.update(range(low, high + 1, step or 1)[:MOST_TASKS])
            if len(found) > 8 * MOST_TASKS:
                break
    return tuple(sorted(found)[:MOST_TASKS])


class Notation(NamedTuple):
    """Readers of one type of value from each source. `json` gets None for a value that is not shown."""

    text: Callable[[str], Any]
    json: Callable[[Any], Any]
    pyslurm: Callable[[Any], Any]


class Field(NamedTuple):
    """Field of Slurm's jobs and its name in each source; "" if a source does not show it."""

    notation: Notation
    text: str = ""
    """Column of squeue's --Format."""
    json: str = ""
    """Key of `squeue --json`."""
    pyslurm: str = ""
    """Attribute of `pyslurm.Job`."""
    since: tuple[int, int] = (0, 0)
    """First release whose squeue has the column; older releases fail on a request for it."""
    before: tuple[int, int] = (99, 0)
    """First release in which the column has another meaning."""


def fields_of(record: type) -> dict[str, Field]:
    """Return the `Field` annotations of a class, by attribute."""
    hints = get_type_hints(record, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _printed(text: str) -> str:
    return "" if text == "(null)" else text_of(text)


def _count(text: str) -> int:
    if not (len(text) < 16 and text.isascii() and text.isdigit()):
        return 0
    count = int(text)
    return 0 if 0xFFFFFFF0 <= count < 2**33 else count


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _id(text: str) -> int:
    if _ID.fullmatch(text) is None:
        raise ValueError(f"{text!r:.40} is no id")
    return int(text)


def _names(value: Any) -> tuple[str, ...]:
    return tuple(name for name in text_of(value).split(",") if name)


def texts(value: Any) -> tuple[str, ...]:
    """Read a list of texts; a single text counts as a list of one."""
    return tuple(map(text_of, value)) if isinstance(value, list) else (text_of(value),) if value else ()


def _licences(value: Any) -> tuple[tuple[str, int], ...]:
    text = ",".join(texts(value))
    found = tuple((name, int(count or 1)) for name, count in _LICENCE.findall("" if text == "(null)" else text))
    return (*found, ANY_OF) if "|" in text else found


def _status(value: Any) -> tuple[int, int]:
    """Return exit code and signal. 22.05 shows both as one number, a wait status."""
    if isinstance(value, Mapping):
        signal = value.get("signal")
        killed = number(signal.get("id", signal.get("signal_id"))) if isinstance(signal, Mapping) else 0
        return number(value.get("return_code")), killed
    return number(value) >> 8, number(value) & 0x7F


def _printed_status(text: str) -> tuple[int, int]:
    code, colon, signal = text.partition(":")
    return (_count(code), _count(signal)) if colon else _status(_count(code))


def _allocated(tres: str) -> int:
    found = _ALL_GPUS.search(tres)
    return int(found[1]) if found else gpus(tres)


def _exact(submit_line: Any) -> bool:
    """Tell whether the command line sets a task count."""
    options = str(submit_line or "").split()
    return any(option.startswith(("--ntasks", "-n")) for option in options[:-1])


def _exclusive(submit_line: Any) -> bool:
    """Tell whether the command line asks for whole nodes. `#SBATCH --exclusive` inside the script is not seen."""
    return any(word.startswith("--exclusive") for word in str(submit_line or "").split())


TEXT = Notation(_printed, text_of, text_of)
TEXTS = Notation(texts, texts, texts)
COUNT = Notation(_count, number, _whole)
ID = Notation(_id, number, int)
UID = Notation(_id, lambda value: number(value, -1), int)
TIME = Notation(lambda text: float(_count(text)), lambda value: float(number(value)), lambda value: float(value or 0))
"""Unix time in seconds, 0 for none."""
TIME_LIMIT = Notation(seconds, lambda value: 60.0 * number(value), lambda value: 60.0 * _whole(value))
FLAG = Notation("0".__ne__, lambda value: value is True or number(value) != 0, bool)
"""Flag; a number above 1 counts as set too."""
SET_FLAG = Notation("0".__ne__, lambda value: value is None or bool(value), bool)
"""Flag that counts as set if the source does not show it."""
NAMES = Notation(_names, _names, _names)
HOSTS = Notation(hosts, hosts, hosts)
TASKS = Notation(tasks_of, tasks_of, tasks_of)
TASK = Notation(_count, lambda value: number(value, -1), _whole)
"""Task number in an array. PySlurm shows task 0 as no task."""
IS_TASK = Notation("N/A".__ne__, lambda value: number(value) != 0, bool)
PRIORITY = Notation(
    lambda text: 0 if text == "0" else _count(text) or None,
    lambda value: None if (priority := number(value, -1)) < 0 else priority,
    lambda value: value,
)
"""Priority of a job: None if unknown, 0 for a held job."""
GRES = Notation(text_of, text_of, text_of)
ALLOCATED_GPUS = Notation(_allocated, lambda value: sum(map(gpus, texts(value))), _whole)
EXACT_TASKS = Notation(bool, lambda value: "EXACT_TASK_COUNT_REQUESTED" in texts(value), _exact)
LICENCES = Notation(_licences, _licences, _licences)
EXCLUSIVE = Notation(("NODE", "TOPO").__contains__, _exclusive, _exclusive)
UNSHARED = Notation("NO".__eq__, lambda value: "none" in texts(value), bool)
MEMORY = Notation(memory_mb, lambda value: memory_mb(text_of(value)), _whole)
STATUS = Notation(_printed_status, _status, lambda code: (_whole(code), 0))


def read(field: Field, source: str, values: list[Any]) -> list[Any]:
    """Read one field of many records. Text and PySlurm values that are equal are parsed once."""
    reader = getattr(field.notation, source)
    if source == "json":  # numbers are dicts there, and 1 would equal True
        return [reader(value) for value in values]
    known = {value: reader(value) for value in {*values}}
    return [known[value] for value in values]
