"""Search of the script's text for code that depends on the rank, sums divided by a length, and tests of a loop's
count."""

from __future__ import annotations

import ast
import linecache
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from types import CodeType, FrameType, ModuleType
from typing import Any, TypeGuard

from ones_wrapper.script.line import frames, is_script_file

_MAIN = re.compile(r"(?:main|master)_process$|is_(?:main|master|primary)$|(?:global|process|rank)_zero(?:_only)?$")
_RANK = re.compile(r"(?:^|[_.])(?<!lora_)rank(\(\))?$")
_OWN = re.compile(r"(?:^|_)(?<!lora_)(?:rank|procid)$|^process_index$|^getpid$|^gethostname$", re.IGNORECASE)
_WORLD = re.compile(r"(?:^|_)world(?:_size)?$|^num_(?:replicas|processes)$", re.IGNORECASE)
_ANY_WORLD = re.compile(r"world|num_(?:replicas|processes)", re.IGNORECASE)
_CUTS = re.compile(r"shard|split|slice|range|chunk|partition|subset", re.IGNORECASE)
_BY_NODE = {"split_by_node", "split_dataset_by_node", "sharding_filter"}
"""Functions of data libraries that split a stream by rank and world size."""
_BEST = re.compile(r"(?<![a-z])best(?![a-z])", re.IGNORECASE)
_COUNTED = re.compile(r"(.+) (?:\+= \d+|= \1 \+ \d+)")
_ADDED = re.compile(r"(.+?)(?: \+= .+| = \1 \+ .+|\.append\(.+)")
_LENGTH = re.compile(r"^len$|batches|samples|per_epoch", re.IGNORECASE)
_COMPUTED = re.compile(r"^(?:int|str|min|max|ceil|join|joinpath|format|Path|get\w*)$")
"""Pattern of functions whose result depends on the rank if one of their arguments does."""
_SEEDS = re.compile(r"seed|default_rng|RandomState")
_OWN_SEED = {"generator", "seed", "random_state", "rng"}
_DRAWS = re.compile(
    r"^(?:rand\w*|normal|uniform|permutation|shuffle|sample|choices?|make_(?:class|regr|blobs|moons)\w*)$"
)
_DATA = re.compile(r"^(?:\w*Dataset|Subset|DataLoader|loader|prepare)$")
"""Pattern of calls that take data as an argument."""
_ACTS = re.compile(r"eval|valid|(?:^|_)test|save|checkpoint|target|load_state|copy_|update_|freeze", re.IGNORECASE)
"""Pattern of calls that change the training, or that all ranks must make together; calls that only print do not
matter."""
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_HELD = {ast.Name: "id", ast.Attribute: "attr", ast.arg: "arg", ast.keyword: "arg", ast.Constant: "value"}
"""Types of syntax tree nodes that contain a word, and the attribute that has the word."""


@cache
def _nodes(path: str) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(path)))))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [ast.Module([], [])]


def by_rank(frame: FrameType | None = None) -> bool:
    """Return True if a line in the script's call stack runs only on some ranks."""
    stack = frames(frame or sys._getframe(1))
    return any(one.f_lineno in under for one in stack for under in ranges(one.f_code.co_filename))


@cache
def ranges(path: str) -> list[range]:
    """Return the ranges of lines in a file of the script that run only on some ranks."""
    found = []
    for node in _nodes(path):
        if _by_rank(node):
            found.append(range(node.body[0].lineno, _end(node) + 1))
        held: Any = getattr(node, "body", None)
        body: list[ast.stmt] = held if isinstance(held, list) else []
        for one in body[:-1]:
            if _by_rank(one) and isinstance(one.body[-1], (ast.Return, ast.Continue)):
                found.append(range(_end(one) + 1, _end(body[-1]) + 1))
    return found


