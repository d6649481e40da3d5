"""An Olive workflow with the pass DeltaFuse: fused blocks, then 4-bit weights by Olive, then a look at the result.

    pip install 'deltafuse[olive]'
    python examples/olive_workflow.py MODEL.onnx OUT_FOLDER

From a shell the same is: olive run --config olive_workflow.json --package-config "$(deltafuse olive-config)"
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OLIVE_DISABLE_TELEMETRY", "1")

from deltafuse.olive_config import package_config
from deltafuse.run import run_model
from olive.workflows import run


def main(model: str, folder: str) -> int:
    config = json.loads(Path(__file__).with_name("olive_workflow.json").read_text())
    out = Path(folder).resolve()
    config["input_model"]["model_path"] = str(Path(model).resolve())
    config |= {"output_dir": str(out), "cache_dir": str(out / "cache")}

    # Not Olive's default package config with one entry, but all of it and one more.
    made = run(config, package_config=package_config())
    if not made.has_output_model():
        print("Olive made no model: its log says why", file=sys.stderr)
        return 1

    report = json.loads((out / "deltafuse_report.json").read_text())
    for region in report["regions"]:
        print(f"{region['op']} {region['name']}: {region['status']}, error {region['proof']['error']:.1e}")
    _, found = run_model(out / "model.onnx")
    print(f"{report['nodes_before']} nodes before DeltaFuse, {report['nodes_after']} after")
    print(f"likeliest next tokens: {found['next_tokens']}")
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2]))
