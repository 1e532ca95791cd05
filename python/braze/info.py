"""The bug-report page: what was built, what is loaded, what is missing and what to do about it.

Every part is probed on its own, so that one that is broken does not hide the others.
"""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parent

# Fused multiply-adds per clock and SM, from NVIDIA's architecture white papers: on the CUDA cores
# (fp64, fp32) and on the tensor cores without sparsity (tf32, bf16).
_FMAS = {
    (8, 0): {"fp64": 32, "fp32": 64, "tf32": 512, "bf16": 1024},
    (8, 6): {"fp64": 2, "fp32": 128, "tf32": 256, "bf16": 512},
    (8, 9): {"fp64": 2, "fp32": 128, "tf32": 256, "bf16": 512},
    (9, 0): {"fp64": 64, "fp32": 128, "tf32": 1024, "bf16": 2048},
    (10, 0): {"fp64": 64, "fp32": 128, "tf32": 2048, "bf16": 4096},
    (12, 0): {"fp64": 2, "fp32": 128, "tf32": 256, "bf16": 512},
}


class Info(dict):
    """The findings as a dict; printed, they are the page."""

    def __str__(self):
        return "\n".join(_lines(self))

    __repr__ = __str__


def info():
    """What a bug report needs, as a dict that prints as a page.

    Keys: ``braze``, ``python``, ``torch``, ``build`` (what setup.py recorded), ``loaded`` (the
    native libraries), ``cpu``, ``devices`` (one dict per GPU: SMs, clocks, memory, bandwidth and
    peak rates at the highest clock), ``vendor`` (cuBLAS and cuDNN), ``tuned`` (how many choices of
    kernels are in effect, by origin) and ``missing`` (sentences). A part that could not be found
    out holds ``{"error": ...}``.
    """
    page = Info()
    for name, probe in [
        ("braze", _braze),
        ("python", _python),
        ("torch", _torch),
        ("build", _build),
        ("loaded", _loaded),
        ("cpu", _cpu),
        ("devices", _devices),
        ("vendor", _vendor),
        ("tuned", _tuned),
    ]:
        try:
            page[name] = probe()
        except Exception as error:
            page[name] = {"error": f"{type(error).__name__}: {error}"}
    page["missing"] = _missing(page)
    return page


def commit():
    """The commit of the source tree that braze is imported from, or None outside one."""
    root = _PACKAGE.parent.parent
    if not (root / "setup.py").exists() or not shutil.which("git"):
        return None
    out = subprocess.run(
        ["git", "-C", os.fspath(root), "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
    )
    return out.stdout.strip() or None


def peak_rates(name, capability, sm_count, clock_hz):
    """Peak rates in FLOP/s by precision, {} for an architecture that is not in the table.

    GeForce boards run 16-bit and TF32 products with fp32 sums at half the rate of their siblings.
    """
    rates = {k: 2 * v * sm_count * clock_hz for k, v in _FMAS.get(tuple(capability), {}).items()}
    if "GeForce" in name:
        rates |= {k: rates[k] / 2 for k in ("tf32", "bf16") if k in rates}
    return rates


def _braze():
    from braze import __version__

    return {"version": __version__, "path": os.fspath(_PACKAGE), "commit": commit()}


def _python():
    return {
        "version": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }


def _torch():
    import torch

    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn and f"{cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}",
        "path": os.path.dirname(torch.__file__),
    }


def _build():
    from braze import _lib

    return _lib.build_info()


def _loaded():
    from braze import _lib

    if _lib.load_error is not None:
        return {"error": str(_lib.load_error)}
    return {
        "cpu_isa": _lib.cpu_isa,
        "cuda": _lib.cuda_library is not None,
        "cuda_missing": _lib.cuda_missing,
        "kernels": sum(
            len(library.kernels())
            for library in (_lib.ops_library, _lib.cuda_library)
            if library is not None
        ),
    }


def processor(cpu):
    """A processor as tables of results call it: of machines with one name those without AVX-512 are
    others, and those of Intel's without AMX.

    Args:
        cpu: ``braze.info()["cpu"]``.
    """
    instructions = " with AVX2" if cpu["capability"] == "AVX2" else ""
    has_amx = cpu.get("amx", True)  # of readings before this was noted
    if cpu["capability"] == "AVX512" and cpu["name"].startswith("Intel") and not has_amx:
        instructions = " without AMX"
    return f"{cpu['name']}{instructions}, {cpu['threads']} threads"


def _cpu():
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "name": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "amx": any(line.startswith("flags") and " amx_bf16" in line for line in lines),
    }


