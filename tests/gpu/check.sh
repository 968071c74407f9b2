#!/usr/bin/env bash
# Proves the CUDA and NCCL path on a machine with one GPU, within five minutes. Prints what it saw; exits 0 if all held.
# Needs the package installed with a CUDA build of torch; uses .venv if there is one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
"$python" -c 'import torch; assert torch.cuda.is_available(), "no CUDA device"; print(torch.__version__, torch.cuda.get_device_name(0))'
timeout 120 "$python" tests/gpu/check.py
storage=$(mktemp -d)
trap 'rm -rf "$storage"' EXIT
[ -d data/stdlib ] || "$python" jobs/stdlib_text.py
for name in first second; do
  timeout 120 "$python" -m worldline.cli.main run jobs/stdlib-gpt.yaml --storage "$storage" --set "name=$name" \
    --set steps=30 --set world.max=1 --set world.gpus_per_worker=1
done
"$python" -m worldline.cli.main verify first second --storage "$storage"
echo "the GPU check passed"