def _by_rank(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and not node.orelse and any(map(_asks, ast.walk(node.test)))


def _end(node: ast.stmt | ast.expr) -> int:
    return node.end_lineno or node.lineno


def _asks(node: ast.AST) -> bool:
    """Return True for a test of the rank: `rank == 0`, `rank != 0`, `not rank`, or a name such as `is_main_process`."""
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
        zero = node.comparators[0].value == 0 and isinstance(node.ops[0], (ast.Eq, ast.NotEq))
        return zero and bool(_RANK.search(_text(node.left).lower()))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return bool(_RANK.search(_text(node.operand).lower()))
    return bool(_MAIN.search(_name(node)))


def _text(node: ast.AST) -> str:
    """Return the text of a syntax tree; `…`, which is no variable's name, for a tree too deep, such as a sum of 400
    terms."""
    try:
        return ast.unparse(node)
    except RecursionError:
        return "…"


def _name(node: ast.AST) -> str:
    return str(getattr(node, "attr", getattr(node, "id", "")))


def _words(*nodes: ast.AST | None) -> set[str]:
    return _words_of(one for node in nodes if node for one in ast.walk(node))


def _words_of(nodes: Iterable[ast.AST]) -> set[str]:
    held = (getattr(one, _HELD[type(one)]) for one in nodes if type(one) in _HELD)
    return {word for word in held if isinstance(word, str)}


@cache
def _computed(path: str) -> list[tuple[set[str], set[str]]]:
    """Return (assigned variables, words in the assigned expression) for each assignment in a file. An assigned call
    counts only if the called function matches `_COMPUTED`."""
    found = [one for one in _nodes(path) if isinstance(one, ast.Assign)]
    computed = [one for one in found if not isinstance(one.value, ast.Call) or _COMPUTED.search(_name(one.value.func))]
    return [({_name(target) for target in one.targets} - {""}, _words(one.value)) for one in computed]


@cache
def _standing(path: str, pattern: re.Pattern[str]) -> set[str]:
    """Return the words in a file that match the pattern, and the variables computed from them."""
    known = {word for word in _words_of(_nodes(path)) if pattern.search(word)}
    for targets, words in 2 * _computed(path):  # twice, for variables that are computed from variables
        if known & words:
            known |= targets
    return known


@cache
def names_rank(path: str, line: int) -> bool:
    """Return True if this line may depend on the rank, by a test or by an argument such as a file name."""
    own, every = _standing(path, _OWN) | _standing(path, _MAIN), _nodes(path)
    around = (one for one in every if isinstance(one, (ast.stmt, ast.expr)) and one.lineno <= line <= _end(one))
    held = (part for one in around for part in ast.iter_child_nodes(one) if isinstance(part, (ast.expr, ast.keyword)))
    return len(every) == 1 or bool(own & _words(*held))


@cache
def cut(path: str) -> int:
    """Return the first line of a file that splits the data by rank and world size; 0 if there is none."""
    text = "".join(linecache.getlines(path))
    if not (_ANY_WORLD.search(text) or any(name in text for name in _BY_NODE)):
        return 0  # as most modules of a script, which take seconds to parse
    own, world = _standing(path, _OWN), _standing(path, _WORLD)

    def cuts(node: ast.AST) -> bool:
        rank: list[ast.AST | None] = []
        if isinstance(node, ast.Slice):
            rank = [node.lower]
        elif isinstance(node, ast.Compare) and any(isinstance(one, ast.Mod) for one in ast.walk(node.left)):
            rank = [*node.comparators]
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Call):
            rank = [node.slice]
        elif isinstance(node, ast.Call) and _CUTS.search(_name(node.func)):
            rank = [*node.args, *node.keywords]
        return bool(rank and own & _words(*rank) and world & _words(node)) or _name(node) in _BY_NODE

    return min((getattr(node, "lineno", 0) for node in _nodes(path) if cuts(node)), default=0)


@cache
def drawn(path: str) -> int:
    """Return the first line of a file that uses data drawn at random after seeding by rank; 0 if there is none."""
    if not _SEEDS.search("".join(linecache.getlines(path))):
        return 0
    nodes, made, own = _nodes(path), set[str](), _standing(path, _OWN)
    calls = [one for one in nodes if isinstance(one, ast.Call)]
    seeds = (one.lineno for one in calls if _SEEDS.search(_name(one.func)) and own & _words(*one.args, *one.keywords))
    if not (first := min(seeds, default=0)):
        return 0

    def draws(*parts: ast.AST) -> bool:
        inner = (one for part in parts for one in ast.walk(part) if isinstance(one, ast.Call))
        random = (one for one in inner if _DRAWS.search(_name(one.func)))
        return any(not {key.arg for key in one.keywords} & _OWN_SEED for one in random) or bool(made & _words(*parts))

    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) or getattr(node, "lineno", 0) > first:
            names, parts = _made(node)
            made |= {name for name in names if draws(*parts) and name not in ("", "self") and name[:2] != "__"}
    data = (one.lineno for one in calls if one.lineno > first and _DATA.search(_name(one.func)) and draws(*one.args))
    return min(data, default=0)