def _devices():
    import torch

    return [_device(i) for i in range(torch.cuda.device_count())]


def _device(index):
    import torch

    from braze import _lib

    properties = torch.cuda.get_device_properties(index)
    device = {
        "name": properties.name,
        "capability": [properties.major, properties.minor],
        "memory_bytes": properties.total_memory,
        "sm_count": properties.multi_processor_count,
    }
    if _lib.cuda_library is None:
        return device
    a = _lib.cuda_library.device_attributes(index)
    return device | {
        "sm_clock_mhz": a["sm_clock_khz"] / 1e3,
        "memory_clock_mhz": a["memory_clock_khz"] / 1e3,
        "l2_bytes": a["l2_bytes"],
        "shared_bytes_per_block": a["shared_bytes_per_block"],
        # Two transfers a clock.
        "bandwidth": 2e3 * a["memory_clock_khz"] * a["memory_bus_bits"] / 8,
        "peak": peak_rates(
            properties.name, device["capability"], a["sm_count"], 1e3 * a["sm_clock_khz"]
        ),
    }


def _vendor():
    from braze import _lib

    return _lib.cuda_library.vendor() if _lib.cuda_library is not None else {}


def _tuned():
    from braze import _lib, _tuned

    if _lib.load_error is not None:
        return {}
    # (Those of the GPUs are there: finding out about devices has started CUDA.)
    measured = [entry[3] for entry in _tuned.entries()]
    folders = {"path": os.fspath(_tuned.user_folder())} if any(measured) else {}
    return {"built_in": measured.count(False), "measured": measured.count(True), **folders}


def _missing(page):
    """What is not there, each with what to do about it."""
    sentences = []
    if "error" in page["loaded"]:
        sentences.append(f"braze does not load: {page['loaded']['error']}")
    elif page["loaded"]["cuda_missing"]:
        sentences.append(f"no CUDA kernels: {page['loaded']['cuda_missing']}")
    if page["torch"].get("cuda") and not page["devices"]:
        sentences.append(
            "torch sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES; the driver has to be "
            f"new enough for CUDA {page['torch']['cuda']}"
        )
    headers = page["build"].get("vendor_headers", {})
    if not all(headers.values()):
        absent = ", ".join(name for name, found in headers.items() if not found)
        cuda = page["torch"].get("cuda") or page["build"].get("cuda") or "13"
        sentences.append(
            f"built without the headers of {absent}, so those backends are left out: `pip install "
            f"--no-deps -r requirements-build-cuda{cuda.split('.')[0]}.txt` and rebuild"
        )
    for module, package, purpose in [
        ("matplotlib", "matplotlib", "the plot of `braze mnist`"),
        ("rich", "rich", "the progress bar and table of `braze mnist`"),
        ("numpy", "numpy", "reading data sets, which `import braze` includes"),
        ("platformdirs", "platformdirs", "the folder of the caches, which `import braze` asks for"),
        ("sklearn", "scikit-learn", "digits where MNIST cannot be downloaded"),
    ]:
        if importlib.util.find_spec(module) is None:
            sentences.append(f"no {package}, which is for {purpose}: `pip install {package}`")
    return sentences


def _lines(page):
    for section, content in page.items():
        if section == "missing":
            yield "missing"
            yield from (f"  - {sentence}" for sentence in content or ["nothing"])
        elif section == "devices" and isinstance(content, list):
            yield "devices" + ("" if content else ": no GPU")
            for i, device in enumerate(content):
                yield f"  cuda:{i}"
                yield from (f"    {line}" for line in _device_lines(device))
        elif content:
            yield section
            yield from (f"  {key}: {_plain(value)}" for key, value in content.items())


def _device_lines(device):
    major, minor = device["capability"]
    yield f"{device['name']}, compute capability {major}.{minor}"
    yield f"memory {device['memory_bytes'] / 2**30:.1f} GiB, {device['sm_count']} SMs"
    if "bandwidth" not in device:
        return
    yield (
        f"clocks: SM {device['sm_clock_mhz']:.0f} MHz, memory {device['memory_clock_mhz']:.0f} MHz"
    )
    yield (
        f"L2 {device['l2_bytes'] / 2**20:.0f} MiB, shared memory up to "
        f"{device['shared_bytes_per_block'] / 1024:.0f} KiB per block"
    )
    rates = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in device["peak"].items())
    yield f"peak: {device['bandwidth'] / 1e12:.2f} TB/s; TFLOP/s: {rates or 'unknown architecture'}"


def _plain(value):
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "none" if value is None else value
