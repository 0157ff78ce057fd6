#!/usr/bin/env python3
"""Instructions a weight of bakeoff.cu's loops on sm_87, by pipe. Needs NVRTC 12 and nvdisasm (pip: nvidia-cuda-nvrtc-cu12,
nvidia-cuda-nvcc); NVRTC and NVDISASM may name them. An argument names a file for the cubin; ARCH another architecture."""
import collections
import ctypes
import os
import re
import subprocess
import sys
import tempfile

here = os.path.dirname(os.path.abspath(__file__))
rtc = ctypes.CDLL(os.environ.get("NVRTC", "libnvrtc.so.12"))
source = open(os.path.join(here, "bakeoff.cu"), "rb").read()
handle = ctypes.c_void_p()
assert rtc.nvrtcCreateProgram(ctypes.byref(handle), source, b"bakeoff.cu", 0, None, None) == 0
options = [b"--gpu-architecture=sm_" + os.environ.get("ARCH", "87").encode(), b"-default-device"]
result = rtc.nvrtcCompileProgram(handle, len(options), (ctypes.c_char_p * len(options))(*options))
size = ctypes.c_size_t()
if result != 0:
    rtc.nvrtcGetProgramLogSize(handle, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    rtc.nvrtcGetProgramLog(handle, log)
    sys.exit(log.value.decode())
rtc.nvrtcGetCUBINSize(handle, ctypes.byref(size))
cubin = ctypes.create_string_buffer(size.value)
rtc.nvrtcGetCUBIN(handle, cubin)
path = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkstemp(suffix=".cubin")[1]
open(path, "wb").write(cubin.raw)
text = subprocess.run([os.environ.get("NVDISASM", "nvdisasm"), "-c", path], check=True, stdout=subprocess.PIPE, text=True).stdout

# Pipes of compute capability 8.x: half-rate and quarter-rate ones are what unpacking must spare.
PIPES = [("dp4a", r"IDP"), ("memory", r"LD|ST"), ("convert", r"F2F|I2F|F2I|HADD2\.F32|I2FP|MUFU"), ("float", r"F(FMA|MUL|ADD)"),
         ("integer", r".*")]
for name, body in re.findall(r"\.text\.(\w+):\n(.*?)(?=\n\.text\.|\n//-+|\Z)", text, re.S):
    code = re.findall(r"^(\.L_x_\d+):|/\*([0-9a-f]{4})\*/\s+(?:@!?U?P\d+ )?([A-Z0-9_.]+)([^;]*);", body, re.M)
    place = {label: i for i, (label, *_) in enumerate(code) if label}
    loops = []
    for i, (label, _, op, operands) in enumerate(code):
        to = re.search(r"\.L_x_\d+", operands) if op.startswith("BRA") else None
        if to and place.get(to[0], i) < i:
            loops.append([c[2] for c in code[place[to[0]]:i + 1] if c[2]])
    loops = [l for l in loops if any(op.startswith("IDP") for op in l)]
    if not loops:
        sys.exit(f"no loop in {name}")
    loop = min(loops, key=len)
    weights = sum(op.startswith("IDP") for op in loop) * 4 / 2  # a lane's; two dot products each
    pipes = collections.Counter(next(p for p, like in PIPES if re.match(like, op)) for op in loop)
    print(f"{name:18} {len(loop):3} instructions, {len(loop) / weights:.2f} a weight:",
          ", ".join(f"{p} {pipes[p] / weights:.2f}" for p, _ in PIPES))
