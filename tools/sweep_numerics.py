"""Runs the numeric tests with each CPU library that is built and that this processor runs, with
many seeds and several numbers of threads, and writes what came of it.

    python tools/sweep_numerics.py                    # 20 seeds at 2 threads, 2 at 1 and 16
    python tools/sweep_numerics.py --share 0.1        # a tenth of the cases, others for each seed
    python tools/sweep_numerics.py --seeds 1 --few 0  # one seed for each library
    python tools/sweep_numerics.py --seeds 1 --few 0 --lower  # what the test suite has not run

Numeric tests are those of the files that use the tolerance rule. Torch is lowered together with
braze: ATEN_CPU_CAPABILITY, which both follow, leaves MKL and oneDNN as they are. A run with these
left high is added for each library that is not the best.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
# library -> ATEN_CPU_CAPABILITY, MKL_ENABLE_INSTRUCTIONS, ONEDNN_MAX_CPU_ISA; None: as it comes
LEVELS = {
    "generic": ("default", "SSE4_2", "SSE41"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", None, None),
}
# No sums that are rounded, or the same sums again.
OTHERS = "not opcheck and not gradcheck and not compile and not bad_input and not export"


def environment(isa, threads, stock_high=False):
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    names = ("ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA")
    for name, level in zip(names[:1] if stock_high else names, LEVELS[isa], strict=False):
        if level is not None:
            env[name] = level
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "python"), env.get("PYTHONPATH", "")])
    return env


def output_of(code, env):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def libraries():
    """The libraries to try, the best last, and why the others are not."""
    env = environment("generic", 1)
    del env["ATEN_CPU_CAPABILITY"]  # torch obeys it without asking the processor
    code = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    best = {"AVX512": 3, "AVX2": 2}.get(output_of(code, env).strip(), 1)
    isas, others = list(LEVELS)[:best], dict.fromkeys(list(LEVELS)[best:], "not for this processor")
    code = "from braze import _lib; print(_lib.cpu_isa)"
    for isa in list(isas):
        if output_of(code, environment(isa, 1)).strip() != isa:
            isas.remove(isa)
            others[isa] = "not built"
    return isas, others


def numeric_files():
    rule = ("assert_by_rule", "check_against_stock", "conv2d_common")
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [str(f) for f in files if any(name in f.read_text() for name in rule)]


def run(isa, threads, seeds, share, stock_high=False):
    """One process of pytest; a row of the result."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", OTHERS]
        command += [
            "--tb=line",
            f"--junitxml={report}",
            f"--share={share}",
            f"--seeds=0-{seeds - 1}",
        ]
        env = environment(isa, threads, stock_high)
        result = subprocess.run(
            command + numeric_files(), cwd=ROOT, env=env, capture_output=True, text=True
        )
        if not report.exists():
            raise SystemExit(result.stdout + result.stderr)
        suite = ElementTree.parse(report).getroot().find("testsuite")
    bad = [c for c in suite if c.find("failure") is not None or c.find("error") is not None]
    failures = {f"{c.get('classname')}::{c.get('name')}": c[0].get("message")[:300] for c in bad}
    # pytest exits with 1 where tests failed, with 2 and more where it could not run them.
    if result.returncode > 1:
        failures["pytest"] = result.stdout[-2000:] + result.stderr[-2000:]
    return {
        "library": isa,
        "stock": "high" if stock_high else "lowered",
        "threads": threads,
        "seeds": seeds,
        "cases": int(suite.get("tests")) - int(suite.get("skipped")),
        "failed": len(failures),
        "seconds": round(time.monotonic() - start),
        "failures": failures,
    }


def plan(isas, seeds, few):
    for isa in isas:
        yield {"isa": isa, "threads": 2, "seeds": seeds}
        for threads in (1, 16) if few else ():
            yield {"isa": isa, "threads": threads, "seeds": few}
        if few and isa != isas[-1]:
            yield {"isa": isa, "threads": 2, "seeds": few, "stock_high": True}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=20, help="at 2 threads")
    parser.add_argument(
        "--few", type=int, default=2, help="seeds at 1 and 16 threads; 0: no such run"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the cases, others for each seed"
    )
    parser.add_argument(
        "--lower",
        action="store_true",
        help="not the best library: the test suite itself runs it, seed 0 with 2 threads",
    )
    parser.add_argument("--out", default="build/numerics.json")
    args = parser.parse_args()
    isas, others = libraries()
    for isa, reason in others.items():
        print(f"{isa}: not tried, {reason}")
    columns = ("library", "stock", "threads", "seeds", "cases", "failed", "seconds")
    print(*(f"{name:>8}" for name in columns), flush=True)
    rows = []
    for settings in plan(isas, args.seeds, args.few):
        if args.lower and settings["isa"] == isas[-1]:
            continue
        rows.append(run(share=args.share, **settings))
        print(*(f"{rows[-1][name]:>8}" for name in columns), flush=True)
        for name, message in rows[-1]["failures"].items():
            print(f"  {name}: {message}", flush=True)
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(
        json.dumps({"share": args.share, "not_tried": others, "runs": rows}, indent=1) + "\n"
    )
    return any(row["failed"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
