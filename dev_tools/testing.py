"""``dev.py test``: the tests in .venv, the host tests in a ComfyUI, and one summary of both."""

from __future__ import annotations

import ast
import os
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from .comfyui import HOW_TO, ComfyUI, find_comfyui, find_older_comfyui
from .environment import ROOT, Environment, read_requirements
from .process import DevError, capture, run

RUNNER = Path(__file__).with_name("run_pytest.py")
WORKER_SITE = Path(__file__).with_name("worker_site")
NOTHING_COLLECTED = 5
ONE_PROCESS = {"-n", "-s", "--capture=no", "--pdb", "--trace", "--collect-only", "--co"}


@dataclass
class Report:
    """The counts of a pytest run.

    Attributes:
        code: pytest's exit code.
        not_run: ``{reason: number}`` of the skipped tests.
    """

    code: int
    passed: int = 0
    failed: int = 0
    not_run: Counter[str] = field(default_factory=Counter)


def read_report(code: int, path: Path) -> Report:
    """Read pytest's JUnit file; a run that ended without writing one counts as one failure."""
    if not path.exists():
        return Report(code, failed=0 if code in (0, NOTHING_COLLECTED) else 1)
    report = Report(code)
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            report.failed += 1
        elif skipped is not None and skipped.get("type") != "pytest.xfail":
            report.not_run[skipped.get("message", "skipped")] += 1
        else:
            report.passed += 1
    return report


def split_arguments(arguments: list[str], root: Path) -> tuple[list[str], list[str] | None, list[str] | None]:
    """Split pytest's arguments into ``(options, paths outside tests/host, paths in it)``.

    Without any path both lists are empty: everything runs. A part that the paths leave out is None.
    """
    options: list[str] = []
    core: list[str] = []
    host: list[str] = []
    tests = root / "tests"
    for argument in arguments:
        path = Path(os.path.abspath(argument.partition("::")[0]))
        if argument.startswith("-") or not path.exists() or not path.is_relative_to(tests):
            options.append(argument)
        elif path.is_relative_to(tests / "host"):
            host.append(argument)
        else:
            core.append(argument)
    if not core and not host:
        return options, [], []
    return options, core or None, host or None


