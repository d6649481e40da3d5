"""Times fusing a deep model: 42 layers of small widths, 35 of them KDA, grown from the layers of one export.

    python tests/bench/bench_fuse.py --out result.json

Prints the time of each pass, the nodes before and after, and the process's peak memory.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import onnx_ir as ir
from deltafuse.fusions.pipeline import fuse_model

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from exports import library
from exports.grow import grow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=42, help="a multiple of 6: five of KDA, one of attention")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    export = library.export("bailing_prefill_dynauto_batched")
    model = ir.from_proto(grow(export.proto(), [0, 0, 0, 0, 0, 1] * (args.layers // 6)))
    start = time.perf_counter()
    report = fuse_model(model)
    seconds = time.perf_counter() - start
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    result: dict[str, Any] = {
        "benchmark": "bench_fuse",
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "layers": args.layers,
        "kda": report.count("kda"),
        "nodes": [report.nodes_before, report.nodes_after],
        "seconds": round(seconds, 2),
        "peak_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "passes": {p.name: round(p.seconds, 3) for p in report.passes},
    }
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
