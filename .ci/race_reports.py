"""Prints ThreadSanitizer's reports in which the library itself touches the memory; exits with 1 when there are any.

ONNX Runtime and Python are not built with ThreadSanitizer, so it does not see how they synchronise and reports their
own accesses to their own memory, now and then from calls that pass through the library. What counts is who makes one of
the two accesses: the first frame that is neither the sanitizer's nor the C or C++ library's.

    python .ci/race_reports.py PREFIX     # reads the logs PREFIX.*
"""

from __future__ import annotations

import re
import sys
from glob import glob
from pathlib import Path

LIBRARY = "libdeltafuse_ep"
RUNTIMES = ("libtsan", "libc.so", "libc-", "libm.so", "libstdc++", "libgcc_s")
ACCESS = re.compile(r"^ {2}(?:Previous )?(?:atomic )?(?:read|write)\b", re.IGNORECASE)


def accesses(report: str) -> list[list[str]]:
    """The frames of each access, innermost first."""
    found = []
    for paragraph in report.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if line and not line.startswith("WARNING")]
        if lines and ACCESS.match(lines[0]):
            found.append([line for line in lines[1:] if line.lstrip().startswith("#")])
    return found


def is_ours(report: str) -> bool:
    """Whether the library makes one of the accesses. A report of another kind (a thread that leaks, a lock that is
    misused) counts wherever it names the library."""
    if "data race" not in report:
        return LIBRARY in report
    for frames in accesses(report):
        first = next((frame for frame in frames if not any(name in frame for name in RUNTIMES)), "")
        if LIBRARY in first:
            return True
    return False


def main(prefix: str) -> int:
    texts = [Path(name).read_text(errors="replace") for name in sorted(glob(prefix + ".*"))]
    reports = [
        report for text in texts for report in re.split(r"^=+$", text, flags=re.MULTILINE) if "WARNING" in report
    ]
    ours = [report for report in reports if is_ours(report)]
    for report in ours:
        print(report.strip(), end="\n\n")
    print(f"{len(ours)} of {len(reports)} reports are of the library's own accesses")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
