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
made = deltafuse.fuse(sys.argv[1], sys.argv[2], require={"moe": 1}, quantize=sys.argv[3]).quantization
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


def test_experts_stream_from_file_to_file(layer: Path, tmp_path: Path) -> None:
    """Fusing, its proof, quantizing and saving, together."""
    arguments = [str(layer), str(tmp_path / "out.onnx"), "experts=int4:128"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    start, peak, before, after = json.loads(done.stdout.splitlines()[-1])
    assert before > 700 << 20
    assert after < 0.3 * before
    assert (peak - start) << 10 < SHARE * before, f"{peak - start} KiB beyond the {start} KiB of the imports"