def _made(node: ast.AST) -> tuple[list[str], list[Any]]:
    """Return the names to which a statement assigns a value, and the syntax tree nodes that compute the value."""
    if isinstance(node, ast.Assign):
        return [_name(part) for target in node.targets for part in ast.walk(target)], [node.value]
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):  # as of shuffle
        return [_name(part) for part in node.value.args], [node.value]
    if isinstance(node, ast.ClassDef):
        methods = {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}
        return [node.name], [methods["__init__"]] if methods.keys() >= {"__init__", "__getitem__"} else []
    return ([node.name], [*node.body]) if isinstance(node, ast.FunctionDef) else ([], [])


def files(stack: Iterable[FrameType]) -> list[str]:
    """Return the paths of the script's files in a call stack, innermost first. Each is followed by the files that it
    imports from."""
    found: dict[str, None] = {}
    for frame in stack:
        # Of other objects `__name__` is not read: it may call a `__getattr__`, which may raise any error.
        every = frame.f_globals.values()
        names = (getattr(it, "__name__" if issubclass(type(it), ModuleType) else "__module__", "") for it in every)
        held = [sys.modules.get(name) for name in names if isinstance(name, str)]
        imported = sorted({getattr(one, "__file__", None) or "<none>" for one in held})
        found |= dict.fromkeys([frame.f_code.co_filename, *imported])
    return [path for path in found if is_script_file(path)]


def counter(path: str, line: int) -> tuple[str, int] | None:
    """Return (text, line) of a test such as `i % n == 0` of the count of a loop around this line; None if there is
    none. The test acts in every n-th turn, or ends the loop."""
    for loop in _nodes(path):
        if not isinstance(loop, ast.For) or not loop.lineno <= line <= _end(loop):
            continue
        iterated, names = _words(loop.iter), _words(getattr(loop.target, "elts", [loop.target])[0])
        if "islice" in iterated:
            return _text(loop.iter), loop.lineno
        if not {"enumerate", "range", "count"} & iterated or {"progress", "base_steps"} & iterated:
            continue
        for one in (one for one in ast.walk(loop) if isinstance(one, ast.If) and names & _words(one.test)):
            parts = (part for part in ast.walk(one.test) if isinstance(part, ast.BinOp))
            at_times = any(isinstance(part.op, ast.Mod) and names & _words(part.left) for part in parts)
            ends = any(isinstance(part, ast.Break) for part in one.body)
            if ends or (at_times and any(map(_acts, ast.walk(one)))):
                return _text(one.test), one.lineno
    return None


def divided(path: str, line: int, carried: Collection[str] = ()) -> tuple[str, int] | None:
    """Return (text, line) of a division such as `total / len(data)`; None if there is none. The innermost loop around
    this line must sum up `total`, and the division must follow that loop. Leaves out divisors that the loop changes,
    and sums in the variables `carried`."""
    loop = _innermost(path, line, (ast.For, ast.While))
    if loop is None:
        return None
    sums, changed = _sums(loop)
    sums = {one for one in sums if re.split(r"[.[]", one)[0] not in carried}
    computed = [(one.targets, _words(one.value)) for one in _nodes(path) if isinstance(one, ast.Assign)]
    lengths = {name for targets, words in computed if any(map(_LENGTH.search, words)) for name in map(_name, targets)}
    for node in _in_order(_innermost(path, line, _FUNCTIONS) or _nodes(path)[0]):
        if getattr(node, "lineno", 0) <= _end(loop):
            continue
        if isinstance(node, ast.Assign):
            targets, used = _stored([node]), _texts(node.value)
            sums -= targets - used
            changed |= targets if changed & used else set()
        for total, count in _division(node):
            by_length = any(_LENGTH.search(word) or word in lengths for word in _words(count))
            if by_length and sums & _texts(total) and not changed & _texts(count):
                return _text(node), getattr(node, "lineno", 0)
    return None


def _innermost(path: str, line: int, kinds: tuple[type[ast.stmt], ...]) -> ast.stmt | None:
    around = (one for one in _nodes(path) if isinstance(one, kinds) and one.lineno <= line <= _end(one))
    return max(around, key=lambda one: one.lineno, default=None)


