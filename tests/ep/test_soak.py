"""A long life in one process: memory over many runs, registrations that come and go, threads, errors in between.

Each test runs in a Python of its own, so that a crash is a failure here and memory is not shared with other tests.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("library")

SETUP = """
import ctypes, gc, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
sys.path.insert(0, {tests!r})
import numpy as np
import onnxruntime as ort
import deltafuse
from deltafuse.discovery import get_library_path, refusals
from deltafuse.errors import OrtError
from deltafuse.lifetime import living_sessions, unregister
from ep.call import SMALL, call_model, draw, quiet, run

def make(model, threads=0, strict=True):
    options = quiet()
    # ThreadSanitizer does not see how onnxruntime's own pool hands work over: .ci/sanitize asks for runs without it.
    options.intra_op_num_threads = int(os.environ.get("DELTAFUSE_TEST_THREADS", threads))
    return deltafuse.session(model, device="cpu", sess_options=options, strict=strict)

def same(got, want):
    return got.keys() == want.keys() and all(got[name].tobytes() == want[name].tobytes() for name in want)

def resident():
    "KiB of this process in memory, without what is free already."
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

def growth(round, windows, rounds):
    "KiB by window of so many rounds. A leak shows in each of them, an arena that settles does not."
    sizes = [resident()]
    for _ in range(windows):
        for _ in range(rounds):
            round()
        sizes.append(resident())
    return " ".join(str(after - before) for before, after in zip(sizes, sizes[1:]))
