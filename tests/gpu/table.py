"""Prints bench.py's JSON lines as a short table. usage: table.py FILE"""
import json, sys

for line in open(sys.argv[1]):
    if not line.startswith("{"):
        continue
    d = json.loads(line)
    if "what" in d:
        print(f"{d['shape']:5s} {d['what']:9s} {d['ms']:7.4f} min {d['min_ms']:7.4f} b2b {d['b2b_ms']:7.4f}  {d['tflops']:6.1f} TF  dense {d['share_of_dense']:.3f}/{d['b2b_share']:.3f}"
              f"  base {d['over_baseline']:.3f}/{d['b2b_over_baseline']:.3f}")
    elif "kernels_us" in d:
        print(f"{d['shape']:5s} {d['lib']:9s} relerr {d['relerr']} rows {d['rows']} schedule {d['schedule_us']} " + " ".join(f"{k.replace('_kernel', '')}={us}x{n}" for k, (us, n) in d["kernels_us"].items()))