def _sums(loop: ast.stmt) -> tuple[set[str], set[str]]:
    """Return the variables that a loop only adds to, and all variables that it changes."""
    inside = [*ast.walk(loop)]
    statements = [one for one in inside if isinstance(one, (ast.Assign, ast.AugAssign, ast.Expr))]
    added = {one: match[1] for one in statements if (match := _ADDED.fullmatch(_text(one)))}
    begun = _stored(one for one in statements if isinstance(one, ast.Assign) and one not in added)
    return {*added.values()} - begun, {*added.values()} | _stored([loop])


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function or file in the order of its text, without functions and classes in it."""
    left = [node]
    while left:
        yield (one := left.pop())
        inner = (each for each in ast.iter_child_nodes(one) if not isinstance(each, (*_FUNCTIONS, ast.ClassDef)))
        left += reversed([*inner])


def _texts(node: ast.AST) -> set[str]:
    return {_text(one) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute, ast.Subscript))}


def _stored(nodes: Iterable[ast.AST]) -> set[str]:
    every = (one for node in nodes for one in ast.walk(node))
    return {_text(one) for one in every if isinstance(getattr(one, "ctx", None), ast.Store)}


def _division(node: ast.AST) -> list[tuple[ast.expr, ast.expr]]:
    """Return (dividend, divisor) of a division, or of a call such as `job.mean(total, count)`; nothing for other
    nodes."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        return [(node.left, node.right)]
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Div):
        return [(node.target, node.value)]
    if isinstance(node, ast.Call) and _name(node.func) == "mean" and len(node.args) == 2:
        return [(node.args[0], node.args[1])]
    return []


def rate(path: str) -> int:
    """Return the last line of a file that sets a learning rate, `group["lr"] = …`; 0 if there is none."""
    items = (one for one in _nodes(path) if isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store))
    return max((one.lineno for one in items if _text(one.slice) == "'lr'"), default=0)


def _acts(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and bool(_ACTS.search(_name(node.func)))


@cache
def _loops(path: str) -> tuple[list[range], set[str]]:
    """Return the ranges of lines of a file's loops, and the variables to which loops assign."""
    loops = [one for one in _nodes(path) if isinstance(one, (ast.For, ast.While))]
    stored = (part for one in loops for part in ast.walk(one) if isinstance(part, ast.Name))
    names = {part.id for part in stored if isinstance(part.ctx, ast.Store)}
    return [range(one.lineno, _end(one) + 1) for one in loops], names


def renewed(frame: FrameType, name: str) -> bool:
    """Return True if a variable of the frame gets a new value in each turn of a loop. It is assigned in a loop, or is
    local to a function that a loop calls."""
    code = frame.f_code
    outer = frames(frame.f_back) if frame.f_back and name in code.co_varnames + code.co_cellvars else ()
    turns = (one.f_lineno in it for one in outer for it in _loops(one.f_code.co_filename)[0])
    return name in _loops(code.co_filename)[1] or any(turns)


@cache
def _kept_lines(path: str) -> list[tuple[int, str]]:
    """Return (line, name) of each count and best value in a file. Leaves out counts that each turn of a loop begins
    again. Names of attributes begin with a dot."""
    nodes = _nodes(path)
    given = {one: _text(one) for one in nodes if isinstance(one, (ast.Assign, ast.AnnAssign, ast.AugAssign))}
    turns = (one for loop in nodes if isinstance(loop, (ast.For, ast.While)) for one in loop.body)
    begun = {name for one in turns if one in given and not _COUNTED.match(given[one]) for name in _made(one)[0]}
    found = []
    for one, text in given.items():
        targets = one.targets if isinstance(one, ast.Assign) else [one.target]
        for each in (part for it in targets for part in (it, *getattr(it, "elts", ()))):
            if _BEST.search(_name(each)) or (_COUNTED.fullmatch(text) and _name(each) not in begun):
                found.append((one.lineno, "." * isinstance(each, ast.Attribute) + _name(each)))
    return found


def kept(code: CodeType) -> dict[str, int]:
    """Return the last line of each count (`n += 1`, `n = n + 1`) and best value in this code, by name. Names of
    attributes begin with a dot."""
    lines = {number for *_, number in code.co_lines()}
    return {name: number for number, name in sorted(_kept_lines(code.co_filename)) if number in lines}
