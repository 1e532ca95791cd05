"""The template in examples/custom_op builds by itself, outside braze, and passes its own tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import CUDA_HOME

EXAMPLE = Path(__file__).parent.parent / "examples" / "custom_op"


@pytest.fixture(scope="module")
def build_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("torch_extensions")


def test_example(device, build_folder):
    if device == "cuda" and (torch.version.cuda is None or CUDA_HOME is None):
        pytest.skip("no nvcc to build the CUDA kernels with")
    # ninja may be installed beside this Python without being on PATH.
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    env = os.environ | {"TORCH_EXTENSIONS_DIR": str(build_folder), "PATH": path}
    if device == "cuda":
        major, minor = torch.cuda.get_device_capability()
        env["TORCH_CUDA_ARCH_LIST"] = f"{major}.{minor}"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", device, "."]
    result = subprocess.run(command, cwd=EXAMPLE, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "skipped" not in result.stdout, result.stdout
