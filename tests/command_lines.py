"""Runs a script with several command lines in one process, so that JAX starts once."""

import contextlib
import importlib.util
import io
import json
import pathlib
import subprocess
import sys
import traceback
from typing import NamedTuple

ROOT = pathlib.Path(__file__).parents[1]


class Result(NamedTuple):
    """What a command line gave."""

    returncode: int
    stdout: str
    stderr: str


def run(script, *arguments, timeout=600):
    """Runs a script of experiments/ as from a shell, with the tests' cache."""
    return subprocess.run(
        [
            sys.executable,
            ROOT / "experiments" / script,
            "--platform=cpu",
            f"--compilation_cache={ROOT / '.cache' / 'jax'}",
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )


def run_each(script, argument_lists, timeout=300):
    """Results of a script of experiments/ for each list of arguments, in order."""
    lists = [[str(argument) for argument in arguments] for arguments in argument_lists]
    process = subprocess.run(
        [sys.executable, __file__, ROOT / "experiments" / script],
        input=json.dumps(lists),
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=ROOT,
    )
    assert process.returncode == 0, process.stderr
    return [Result(*result) for result in json.loads(process.stdout)]


def assert_refused(result, match):
    """Code 2 and a message, before any work."""
    assert result.returncode == 2
    assert match in result.stderr
    assert "Traceback" not in result.stderr
    assert not result.stdout.strip()


def _run(module, arguments):
    """One call as from a shell: flags are as at the start before and after it."""
    from _command_line import run_command
    from absl.testing import flagsaver

    stdout, stderr, code = io.StringIO(), io.StringIO(), 0
    sys.argv = [module.__file__, *arguments]
    with (
        flagsaver.flagsaver(),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            run_command(module._run)
        except SystemExit as stop:
            code = stop.code
        except BaseException:
            traceback.print_exc()
            code = 1
    return Result(code or 0, stdout.getvalue(), stderr.getvalue())


def _main():
    path = pathlib.Path(sys.argv[1])
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    results = [_run(module, arguments) for arguments in json.load(sys.stdin)]
    print(json.dumps(results))


if __name__ == "__main__":
    _main()
