"""Speaks the protocol of benchmarks/engine_worker.py without an engine; misbehaves as its JSON argument says."""

import json
import os
import sys
import time

settings = json.loads(sys.argv[1])
if settings.get("dies_at_start"):
    sys.exit("out of memory, said the fake")
print(json.dumps({"ready": True, "vllm": "0.0", "torch": "0.0", "threads": 1}), flush=True)
for line in sys.stdin:
    order = json.loads(line)
    with open(settings["journal"], "a") as journal:
        journal.write(f"{settings['name']} {len(order['prompts'])} {str(order['prompts']).replace(' ', '')}\n")
    if settings.get("dies_at_work"):
        sys.exit("a crash, said the fake")
    if settings.get("silent"):
        time.sleep(60)
    outputs = [[1] * order["output_tokens"] for _ in order["prompts"]]
    print(json.dumps({"seconds": settings["seconds"], "outputs": outputs, "pid": os.getpid()}), flush=True)
