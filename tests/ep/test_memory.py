"""Memory: the EP's arena with a stand-in for the device, failed allocations, and what is taken before the first run."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import deltafuse
import onnxruntime as ort
import pytest
from deltafuse.custom_ops.kda.reference import reference, relative_error, tolerance

from .call import SMALL, call_model, draw, quiet, run

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("c++") or shutil.which("g++")
SCENARIOS = ("basics", "merging", "fragmentation", "same_sizes", "limit", "exhausted", "nothing_kept", "threads")


def compiled(folder: Path, name: str, sanitizers: str) -> Path:
    """The program, with sanitizers where the compiler has their libraries."""
    assert COMPILER
    program = folder / name
    sources = [str(HERE / "arena_check.cc"), str(ROOT / "plugin" / "ep" / "arena.cc")]
    command = [COMPILER, "-std=c++17", "-O1", "-g", "-pthread", *sources, "-o", str(program)]
    checked = [*command, f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all"]
    if subprocess.run(checked, capture_output=True).returncode == 0:
        return program
    subprocess.run(command, check=True, capture_output=True)
    return program


@pytest.fixture(scope="module")
def arena_check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    return compiled(tmp_path_factory.mktemp("arena"), "arena_check", "address,undefined")


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_arena(arena_check: Path, scenario: str) -> None:
    done = subprocess.run(
        [str(arena_check), scenario],
        capture_output=True,
        text=True,
        timeout=120,
        env={"ASAN_OPTIONS": "detect_leaks=0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


def test_arena_has_no_races(tmp_path: Path) -> None:
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    program = compiled(tmp_path, "arena_races", "thread")
    done = subprocess.run([str(program), "threads"], capture_output=True, text=True, timeout=120, env={})
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]


LIMITED = """
import resource, sys
sys.path.insert(0, {tests!r})
from dataclasses import replace
import numpy as np
import deltafuse
from ep.call import SMALL, call_model, draw, quiet, run

def limit(mib):
    "Leaves this process so much address space beyond what it has."
    with open("/proc/self/statm") as file:
        have = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (have + (mib << 20), resource.RLIM_INFINITY))

def make(model):
    return deltafuse.session(model.SerializeToString(), device="cpu", sess_options=quiet(), strict=True)
"""


def limited(code: str) -> str:
    """What a Python of its own prints, so that the limit holds for nobody else."""
    if not sys.platform.startswith("linux"):
        pytest.skip("limits of the address space are set as on Linux")
    if "san.so" in os.environ.get("LD_PRELOAD", ""):
        pytest.skip("a sanitizer's allocator ends the process where there is no memory")
    program = LIMITED.format(tests=str(HERE.parent)) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.usefixtures("library")
def test_a_failed_allocation_names_the_node_and_the_session_lives() -> None:
    """2 GiB of states, where 1 GiB can be had: the error tells the output and its bytes; runs around it are good."""
    out = limited(
        """
        config = replace(SMALL, num_heads=1, num_v_heads=4, head_dim=256, head_v_dim=512, conv_width=0,
                         conv_state_width=0, conv_activation="none", has_conv_state=False,
                         has_present_conv_state=False, has_initial_state=False)
        small, one = draw(config, 1, 2), draw(config, 1, 1)
        large = {name: np.repeat(x, 1024, 0) if x.shape[0] == 1 and x.ndim == 3 else x for name, x in one.items()}
        made = make(call_model(config, small))
        before = run(made, config, small)
        limit(1024)
        for _ in range(3):
            try:
                run(made, config, large)
            except Exception as error:
                print(str(error).replace("\\n", " "))
            else:
                raise AssertionError("2 GiB were found")
            after = run(made, config, small)
            assert all(after[name].tobytes() == before[name].tobytes() for name in before)
        """
    )
    lines = out.splitlines()
    assert len(lines) == 3
    for line in lines:
        assert f"node 'kda': no memory for output final_state of {1024 * 4 * 256 * 512 * 4} bytes" in line
        assert "in use" in line


@pytest.mark.usefixtures("library")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="the workspace is large where several cores share a head")
def test_a_workspace_that_cannot_be_had_fails_when_the_session_is_made() -> None:
    out = limited(
        """
        config = replace(SMALL, num_heads=1, num_v_heads=1, head_dim=8, head_v_dim=512)
        inputs = draw(config, 1, 2)
        shape = dict(inputs)
        tokens = 1 << 20
        for name in ("q", "k", "v", "g", "beta", "gate"):
            shape[name] = np.lib.stride_tricks.as_strided(
                inputs[name], (1, tokens, inputs[name].shape[2]), (0, 0, inputs[name].strides[2]))
        model = call_model(config, shape, dynamic=False)
        limit(512)
        try:
            make(model)
        except Exception as error:
            print(str(error).replace("\\n", " "))
        else:
            raise AssertionError("2 GiB were found")
        made = make(call_model(config, inputs))
        assert run(made, config, inputs)["o"].shape == (1, 2, 512)
        """
    )
    assert "node 'kda': no memory for a workspace of" in out, out


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("dynamic", [False, True])
def test_known_shapes_take_the_workspace_before_the_first_run(dynamic: bool, tmp_path: Path) -> None:
    inputs = draw(SMALL, 2, 7)
    options = quiet()
    options.enable_profiling = True
    options.profile_file_prefix = str(tmp_path / "profile")
    model = call_model(SMALL, inputs, dynamic=dynamic).SerializeToString()
    made = deltafuse.session(model, device="cpu", sess_options=options, strict=True)
    run(made, SMALL, inputs)
    events = json.loads(Path(made.end_profiling()).read_text())
    grown = [event["args"].get("mem_arena_held_delta") for event in events if event["name"] == "kda_kernel_time"]
    if grown == [None]:
        pytest.skip(f"the profile of onnxruntime {ort.__version__} does not tell how an arena grows")
    assert len(grown) == 1 and (int(grown[0]) > 0) is dynamic


@pytest.mark.usefixtures("library")
def test_no_arena_of_ours_on_the_cpu() -> None:
    """ONNX Runtime supplies the memory there; what the library says of arenas is well-formed."""
    from deltafuse.discovery import get_library_path, load_library
    from deltafuse.session import _tag

    inputs = draw(SMALL, 1, 2)
    made = deltafuse.session(call_model(SMALL, inputs).SerializeToString(), device="cpu", sess_options=quiet())
    got = run(made, SMALL, inputs)
    want = reference(SMALL, inputs)
    assert all(relative_error(got[name], want[name]) <= tolerance("cpu", "float32") for name in want)
    memory = load_library(get_library_path()).deltafuse_memory
    memory.restype = ctypes.c_char_p
    assert _tag(made) and json.loads(memory(_tag(made).encode())) == []
