"""Runs a module's own tests against a sample of its mutants: see docs/mutation.md.

    python tests/tools/kill.py --module compose --sample 160 --seed 0 --out compose.csv

Tests are collected and run once as they are, which says which of them pass over which line and
leaves the session's small models built. Then each mutant has a fork of this process: the code of
the changed function takes the place of the old one wherever it is held, and those tests run that
pass over the changed lines, until one fails.
"""

import argparse
import ast
import csv
import gc
import os
import select
import signal
import sys
import time
from collections import defaultdict
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

# One thread, since a fork of a process with more of them may hang.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}

import pytest
from _pytest.runner import runtestprotocol
from coverage import Coverage
from mutants import BLUNT, MODULES, SOURCES, Mutant, mutants_of_all, sample

TESTS = Path(__file__).parents[1]
FIELDS = ("module", "name", "function", "before", "after", "outcome", "by", "seconds")
DEAD = ("killed", "timeout")
_PATIENCE = 10.0  # a mutant may take so many times as long as its tests do, and this many seconds


class Forks:
    """A plugin of pytest: in the place of its loop over tests, one over mutants."""

    def __init__(self, module: str, mutants: list[Mutant], slowest: float) -> None:
        self.module, self.mutants, self.slowest = module, mutants, slowest
        self.rows: list[dict[str, Any]] = []
        self.failed: list[str] = []
        self.reasons: dict[str, str] = {}
        self.seconds: dict[str, float] = defaultdict(float)
        files = [str(SOURCES / f"{file}.py") for file in MODULES[module][0]]
        self.coverage = Coverage(data_file=None, include=files, config_file=False)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._context("setup", item)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> None:
        self._context("call", item)

    def _context(self, when: str, item: pytest.Item) -> None:
        if self.coverage is not None:
            self.coverage.switch_context(f"{when} {item.nodeid}")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
            text = str(report.longrepr).strip().splitlines()
            told = [line[1:].strip() for line in text if line.startswith("E ")]
            self.reasons[report.nodeid] = (told or text or [""])[0][:100]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = session.items
        self.coverage.start()
        for item, following in zip(items, [*items[1:], _Above(items[-1])], strict=True):
            self._run(item, following)
        self.coverage.stop()
        if self.failed:
            raise RuntimeError(f"these fail without any change: {self.failed}")
        slow = [name for name, took in self.seconds.items() if took > self.slowest]
        os.write(_terminal, f"{len(items)} tests, {len(slow)} too slow: {slow}\n".encode())
        tests = _tests_by_line(self.coverage, items)
        self.coverage = None
        by_name = {item.nodeid: item for item in items}
        places = {item.nodeid: place for place, item in enumerate(items)}
        self.held = _Held()
        gc.freeze()  # forks then copy less
        for mutant in self.mutants:
            names = set()
            for line in {*range(mutant.lines[0], mutant.lines[1] + 1), mutant.lines[2]}:
                names |= tests[mutant.file, line]
            quick = [name for name in names if self.seconds[name] <= self.slowest]
            chosen = [by_name[name] for name in sorted(quick, key=places.__getitem__)]
            self._judge(mutant, self._cheap_files_first(chosen))
        return True

    def _cheap_files_first(self, items: list[pytest.Item]) -> list[pytest.Item]:
        cost: dict[str, float] = defaultdict(float)
        for item in items:
            cost[item.nodeid.partition("::")[0]] += self.seconds[item.nodeid]

        def order(item: pytest.Item) -> tuple[float, str, float]:
            file = item.nodeid.partition("::")[0]
            return cost[file], file, self.seconds[item.nodeid]

        return sorted(items, key=order)

    def _run(self, item: pytest.Item, following: Any) -> None:
        for report in runtestprotocol(item, nextitem=following, log=False):
            self.pytest_runtest_logreport(report)

    def _judge(self, mutant: Mutant, items: list[pytest.Item]) -> None:
        start = time.perf_counter()
        clean = sum(self.seconds[item.nodeid] for item in items)
        outcome, by = "no test", ""
        if items:
            outcome, by = self._fork(mutant, items, _PATIENCE * (1 + clean))
        took = round(time.perf_counter() - start, 1)
        row = (self.module, mutant.name, mutant.function, mutant.before, mutant.after)
        self.rows.append(dict(zip(FIELDS, (*row, outcome, by, took), strict=True)))
        shown = f"{outcome:9} {took:6.1f} s  {mutant.name}  {mutant.before!r} -> {mutant.after!r}"
        os.write(_terminal, f"{shown} {by}\n".encode())

    def _fork(self, mutant: Mutant, items: list[pytest.Item], limit: float) -> tuple[str, str]:
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.setpgid(0, 0)
            try:
                os.write(writing, self._outcome(mutant, items).encode())
            finally:
                os._exit(0)
        os.close(writing)
        ready, _, _ = select.select([reading], [], [], limit)
        told = os.read(reading, 4096).decode(errors="replace") if ready else "timeout"
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        outcome, _, by = (told or "killed the process died").partition(" ")
        return outcome, by

    def _outcome(self, mutant: Mutant, items: list[pytest.Item]) -> str:
        """Put a mutant in its place and run tests until one fails; called in the fork."""
        try:
            self.held.put(mutant)
        except Exception as error:
            return f"error {error}"
        for place, item in enumerate(items):
            following = items[place + 1] if place + 1 < len(items) else _Above(item)
            self._run(item, following)
            if self.failed:
                name = item.nodeid.partition("::")[2]
                return f"killed {name}: {next(iter(self.reasons.values()))}"
        return "survived"