def count_test_functions(path: Path) -> int:
    """Return the number of test functions in a file, without importing it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(isinstance(node, ast.FunctionDef) and node.name.startswith("test_") for node in ast.walk(tree))


def _pytest(python: Path, extra_path: str, arguments: list[str], root: Path, env: dict[str, str]) -> Report:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, RUNNER, extra_path, f"--rootdir={root}", f"--junitxml={report}", *arguments]
        return read_report(run(command, cwd=root, env=env), report)


def extras_for(comfyui: ComfyUI, environment: Environment, root: Path) -> str:
    """Return the folders, joined as in PATH, that bring a ComfyUI's Python what the host tests need and it lacks.

    Nothing is installed into the ComfyUI: pytest, bitsandbytes and torchao go to folders in .venv.
    """
    groups = read_requirements((root / "requirements-dev.txt").read_text(encoding="utf-8"))
    pytest = [line for line in groups["required"] if line.startswith("pytest==")]
    xdist = [line for line in groups["required"] if line.startswith("pytest-xdist==")]
    wanted = {
        # exceptiongroup and tomli: pytest needs them below Python 3.11, which the ComfyUI may have and .venv not.
        "pytest": ("host-pytest", [*pytest, "exceptiongroup", "tomli"], []),
        "xdist": ("host-xdist", [*xdist, "execnet"], ["--no-deps"]),
    }
    for requirement in groups["backends"]:
        library = requirement.partition("==")[0]
        if library not in ("comfy-kitchen", *environment.missing):  # a ComfyUI brings the comfy-kitchen that it runs
            wanted[library] = (f"host-{library}", [requirement], ["--no-deps"])
    folders = []
    for module, (name, packages, options) in wanted.items():
        if capture([comfyui.python, "-c", f"import {module}"]).returncode == 0:
            continue
        target = environment.folder / name
        if not (target / module).is_dir():
            print(f"dev.py: installing {module} for the host tests into {target}", flush=True)
            pip = [environment.python, "-m", "pip", "install", "--no-input", "--disable-pip-version-check", *options]
            result = capture([*pip, "--target", target, *packages], timeout=600)
            if result.returncode:
                raise DevError(f"{module} for the host tests could not be installed:\n{result.stdout[-1500:]}")
        folders.append(str(target))
    return os.pathsep.join(folders)


def parallel(options: list[str], paths: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return what makes a full run use every core: pytest's options, and variables for its processes.

    A selected file, or an option that wants one process, runs in one.
    """
    processes = min(os.cpu_count() or 1, 4)
    if paths or processes == 1 or ONE_PROCESS.intersection(options) or any(o.startswith("-n") for o in options):
        return [], {}
    # Two processes with a thread for every core each spend most of their time waiting for one another.
    threads = max(1, (os.cpu_count() or 1) // processes)
    return ["-n", str(processes)], {"OMP_NUM_THREADS": str(threads)}


def _host_tests(environment: Environment, paths: list[str], options: list[str], root: Path) -> Report:
    workers, env = parallel(options, paths)
    if workers:
        workers += ["--dist", "loadgroup"]  # tests/host/conftest.py says which tests share what they load
    selection = [*options, *(paths or [str(root / "tests" / "host")])]
    comfyui = find_comfyui(root)
    if comfyui is None:
        return _count_host_tests(environment, selection, root)
    print(f"\ndev.py: host tests in {comfyui.folder} with {comfyui.python}", flush=True)
    extra = extras_for(comfyui, environment, root)
    env |= {"COMFYUI_PATH": str(comfyui.folder), "COMFYUI_PYTHON": str(comfyui.python), "PYTHONNOUSERSITE": "1"}
    env["QUANTCORE_MISSING_BACKENDS"] = ",".join(environment.missing)
    older = find_older_comfyui()
    if older is not None:  # tests/host/test_older_host.py runs some of the tests there too
        env |= {"COMFYUI_OLDER_PATH": str(older.folder), "COMFYUI_OLDER_PYTHON": str(older.python)}
        env["QUANTCORE_OLDER_EXTRAS"] = extras_for(older, environment, root)
    if workers:
        env |= {"PYTHONPATH": str(WORKER_SITE), "QUANTCORE_EXTRA_PATH": extra}
    return _pytest(comfyui.python, extra, [*workers, *selection], root, env)


def _count_host_tests(environment: Environment, selection: list[str], root: Path) -> Report:
    collect = ["--collect-only", "-q", f"--rootdir={root}", *selection]
    result = capture([environment.python, RUNNER, "", *collect])
    if result.returncode not in (0, NOTHING_COLLECTED):
        raise DevError(f"the host tests cannot be collected:\n{result.stdout[-3000:]}")
    count = sum("::" in line for line in result.stdout.splitlines())
    return Report(0, not_run=Counter({f"host tests, because no ComfyUI was found: {HOW_TO}": count}))


def run_tests(environment: Environment, arguments: list[str], root: Path = ROOT) -> int:
    """Run the tests and print the summary; its last line is ``N passed, M failed``. Returns the exit code."""
    options, core, host = split_arguments(arguments, root)
    reports: dict[str, Report] = {}
    if core is not None:
        workers, env = parallel(options, core)
        env["QUANTCORE_MISSING_BACKENDS"] = ",".join(environment.missing)
        selection = core or [str(root / "tests"), f"--ignore={root / 'tests' / 'host'}"]
        reports["in .venv"] = _pytest(environment.python, "", [*workers, *options, *selection], root, env)
        for library in environment.missing:
            files = (root / "tests").glob(f"test_{library.replace('-', '_')}*.py")
            count = sum(map(count_test_functions, files))
            reports["in .venv"].not_run[f"test functions, because {library} has no release for this platform"] += count
    if host is not None and (root / "tests" / "host").is_dir():
        try:
            reports["in ComfyUI"] = _host_tests(environment, host, options, root)
        except DevError as error:
            print(f"dev.py: {error}", flush=True)
            reports["in ComfyUI"] = Report(1, failed=1)
    return summarize(reports)


def summarize(reports: dict[str, Report]) -> int:
    """Print what ran, what did not and why, and the totals; return the exit code."""
    print("\nSummary")
    for name, report in reports.items():
        print(f"  {name}: {report.passed} passed, {report.failed} failed")
    for report in reports.values():
        for reason, count in sorted(report.not_run.items()):
            if count:
                print(f"  NOT RUN: {count} {reason}" if "because" in reason else f"  NOT RUN: {count} tests: {reason}")
    passed = sum(r.passed for r in reports.values())
    failed = sum(r.failed for r in reports.values())
    print(f"{passed} passed, {failed} failed", flush=True)
    codes = [r.code for r in reports.values()]
    bad = [code for code in codes if code not in (0, NOTHING_COLLECTED)]
    if bad or failed:
        return bad[0] if bad else 1
    # A filter such as -k may leave one part without tests, but not both.
    return 0 if 0 in codes else NOTHING_COLLECTED
