"""What quantizing holds in memory: experts of real size, from a file to a file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from exports import library
from onnx import TensorProto, helper

#: Of the weights that are quantized: 3 GB for 8 GB.
SHARE = 3 / 8

PROGRAM = """
import json, pathlib, re, sys
import onnxruntime
import deltafuse
from deltafuse.fusions import pipeline
def most():
    # not ru_maxrss: that of the process which started this one counts there
    return int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
start = most()
made = deltafuse.fuse(sys.argv[1], sys.argv[2], quantize=sys.argv[3]).quantization
peak = most()
print(json.dumps([start, peak, made.bytes_before, made.bytes_after]))
"""


@pytest.fixture(scope="module")
def layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 experts of 2560 and 768 channels in float16, 0.7 GiB, in a file of their own with holes for zeros."""
    path = tmp_path_factory.mktemp("layer") / "layer.onnx"
    model = library.real_layer("moe_1", zeros=True)
    offset = 0
    with (path.parent / "layer.data").open("wb") as file:
        for tensor in model.graph.initializer:
            size = len(tensor.raw_data)
            if size < 1 << 17:
                continue
            some = 0.02 * np.random.default_rng(offset).standard_normal(1024)
            file.seek(offset)
            file.write(some.astype(np.float16).tobytes())
            tensor.ClearField("raw_data")
            tensor.data_location = onnx.TensorProto.EXTERNAL
            for key, value in (("location", "layer.data"), ("offset", offset), ("length", size)):
                tensor.external_data.add(key=key, value=str(value))
            offset += -(-size // 4096) * 4096
        file.truncate(offset)
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 products of 1024 by 2048 in float32, 0.5 GiB, one after the other."""
    path = tmp_path_factory.mktemp("dense") / "dense.onnx"
    nodes, tensors, size, x = [], [], 4 * 1024 * 2048, "x"
    for i in range(64):
        tensor = TensorProto(name=f"w{i}", data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        tensor.dims.extend([1024, 2048] if i % 2 == 0 else [2048, 1024])
        for key, value in (("location", "dense.data"), ("offset", i * size), ("length", size)):
            tensor.external_data.add(key=key, value=str(value))
        tensors.append(tensor)
        nodes.append(helper.make_node("MatMul", [x, f"w{i}"], [x := "y" if i == 63 else f"h{i}"]))
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 1024]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "dense", ports[:1], ports[1:], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    with (path.parent / "dense.data").open("wb") as file:
        file.write(np.random.default_rng(0).standard_normal(4096).astype(np.float32).tobytes())
        file.truncate(64 * size)
    return path


def measured(path: Path, folder: Path, quantize: str) -> tuple[int, int, int]:
    """KiB of memory beyond what the imports took, and bytes of weights before and after."""
    environment = {**os.environ, "TMPDIR": str(folder)}
    command = [sys.executable, "-c", PROGRAM, str(path), str(folder / "out.onnx"), quantize]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    start, peak, before, after = json.loads(done.stdout.splitlines()[-1])
    return peak - start, before, after


def test_experts_stream_from_file_to_file(layer: Path, tmp_path: Path) -> None:
    """Fusing, its proof, quantizing and saving, together."""
    more, before, after = measured(layer, tmp_path, "experts=int4:128")
    assert before > 700 << 20
    assert after < 0.3 * before
    assert more << 10 < SHARE * before


def test_other_weights_stream_too(dense: Path, tmp_path: Path) -> None:
    more, before, after = measured(dense, tmp_path, "dense=int8:channel")
    assert before == 64 * 4 * 1024 * 2048
    assert after < 0.3 * before
    assert more << 10 < SHARE * before