class _Above:
    """Stands for a test of another file, so that what belongs to the session stays built."""

    def __init__(self, item: pytest.Item) -> None:
        self.item = item

    def listchain(self) -> list[Any]:
        return [node for node in self.item.listchain() if not isinstance(node, _INNER)]


_Cached = type(cache(len))
_INNER = (pytest.Module, pytest.Class, pytest.Function)


def _tests_by_line(coverage: Coverage, items: list[pytest.Item]) -> Any:
    """Return the names of tests by source and line; who shares a fixture shares its lines."""
    sharing: dict[str, set[str]] = {}
    for item in items:
        own = _own_fixtures(item)
        sharing[item.nodeid] = {
            other.nodeid
            for other in items
            if other.path == item.path and own & _own_fixtures(other)
        }
    tests: dict[tuple[str, int], set[str]] = defaultdict(set)
    data = coverage.get_data()
    for path in data.measured_files():
        file = str(Path(path).relative_to(SOURCES).with_suffix(""))
        for line, contexts in data.contexts_by_lineno(path).items():
            for context in contexts:
                when, _, name = context.partition(" ")
                tests[file, line] |= {name} if when == "call" else {name} | sharing.get(name, set())
    for found in tests.values():
        found.discard("")
    return tests


def _own_fixtures(item: pytest.Item) -> set[str]:
    """Return the fixtures of a test that its own file defines and that outlive one test."""
    known = item._fixtureinfo.name2fixturedefs
    return {
        name
        for name, defined in known.items()
        if defined[-1].scope in ("module", "class") and str(defined[-1].baseid).endswith(".py")
    }


class _Held:
    """Functions of the sources by file and name, and caches of results, found before any fork."""

    def __init__(self) -> None:
        self.functions: dict[tuple[str, str], list[FunctionType]] = defaultdict(list)
        self.caches = []
        for one in gc.get_objects():
            if type(one) is FunctionType and one.__code__.co_filename.startswith(str(SOURCES)):
                code = one.__code__
                self.functions[code.co_filename, code.co_qualname].append(one)
            elif type(one) is _Cached and str(one.__module__).startswith("wvprobe"):
                self.caches.append(one)

    def put(self, mutant: Mutant) -> None:
        """Give every function object that has the old code the new one, and the new defaults."""
        path = str(SOURCES / f"{mutant.file}.py")
        code = _code_of(compile(mutant.code, path, "exec"), mutant.function)
        node: Any = ast.parse(mutant.code)
        for name in mutant.function.split("."):
            node = next(one for one in node.body if getattr(one, "name", "") == name)
        found = self.functions[path, code.co_qualname]
        if not found:
            raise LookupError("no such function")
        for function in found:
            function.__code__ = code
            _set_defaults(function, node.args)
        for cached in self.caches:
            cached.cache_clear()  # of what the code before had to say


def _code_of(code: CodeType, name: str) -> CodeType:
    for part in name.split("."):
        found = [one for one in code.co_consts if isinstance(one, CodeType) and one.co_name == part]
        code = found[-1]
    return code


def _set_defaults(function: FunctionType, arguments: ast.arguments) -> None:
    def value(node: ast.expr) -> Any:
        return eval(compile(ast.Expression(node), "default", "eval"), function.__globals__)

    function.__defaults__ = tuple(map(value, arguments.defaults)) or None
    named = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    function.__kwdefaults__ = {one.arg: value(node) for one, node in named if node is not None}


def main() -> None:
    """Judge a sample of one module's mutants and write what became of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--module", choices=list(MODULES), required=True)
    parser.add_argument("--sample", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="a CSV of an earlier run: its survivors alone")
    parser.add_argument("--select", default="", help="as pytest's -k: some of the tests alone")
    parser.add_argument("--slowest", type=float, default=4.0, help="seconds a test may take")
    parser.add_argument("--out", required=True)
    given = parser.parse_args()
    if given.only:
        with open(given.only, encoding="utf-8") as file:
            rows = [row for row in csv.DictReader(file) if row["outcome"] not in DEAD]
        alive = {(row["name"], row["before"], row["after"]) for row in rows}
        every = mutants_of_all(given.module)
        mutants = [one for one in every if (one.name, one.before, one.after) in alive]
    else:
        mutants = sample(given.module, given.sample, given.seed)
    forks = Forks(given.module, mutants, given.slowest)
    files = [str(TESTS / f"test_{name}.py") for name in MODULES[given.module][1]]
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--no-summary"]
    start = time.perf_counter()
    chosen = ["-m", "not slow and not real_model", "-k", given.select]
    code = pytest.main([*quiet, *chosen, *files], plugins=[forks])
    if code:
        sys.exit(f"pytest ended with {code}")
    with open(given.out, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(forks.rows)
    _tell(forks.rows, time.perf_counter() - start)


def _tell(rows: list[dict[str, Any]], seconds: float) -> None:
    for name, blunt in (("all", None), ("arguments", True), ("values", False)):
        some = [row for row in rows if blunt is None or _is_blunt(row) == blunt]
        dead = sum(row["outcome"] in DEAD for row in some)
        print(f"{name}: {dead} of {len(some)} killed, {dead / max(1, len(some)):.1%}")
    print(f"{seconds:.0f} s")


def _is_blunt(row: dict[str, Any]) -> bool:
    return row["name"].partition(" ")[2].partition("/")[0] in BLUNT


_terminal = os.dup(1)

if __name__ == "__main__":
    main()
