#!/usr/bin/env python3
"""Instructions a weight in each loop over groups of a compiled bake-off: `./count.py ./bakeoff`, `./count.py ./bakeoff-arm`."""
import re
import subprocess
import sys

DOTS = {"vpdpbusd": 64, "vpmaddubsw": 32, "sdot": 16}  # weights of one instruction's register
program = sys.argv[1]
objdump = "aarch64-linux-gnu-objdump" if b"\xb7\0" == open(program, "rb").read(20)[18:20] else "objdump"
text = subprocess.run([objdump, "-d", "--no-show-raw-insn", program], check=True, stdout=subprocess.PIPE, text=True).stdout
for name, body in re.findall(r"<(\w+_(?:planar|interleaved)_\w+)>:\n(.*?)\n\n", text, re.S):
    code = [(int(a, 16), m, o) for a, m, o in re.findall(r"^ *([0-9a-f]+):\t(\S+)\s*(.*)$", body, re.M)]
    loops = []
    for i, (at, mnemonic, operands) in enumerate(code):
        to = re.search(r"([0-9a-f]+) <", operands)
        if to and mnemonic[0] in "jb" and int(to[1], 16) <= at:
            loop = [m for a, m, _ in code[:i + 1] if a >= int(to[1], 16)]
            loops.append(loop)
    counts = []
    for loop in loops:
        dots = [m for m in loop if m in DOTS]
        if dots:
            counts.append((len(loop), len(loop) / (len(dots) * DOTS[dots[0]] / 2)))  # two dot products a weight
    if counts:
        length, a_weight = min(counts)
        print(f"{name:26} {length:4} instructions in the loop, {a_weight:.3f} a weight")
