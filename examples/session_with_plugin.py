"""Run a fused model on the plugin EP in a program of your own.

    python examples/session_with_plugin.py FUSED.onnx

`deltafuse.session(path)` does all of this in one call; here it is step by step, for programs that make their
sessions themselves.
"""

from __future__ import annotations

import sys

import deltafuse
import onnxruntime as ort


def make_session(path: str) -> ort.InferenceSession:
    # Load the plugin library into ONNX Runtime. Once a process is enough; calling it again does nothing.
    deltafuse.register()

    # The plugin offers itself for each device that it has kernels for; take its CPU device here.
    name = deltafuse.get_ep_name()
    ours = {found.ep_metadata["deltafuse_device"]: found for found in ort.get_ep_devices() if found.ep_name == name}

    options = ort.SessionOptions()
    options.add_provider_for_devices([ours["cpu"]], {})
    # Have ONNX Runtime remember who got which node, so that the program can check it.
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = ort.InferenceSession(path, sess_options=options)
    # Without this, Python's InferenceSession answers an error by silently running everything on the CPU EP.
    session.disable_fallback()
    return session


def main(path: str) -> int:
    session = make_session(path)
    fused = [node for node in deltafuse.assignment(session) if node.domain == "deltafuse"]
    for node in fused:
        print(f"{node.op_type} {node.name}: {node.ep or 'inlined: ' + node.reason}")
    if not fused:
        print(f"{path} has no fused nodes: deltafuse fuse makes them")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