"""


def in_a_process(code: str) -> str:
    program = SETUP.format(tests=str(Path(__file__).parents[1])) + textwrap.dedent(code)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("states", ["new", "in place"])
def test_ten_thousand_runs_grow_nothing(states: str) -> None:
    """1 MiB is allowed: a leak of 105 bytes a run would show."""
    out = in_a_process(
        f"""
        inputs = draw(SMALL, 2, 7)
        made = make(call_model(SMALL, inputs).SerializeToString())
        in_place = {states == "in place"}
        if in_place:
            inputs = draw(SMALL, 2, 1)
            values = {{name: ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x)) for name, x in inputs.items()}}
            binding = made.io_binding()
            for name, value in values.items():
                binding.bind_ortvalue_input(name, value)
            binding.bind_output("o")
            binding.bind_ortvalue_output("present_conv_state", values["conv_state"])
            binding.bind_ortvalue_output("final_state", values["initial_state"])
        def once():
            if in_place:
                made.run_with_iobinding(binding)
            else:
                run(made, SMALL, inputs)
        for _ in range(1000):
            once()
        before = resident()
        for _ in range(10000):
            once()
        print(resident() - before)
        """
    )
    assert int(out) < 1024, f"{out.strip()} KiB more after 10,000 runs"


def test_runs_of_changing_sizes_grow_nothing() -> None:
    """Lengths and batches that change at each run, with errors in between."""
    out = in_a_process(
        """
        cases = [draw(SMALL, 1 + i % 3, 1 + 13 * i % 97, i) for i in range(40)]
        made = make(call_model(SMALL, cases[0]).SerializeToString())
        def round():
            for inputs in cases:
                run(made, SMALL, inputs)
                try:
                    run(made, SMALL, inputs | {"beta": inputs["beta"][:, :0]})
                except Exception as error:
                    assert "beta has shape" in str(error), error
                else:
                    raise AssertionError("a wrong shape was taken")
        for _ in range(5):
            round()
        print(growth(round, 5, 10))
        """
    )
    windows = [int(size) for size in out.split()]
    assert min(windows) < 64 and sum(windows) < 8192, f"{windows} KiB more, by 400 runs and as many errors"


def test_a_hundred_registrations_come_and_go() -> None:
    out = in_a_process(
        """
        inputs = draw(SMALL, 1, 5)
        model = call_model(SMALL, inputs).SerializeToString()
        first = run(make(model), SMALL, inputs)
        library = get_library_path()
        def round():
            deltafuse.register()
            made = [make(model) for _ in range(3)]
            assert living_sessions(library) == 3
            assert all(same(run(one, SMALL, inputs), first) for one in made)
            del made
            assert living_sessions(library) == 0
            unregister()
            assert not [d for d in ort.get_ep_devices() if d.ep_name == deltafuse.get_ep_name()]
            unregister()  # once more does nothing
        for _ in range(10):
            round()
        print(growth(round, 6, 15))
        """
    )
    windows = [int(size) for size in out.split()]
    assert min(windows) < 128 and sum(windows) < 8192, f"{windows} KiB more, by 15 registrations and 45 sessions"


def test_unregistering_with_a_live_session_is_refused() -> None:
    in_a_process(
        """
        inputs = draw(SMALL, 1, 5)
        model = call_model(SMALL, inputs).SerializeToString()
        one, two = make(model), make(model)
        before = run(one, SMALL, inputs)
        for living, says in ((2, "2 sessions still use the plugin EP"), (1, "1 session still uses the plugin EP")):
            try:
                unregister()
            except OrtError as error:
                assert says in str(error), error
            else:
                raise AssertionError("unregistered under a live session")
            assert same(run(one, SMALL, inputs), before)
            assert deltafuse.register() and same(run(make(model), SMALL, inputs), before)
            two = None
        one = None
        unregister()
        """
    )


def test_registrations_end_while_other_threads_make_sessions() -> None:
    """onnxruntime frees its descriptions of the devices with a registration: no session may be half-made from them."""
    in_a_process(
        """
        inputs = draw(SMALL, 1, 5)
        model = call_model(SMALL, inputs).SerializeToString()
        first = run(make(model), SMALL, inputs)
        ended = []
        def work(_):
            for _ in range(15):
                try:
                    unregister()
                    ended.append(1)
                except OrtError as error:
                    assert "still use" in str(error), error
                assert same(run(make(model), SMALL, inputs), first)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert ended
        """
    )


def test_a_registration_by_another_name_is_not_ours_to_end() -> None:
    in_a_process(
        """
        inputs = draw(SMALL, 1, 5)
        model = call_model(SMALL, inputs).SerializeToString()
        ort.register_execution_provider_library("the program's", get_library_path())
        made = make(model)
        first = run(made, SMALL, inputs)
        del made
        try:
            unregister()
        except OrtError as error:
            assert "registered by another name than 'deltafuse'" in str(error), error
        else:
            raise AssertionError("it was not registered by this name")
        assert same(run(make(model), SMALL, inputs), first)
        ort.unregister_execution_provider_library("the program's")
        unregister()
        assert same(run(make(model), SMALL, inputs), first)
        """
    )


def test_a_fork_while_a_session_is_made_leaves_the_child_free() -> None:
    in_a_process(
        """
        import deltafuse.lifetime as lifetime
        deltafuse.register()
        with lifetime.making.one():
            child = os.fork()
            if child == 0:
                unregister()
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert make(call_model(SMALL, draw(SMALL, 1, 5)).SerializeToString())
        """
    )


def test_a_session_outlives_onnxruntimes_own_unregistering() -> None:
    """onnxruntime does not ask for live sessions: that must not crash, and the library can be registered again."""
    in_a_process(
        """
        from deltafuse.session import REGISTRATION_NAME
        inputs = draw(SMALL, 2, 40)
        model = call_model(SMALL, inputs).SerializeToString()
        kept = []
        for _ in range(5):
            kept.append(make(model))
            before = run(kept[-1], SMALL, inputs)
            ort.unregister_execution_provider_library(REGISTRATION_NAME)
            assert all(same(run(one, SMALL, inputs), before) for one in kept)
            deltafuse.register()
        assert living_sessions(get_library_path()) == 5
        while kept:
            kept.pop()
            assert living_sessions(get_library_path()) == len(kept)
        unregister()
        deltafuse.register()
        assert same(run(make(model), SMALL, inputs), before)
        """
    )


def test_many_threads_on_one_session_give_the_serial_bits() -> None:
    in_a_process(
        """
        cases = [draw(SMALL, 1 + i % 3, 1 + 11 * i, i) for i in range(12)]
        made = make(call_model(SMALL, cases[0]).SerializeToString(), threads=2)
        want = [run(made, SMALL, inputs) for inputs in cases]
        start = threading.Barrier(8)
        def work(worker):
            start.wait()
            for turn in range(60):
                i = (7 * worker + turn) % len(cases)
                assert same(run(made, SMALL, cases[i]), want[i]), (worker, turn, i)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
        """
    )


def test_many_sessions_at_once_give_the_serial_bits() -> None:
    """Threads that make a session, run it and drop it, all at the same time, the first registration included."""
    in_a_process(
        """
        cases = [draw(SMALL, 1 + i % 3, 1 + 11 * i, i) for i in range(6)]
        model = call_model(SMALL, cases[0]).SerializeToString()
        start = threading.Barrier(8)
        def work(worker):
            start.wait()
            results = []
            for _ in range(6):
                made = make(model, threads=1 + worker % 2)
                assert len(deltafuse.assignment(made).fused) == 1
                results.append([run(made, SMALL, inputs) for inputs in cases])
            return results
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(work, range(8)))
        serial = make(model)
        want = [run(serial, SMALL, inputs) for inputs in cases]
        assert all(same(got, right) for each in found for once in each for got, right in zip(once, want, strict=True))
        del serial
        assert living_sessions(get_library_path()) == 0
        """
    )


def test_refusals_of_sessions_made_at_once_stay_apart() -> None:
    in_a_process(
        """
        inputs = draw(SMALL, 1, 3)
        def refused(worker):
            model = call_model(SMALL, inputs)
            node = next(node for node in model.graph.node if node.domain == "deltafuse")
            node.name = f"kda{worker}"
            for attribute in node.attribute:
                if attribute.name == "qk_l2norm":
                    attribute.s = f"mean{worker}".encode()
            for _ in range(2):
                made = make(model.SerializeToString(), strict=False)
                found = deltafuse.assignment(made).refused
                assert len(found) == 1 and f"mean{worker}" in found[0].reason, (worker, found)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(refused, range(8)))
        gc.collect()
        assert refusals("") == []
        """
    )


def test_errors_in_a_run_leave_the_session_usable() -> None:
    """Errors from many threads, between good runs of others on the same session."""
    in_a_process(
        """
        inputs = draw(SMALL, 2, 9)
        made = make(call_model(SMALL, inputs).SerializeToString(), threads=2)
        want = run(made, SMALL, inputs)
        wrong = [
            {"beta": inputs["beta"][:, :-1]},
            {"gate": inputs["gate"][:1]},
            {"initial_state": inputs["initial_state"][:1]},
        ]
        def work(worker):
            for turn in range(40):
                bad = wrong[(worker + turn) % 3]
                try:
                    run(made, SMALL, inputs | bad)
                except Exception as error:
                    assert "'kda'" in str(error), error
                else:
                    raise AssertionError(f"{list(bad)} was taken")
                assert same(run(made, SMALL, inputs), want)
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(work, range(6)))
        try:
            made.run(None, {})
        except Exception as error:
            assert "q" in str(error)
        assert same(run(made, SMALL, inputs), want)
        """
    )
